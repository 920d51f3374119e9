"""Third pass: the memory mechanisms that make each rank fit, and every rank's memory by component."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner import constants
from planner.cost import ADAMW_BYTES, GRADIENT_BYTES, MASTER_BYTES, Rank
from planner.ledger import Ledger
from planner.ranks import elements_of, owned_by, rank_facts
from schemas.document import reading
from schemas.form import Json

Mechanisms = tuple[str, ...]
_STATE = ("masters", "gradients", "muon_momentum", "adamw_state")


@dataclass(frozen=True)
class Candidate:
    """One rank under one set of mechanisms: its predicted peak in bytes, and its time (None: rates unknown)."""

    mechanisms: Mechanisms
    peak: float
    seconds: float | None


def fit(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the mechanisms: exact ones rank by rank, those that alter an update for the whole fleet."""
    ledger = Ledger(draft)
    cpu = all(device["kind"] == "cpu" for device in ledger.draft["fleet"]["devices"].values())
    overhead = constants.ALLOCATOR_OVERHEAD["cpu" if cpu else "cuda"]
    ledger.put("/fit/allocator_overhead", overhead.reading())
    ledger.put("/fit/process_bytes", constants.PROCESS_BYTES.reading())
    _Search(ledger, request, account).decide()
    for place in range(len(ledger.draft["ranks"])):
        _memory(ledger, account, place, cpu)
    return ledger.draft


class _Search:
    """The exact search over sets of mechanisms. The set of a fleet is small: 2^mechanisms candidates a rank."""

    def __init__(self, ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
        self.ledger = ledger
        self.rows: Mapping[str, Mapping[str, Json]] = account["mechanisms"]
        self.off = request["fit"] in (None, "off")
        self.asked = None if request["fit"] is None else request["fit_policy"] or "cheapest"
        self.in_order = self.asked == "in-order"
        entries = ledger.draft["ranks"]
        self.ranks = [rank_facts(ledger.draft, account, place) for place in range(len(entries))]
        self.shapes = [(entry["batch"]["chosen"], entry["seq"]["chosen"]) for entry in entries]
        self.limits = [entry["memory"]["limit"]["value"] for entry in entries]

    def decide(self) -> None:
        fleet, chosen = self._chosen()
        why = "--fit is off" if self.off else self._reason(fleet)
        outcome = "default" if self.off else "granted"
        asked = None if self.off else self.asked
        self.ledger.decide("/fit/mechanisms", asked, list(fleet), why, outcome=outcome)
        for place, candidate in enumerate(chosen):
            own = [name for name in candidate.mechanisms if self.rows[name]["scope"] == "rank"]
            self.ledger.decide(
                f"/ranks/{place}/mechanisms",
                asked,
                own,
                why if self.off else self._fits(place, candidate),
                outcome=outcome,
                inputs=[f"/ranks/{place}/memory/limit"],
                rejected=[] if self.off else self._rejected(place, fleet, candidate),
            )

    def _chosen(self) -> tuple[Mechanisms, list[Candidate]]:
        if self.off:
            return (), [self._weigh(place, ()) for place in range(len(self.ranks))]
        if self.in_order or any(rank.rates is None for rank in self.ranks):
            return self._engage_in_order()
        return self._cheapest()

    def _cheapest(self) -> tuple[Mechanisms, list[Candidate]]:
        """The sets with the least time of the slowest rank; of equals, the fewest mechanisms."""
        best: tuple[tuple[float, int], Mechanisms, list[Candidate]] | None = None
        for fleet in _subsets(self._names("fleet")):
            picks = [self._best_of_rank(place, fleet) for place in range(len(self.ranks))]
            found = [pick for pick in picks if pick is not None]
            if len(found) < len(picks):
                continue
            time = max(pick.seconds or 0.0 for pick in found)
            key = (time, len(fleet) + sum(len(pick.mechanisms) for pick in found))
            if best is None or key < best[0]:
                best = (key, fleet, found)
        if best is None:
            return self._everything()
        return best[1], best[2]

    def _best_of_rank(self, place: int, fleet: Mechanisms) -> Candidate | None:
        candidates = [self._weigh(place, (*fleet, *own)) for own in _subsets(self._names("rank", place))]
        fitting = [item for item in candidates if self._holds(place, item)]
        return min(fitting, key=lambda item: (item.seconds or 0.0, len(item.mechanisms)), default=None)

    def _engage_in_order(self) -> tuple[Mechanisms, list[Candidate]]:
        """One mechanism after the other in the account's order, each rank's own only while that rank does not fit."""
        fleet: Mechanisms = ()
        own: list[Mechanisms] = [()] * len(self.ranks)
        for name, row in [("", {"scope": ""}), *self.rows.items()]:
            if row["scope"] == "fleet":
                fleet = (*fleet, name)
            elif row["scope"] == "rank":
                own = [
                    (*held, name)
                    if name in self._names("rank", place) and not self._fits_with(place, fleet, held)
                    else held
                    for place, held in enumerate(own)
                ]
            if all(self._fits_with(place, fleet, held) for place, held in enumerate(own)):
                break
        return fleet, [self._weigh(place, (*fleet, *held)) for place, held in enumerate(own)]

    def _everything(self) -> tuple[Mechanisms, list[Candidate]]:
        # Nothing fits: the draft engages all there is, and the refusal names each component that is left.
        fleet = self._names("fleet")
        return fleet, [self._weigh(place, (*fleet, *self._names("rank", place))) for place in range(len(self.ranks))]

    def _names(self, scope: str, place: int | None = None) -> Mechanisms:
        kinds = {self.ranks[place].kind} if place is not None else {rank.kind for rank in self.ranks}
        return tuple(name for name, row in self.rows.items() if row["scope"] == scope and kinds <= set(row["devices"]))

    def _weigh(self, place: int, mechanisms: Mechanisms) -> Candidate:
        rank, (b, t) = self.ranks[place], self.shapes[place]
        return Candidate(
            mechanisms,
            rank.peak(b, t, mechanisms),
            None if rank.rates is None else rank.compute_seconds(b, t, mechanisms),
        )

    def _holds(self, place: int, candidate: Candidate) -> bool:
        return self.limits[place] is None or candidate.peak <= self.limits[place]

    def _fits_with(self, place: int, fleet: Mechanisms, own: Mechanisms) -> bool:
        return self._holds(place, self._weigh(place, (*fleet, *own)))

    def _reason(self, fleet: Mechanisms) -> str:
        how = "engaged in order until every rank fits" if self.in_order else "of the sets that fit, the least time"
        if fleet and all(not self._fits_with(place, (), ()) for place in range(len(self.ranks))):
            return f"{how}; {'; '.join(self.rows[name]['why'] for name in fleet)}"
        return how

    def _fits(self, place: int, candidate: Candidate) -> str:
        limit = self.limits[place]
        verdict = (
            "no limit is known" if limit is None else f"{'within' if candidate.peak <= limit else 'OVER'} {limit} B"
        )
        return f"peak {candidate.peak:.4g} B, {verdict}"

    def _rejected(self, place: int, fleet: Mechanisms, chosen: Candidate) -> list[dict[str, Json]]:
        rows = []
        for own in _subsets(self._names("rank", place)):
            other = self._weigh(place, (*fleet, *own))
            if set(other.mechanisms) == set(chosen.mechanisms):
                continue
            row: dict[str, Json] = {"option": list(own), "saves_bytes": round(chosen.peak - other.peak)}
            row["why"] = (
                "not needed, and no faster" if self._holds(place, other) else f"peak {other.peak:.4g} B is over"
            )
            if other.seconds is not None and chosen.seconds is not None:
                row["costs_seconds"] = other.seconds - chosen.seconds
            rows.append(row)
        return rows


def _subsets(names: Sequence[str]) -> list[Mechanisms]:
    """All subsets, smallest first, each in the order of ``names``."""
    return [subset for size in range(len(names) + 1) for subset in itertools.combinations(names, size)]


def _memory(ledger: Ledger, account: Mapping[str, Json], place: int, cpu: bool) -> None:
    """Put entry ``place``'s memory by component, both peaks and, on a CPU, what the process will hold."""
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    rank = rank_facts(ledger.draft, account, place)
    mechanisms = [*ledger.value("/fit/mechanisms"), *entry["mechanisms"]["chosen"]]
    found = rank.memory(entry["batch"]["chosen"], entry["seq"]["chosen"], mechanisms)
    total, adamw = "/workload/parameters/total", "/workload/parameters/adamw"
    memory = f"{base}/memory"

    def put(name: str, inputs: list[str], why: str, measurable: bool = False) -> None:
        ledger.compute(f"{memory}/{name}", "B", lambda *_: found[name], inputs, why, measurable=measurable)

    put("masters", [total], f"{MASTER_BYTES} B an element: fp32 master weights", True)
    put("gradients", [total], f"{GRADIENT_BYTES} B an element: fp32 gradients, kept from step to step", True)
    _momentum(ledger, account, place, rank, mechanisms, found["muon_momentum"])
    put("adamw_state", [adamw], f"{ADAMW_BYTES} B an element: two fp32 moments", True)
    shape = ["/workload/digest", f"{base}/batch", f"{base}/seq", f"{base}/dtype", f"{base}/mechanisms"]
    put("activations", shape, "highest bytes alive in forward and backward, counted on the meta build")
    exchange = ["/exchange/reduce_dtype"] if "reduce_dtype" in ledger.draft["exchange"] else ["/exchange/backend"]
    put(
        "buckets",
        [total, *exchange],
        "a narrower copy of the gradients while they are reduced; gradients lie in fp32 buckets",
    )
    put(
        "update",
        ["/workload/digest", "/workload/config/ns_dtype"],
        "temporaries of the update: the stacks' work, updates as sent and received, AdamW's",
    )
    overhead = "/fit/allocator_overhead"
    state = [f"{memory}/{name}" for name in _STATE]
    if rank.kind == "cuda":
        state.append(f"{memory}/workspace")
        ledger.put(f"{memory}/workspace", constants.GPU_WORKSPACE_BYTES.reading())
    backward = [*state, f"{memory}/activations", f"{memory}/buckets", overhead]
    ledger.compute(
        f"{memory}/backward_peak", "B", _sum_times_last, backward, "state + activations + buckets", measurable=True
    )
    optimizer = [*state, f"{memory}/update", overhead]
    ledger.compute(f"{memory}/optimizer_peak", "B", _sum_times_last, optimizer, "state + update", measurable=True)
    both = [f"{memory}/backward_peak", f"{memory}/optimizer_peak"]
    ledger.compute(f"{memory}/peak", "B", max, both, "the higher of the two peaks", measurable=True)
    if cpu:
        inputs = [f"{memory}/peak", "/fit/process_bytes"]
        why = "resident bytes of the process: peak and PyTorch itself"
        ledger.compute(f"{memory}/host", "B", lambda peak, process: round(peak + process), inputs, why, measurable=True)


def _momentum(
    ledger: Ledger, account: Mapping[str, Json], place: int, rank: Rank, mechanisms: Sequence[str], most: int
) -> None:
    members = ledger.draft["ranks"][place]["members"]
    elements = [elements_of(account, owned_by(ledger.draft, account, member)) for member in members]
    least = round(most * min(elements) / max(elements)) if max(elements) else 0
    inputs = ["/exchange/owners"] if "owners" in ledger.draft["exchange"] else ["/workload/parameters/muon"]
    why = "momentum of the matrices a rank owns; of alike ranks, the one that owns most"
    item = reading(
        most, "B", "computed", why, inputs=[*inputs, "/fit/mechanisms"], low=least, high=most, measurable=True
    )
    ledger.put(f"/ranks/{place}/memory/muon_momentum", item)


def _sum_times_last(*values: float) -> int:
    return round(sum(values[:-1]) * values[-1])
