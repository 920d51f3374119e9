"""Third pass: the memory mechanisms that make each rank fit, and every rank's memory by component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.passes import constants
from planner.passes.ledger import Ledger
from planner.passes.mechanisms import Mechanisms, Offer, offer
from planner.passes.memory import put_memory
from planner.passes.ranks import host_room, rank_facts
from planner.views.words import size
from schemas.form import Json


@dataclass(frozen=True)
class Candidate:
    """One rank under one set of mechanisms: its predicted peak and what it holds in host memory, in bytes, and its time
    (None: rates unknown)."""

    mechanisms: Mechanisms
    peak: float
    hosted: int
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
        put_memory(ledger, account, place, cpu)
    return ledger.draft


def told(row: Mapping[str, Json]) -> str:
    """What a mechanism does, and how far off it was measured to be where it is not exact."""
    return f"{row['why']} ({row['error']})" if "error" in row else str(row["why"])


class _Search:
    """The exact search over sets of mechanisms. The set of a fleet is small: 2^mechanisms candidates a rank."""

    def __init__(self, ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
        self.ledger = ledger
        self.offer: Offer = offer(ledger.draft, request, account)
        self.rows = self.offer.rows
        self.off = request["fit"] in (None, "off")
        self.asked = None if request["fit"] is None else request["fit_policy"] or "cheapest"
        self.in_order = self.asked == "in-order"
        entries = ledger.draft["ranks"]
        self.ranks = [rank_facts(ledger.draft, account, place) for place in range(len(entries))]
        self.shapes = [(entry["batch"]["chosen"], entry["seq"]["chosen"]) for entry in entries]
        self.limits = [entry["memory"]["limit"]["value"] for entry in entries]
        self.rooms = [host_room(ledger.draft, entry) for entry in entries]
        # Without rates no set is known to be the cheapest.
        self.blind = not self.in_order and any(rank.rates is None for rank in self.ranks)
        self._timed: dict[tuple[int, Mechanisms], float] = {}

    def decide(self) -> None:
        fleet, chosen = self._chosen()
        why = "--fit is off" if self.off else self._reason(fleet)
        named = list(self.offer.asked)
        by_name = f"; {', '.join(named)} asked for" if named else ""
        why += by_name
        outcome = "default" if self.off and not named else "fallback" if self.blind and not self.off else "granted"
        asked = named or (None if self.off else self.asked)
        barred = [{"option": [name], "why": reason} for name, reason in self.offer.barred.items()]
        needed = {package for name in fleet for package in self.rows[name].get("toolchain", ())}
        self.ledger.decide(
            "/fit/mechanisms",
            asked,
            list(fleet),
            why,
            outcome=outcome,
            inputs=[f"/toolchain/{package}" for package in sorted(needed)],
            rejected=[] if self.off else barred,
        )
        for place, candidate in enumerate(chosen):
            own = [name for name in candidate.mechanisms if self.rows[name]["scope"] == "rank"]
            self.ledger.decide(
                f"/ranks/{place}/mechanisms",
                asked,
                own,
                why if self.off else self._fits(place, candidate) + by_name,
                outcome=outcome,
                inputs=[f"/ranks/{place}/memory/limit"],
                rejected=[] if self.off else self._rejected(place, fleet, candidate),
            )

    def _chosen(self) -> tuple[Mechanisms, list[Candidate]]:
        if self.off:
            fleet = tuple(name for name in self._names("fleet") if name in self.offer.asked)
            own = [self.offer.open_sets(rank.kind, "off")[0] for rank in self.ranks]
            return fleet, [self._weigh(place, engaged) for place, engaged in enumerate(own)]
        if self.in_order or self.blind:
            return self._engage_in_order()
        return self._cheapest()

    def _cheapest(self) -> tuple[Mechanisms, list[Candidate]]:
        """The sets with the least time of the slowest rank; of equals those with the fewest inexact ones, then with the
        fewest."""
        best: tuple[tuple[float, int, int], Mechanisms, list[Candidate]] | None = None
        for fleet in self.offer.subsets(self._names("fleet")):
            picks = [self._best_of_rank(place, fleet) for place in range(len(self.ranks))]
            found = [pick for pick in picks if pick is not None]
            if len(found) < len(picks):
                continue
            time = max(pick.seconds or 0.0 for pick in found)
            engaged = [name for pick in found for name in pick.mechanisms]
            key = (time, self._inexact(engaged), len(engaged))
            if best is None or key < best[0]:
                best = (key, fleet, found)
        if best is None:
            return self._everything()
        return best[1], best[2]

    def _best_of_rank(self, place: int, fleet: Mechanisms) -> Candidate | None:
        fitting = [item for item in self._candidates(place, fleet) if self._holds(place, item)]
        return min(fitting, key=self._cost, default=None)

    def _candidates(self, place: int, fleet: Mechanisms) -> list[Candidate]:
        sets = self.offer.subsets(self._names("rank", place), fleet)
        return [self._weigh(place, (*fleet, *own)) for own in sets]

    def _cost(self, item: Candidate) -> tuple[float, int, int]:
        return item.seconds or 0.0, self._inexact(item.mechanisms), len(item.mechanisms)

    def _inexact(self, names: Sequence[str]) -> int:
        return sum(not self.rows[name]["exact"] for name in names)

    def _engage_in_order(self) -> tuple[Mechanisms, list[Candidate]]:
        """One mechanism after the other in the account's order, each rank's own only while that rank does not fit.
        Begins with what was asked for."""
        asked = self.offer.asked
        fleet = tuple(name for name in self._names("fleet") if name in asked)
        own = [tuple(name for name in self._names("rank", place) if name in asked) for place in range(len(self.ranks))]
        for name, row in [("", {"scope": ""}), *self.rows.items()]:
            if row["scope"] == "fleet" and name in self._names("fleet") and name not in fleet:
                fleet = (*fleet, name)
            elif row["scope"] == "rank":
                own = [self._next(place, fleet, held, name) for place, held in enumerate(own)]
            if all(self._fits_with(place, fleet, held) for place, held in enumerate(own)):
                break
        return fleet, [self._weigh(place, (*fleet, *held)) for place, held in enumerate(own)]

    def _next(self, place: int, fleet: Mechanisms, held: Mechanisms, name: str) -> Mechanisms:
        """``held`` with ``name``, where the rank does not fit without. Where others exclude it, it takes their place if
        that leaves less."""
        if name in held or name not in self._names("rank", place) or self._fits_with(place, fleet, held):
            return held
        if self.offer.together((*held, name)):
            return (*held, name)
        kept = tuple(other for other in held if self.offer.together((other, name)))
        if set(held) & set(self.offer.asked) - set(kept):
            return held
        with_it, without = (self._weigh(place, (*fleet, *names)).peak for names in ((*kept, name), held))
        return (*kept, name) if with_it < without else held

    def _everything(self) -> tuple[Mechanisms, list[Candidate]]:
        # Nothing fits: the draft engages what leaves least, and the refusal names each component that is left.
        fleet = self.offer.subsets(self._names("fleet"))[-1]
        return fleet, [
            min(self._candidates(place, fleet), key=lambda item: item.peak) for place in range(len(self.ranks))
        ]

    def _names(self, scope: str, place: int | None = None) -> Mechanisms:
        kinds = {self.ranks[place].kind} if place is not None else {rank.kind for rank in self.ranks}
        return self.offer.names(scope, kinds)

    def _weigh(self, place: int, mechanisms: Mechanisms) -> Candidate:
        rank, (b, t) = self.ranks[place], self.shapes[place]
        seconds = None
        if rank.rates is not None:
            # A gain in time counts for nothing, also beside another mechanism: it would engage what is not needed.
            seconds = max(self._seconds(place, held) for held in self.offer.subsets(mechanisms, asked=()))
        return Candidate(mechanisms, rank.peak(b, t, mechanisms), rank.hosted(b, t, mechanisms)[0], seconds)

    def _seconds(self, place: int, mechanisms: Mechanisms) -> float:
        if (place, mechanisms) not in self._timed:
            rank, (b, t) = self.ranks[place], self.shapes[place]
            self._timed[place, mechanisms] = rank.compute_seconds(b, t, mechanisms) + rank.update_seconds(mechanisms)
        return self._timed[place, mechanisms]

    def _holds(self, place: int, candidate: Candidate) -> bool:
        limit, room = self.limits[place], self.rooms[place]
        return (limit is None or candidate.peak <= limit) and (room is None or candidate.hosted <= room)

    def _fits_with(self, place: int, fleet: Mechanisms, own: Mechanisms) -> bool:
        return self._holds(place, self._weigh(place, (*fleet, *own)))

    def _reason(self, fleet: Mechanisms) -> str:
        how = "of the sets that fit, the one with the least time"
        if self.in_order or self.blind:
            how = "engaged in order until every rank fits" + (
                ", since a rank's rates are unknown" if self.blind else ""
            )
        return "; ".join([how, *[told(self.rows[name]) for name in fleet]])

    def _fits(self, place: int, candidate: Candidate) -> str:
        limit, peak = self.limits[place], size(round(candidate.peak))
        if limit is None:
            return f"peak {peak}; no limit is known"
        return f"peak {peak}, {'within' if candidate.peak <= limit else 'OVER'} {size(limit)}"

    def _why_not(self, place: int, other: Candidate) -> str:
        if self._holds(place, other):
            return "not needed, and no faster"
        limit = self.limits[place]
        if limit is not None and other.peak > limit:
            return f"its peak of {size(round(other.peak))} is over the limit"
        return f"the host has no room for {size(other.hosted)}"

    def _rejected(self, place: int, fleet: Mechanisms, chosen: Candidate) -> list[dict[str, Json]]:
        rows = []
        for other in self._candidates(place, fleet):
            if set(other.mechanisms) == set(chosen.mechanisms):
                continue
            own = [name for name in other.mechanisms if self.rows[name]["scope"] == "rank"]
            row: dict[str, Json] = {"option": own, "saves_bytes": round(chosen.peak - other.peak)}
            row["why"] = self._why_not(place, other)
            if other.seconds is not None and chosen.seconds is not None:
                row["costs_seconds"] = other.seconds - chosen.seconds
            rows.append(row)
        return rows
