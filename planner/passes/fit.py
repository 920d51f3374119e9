"""Fourth pass: the memory mechanisms that make each rank fit, and every rank's memory by component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.passes import constants
from planner.passes.ledger import Ledger
from planner.passes.memory import put_memory
from planner.passes.ranks import allocator_of
from planner.passes.search import Candidate, Choice, Search
from planner.views.words import size
from schemas.document import reading, unknown
from schemas.form import Json


def fit(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the mechanisms: exact ones rank by rank, those that alter an update for the whole fleet."""
    ledger = Ledger(draft)
    cpu = all(device["kind"] == "cpu" for device in ledger.draft["fleet"]["devices"].values())
    allocator = allocator_of(draft)
    ledger.put("/fit/allocator_overhead", constants.ALLOCATOR_OVERHEAD[allocator].reading())
    if allocator in constants.ALLOCATOR_RESERVE:
        ledger.put("/fit/allocator_reserve", constants.ALLOCATOR_RESERVE[allocator].reading())
    ledger.put("/fit/process_bytes", constants.PROCESS_BYTES.reading())
    search = Search(ledger.draft, request, account)
    batches = [entry["batch"]["chosen"] for entry in ledger.draft["ranks"]]
    _Decided(ledger, search, batches, search.choose(batches) or search.most(batches)).put()
    for place in range(len(ledger.draft["ranks"])):
        put_memory(ledger, account, place, cpu)
    return ledger.draft


def told(row: Mapping[str, Json]) -> str:
    """What a mechanism does, and how far off it was measured to be where it is not exact."""
    return f"{row['why']} ({row['error']})" if "error" in row else str(row["why"])


class _Decided:
    """A choice as decisions: the fleet's and each entry's, each with what was rejected, what that saves and costs."""

    def __init__(self, ledger: Ledger, search: Search, batches: Sequence[int], choice: Choice) -> None:
        self.ledger, self.search, self.batches, self.choice = ledger, search, batches, choice
        self.rows = search.offer.rows
        self.named = list(search.offer.asked)
        self.asked = self.named or (None if search.off else search.asked)
        self.by_name = f"; {', '.join(self.named)} asked for" if self.named else ""
        # Without rates nothing is known to be the cheapest.
        self.fell_back = search.blind and search.asked != "in-order" and not search.off
        self.outcome = "default" if search.off and not self.named else "fallback" if self.fell_back else "granted"

    def put(self) -> None:
        search, fleet = self.search, self.choice.fleet
        why = "--fit is off" if search.off else self._reason()
        needed = {package for name in fleet for package in self.rows[name].get("toolchain", ())}
        self.ledger.decide(
            "/fit/mechanisms",
            self.asked,
            list(fleet),
            why + self.by_name,
            outcome=self.outcome,
            inputs=[f"/toolchain/{package}" for package in sorted(needed)],
            rejected=[] if search.off else [*self._barred(), *self._other_fleets()],
        )
        for place, pick in enumerate(self.choice.picks):
            self.ledger.decide(
                f"/ranks/{place}/mechanisms",
                self.asked,
                self._own(pick),
                (why if search.off else self._fits(place, pick)) + self.by_name,
                outcome="granted" if self.fell_back else self.outcome,  # the fleet's decision tells of the one fallback
                inputs=[] if search.off else [f"/ranks/{place}/memory/limit"],
                rejected=[] if search.off else self._other_sets(place, pick),
            )
            for name in pick.mechanisms:
                self._put_worth(place, pick, name)

    def _put_worth(self, place: int, pick: Candidate, name: str) -> None:
        """What one engaged mechanism saves of the rank's peak, and costs of its step, beside the others."""
        without = tuple(other for other in pick.mechanisms if other != name)
        inputs = [f"/ranks/{place}/{key}" for key in ("batch", "seq", "dtype")] + ["/fit/mechanisms"]
        samples, where = self.batches[place], f"/ranks/{place}/worth/{name}"
        saves = round(self.search.weigh(place, samples, without).peak - pick.peak)
        why = f"the peak without {name} less the peak with it, all else alike"
        self.ledger.put(f"{where}/saves", reading(saves, "B", "computed", why, inputs=inputs))
        if pick.seconds is None:
            self.ledger.put(f"{where}/costs", unknown("s", "the rank's rates are unknown", inputs=inputs))
            return
        costs = self.search.seconds(place, samples, pick.mechanisms) - self.search.seconds(place, samples, without)
        known = self.ledger.draft["ranks"][place]["rates"]
        rates = [key for key in ("products", "bandwidth", "launch", "update_gain") if key in known]
        inputs += [f"/ranks/{place}/rates/{key}" for key in rates]
        why = f"forward, backward and update with {name} less those without it, all else alike"
        self.ledger.put(f"{where}/costs", reading(float(costs), "s", "computed", why, inputs=inputs))

    def _own(self, pick: Candidate) -> list[str]:
        return [name for name in pick.mechanisms if self.rows[name]["scope"] == "rank"]

    def _reason(self) -> str:
        how = "of the sets that fit, the one with the least time"
        if self.search.in_order:
            how = "engaged in order until every rank fits"
            how += ", since a rank's rates are unknown" if self.fell_back else ""
        return "; ".join([how, *[told(self.rows[name]) for name in self.choice.fleet]])

    def _fits(self, place: int, pick: Candidate) -> str:
        limit, peak = self.search.limits[place], size(round(pick.peak))
        if limit is None:
            return f"peak {peak}; no limit is known"
        return f"peak {peak}, {'within' if pick.peak <= limit else 'OVER'} {size(limit)}"

    def _barred(self) -> list[dict[str, Json]]:
        return [{"option": [name], "why": reason} for name, reason in self.search.offer.barred.items()]

    def _other_fleets(self) -> list[dict[str, Json]]:
        """Every other set of the fleet, with the sets of each rank that are best beside it."""
        rows = []
        for fleet in self.search.fleets():
            if set(fleet) == set(self.choice.fleet):
                continue
            other = self.search.fastest(self.batches, fleet)
            row: dict[str, Json] = {"option": list(fleet)}
            if other is None:
                row["why"] = self._too_much(fleet)
            else:
                costs = self.search.step_seconds(other) - self.search.step_seconds(self.choice)
                row["why"] = self._not_better(costs)
                row |= self._differences(self.choice.picks, other.picks, costs)
            rows.append(row)
        return rows

    def _too_much(self, fleet: Sequence[str]) -> str:
        """The first entry that fits with none of its sets beside ``fleet``, and how much over it is."""
        for place, samples in enumerate(self.batches):
            sets = self.search.candidates(place, samples, tuple(fleet))
            if not any(self.search.holds(place, item) for item in sets):
                least = min(sets, key=lambda item: item.peak)
                rank = self.ledger.draft["ranks"][place]["members"][0]
                return f"rank {rank} does not fit beside it: {self._why_not(place, least)}"
        raise AssertionError("every rank fits")

    def _not_better(self, costs: float) -> str:
        if self.search.in_order:
            return "later in the order" if not self.fell_back else "not needed"
        return "slower" if costs > 0 else "not needed, and no faster"

    def _other_sets(self, place: int, pick: Candidate) -> list[dict[str, Json]]:
        rows = []
        for other in self.search.candidates(place, self.batches[place], self.choice.fleet):
            if set(other.mechanisms) == set(pick.mechanisms):
                continue
            row: dict[str, Json] = {"option": self._own(other), "why": self._why_not(place, other)}
            rows.append(row | self._differences((pick,), (other,), other.time - pick.time))
        return rows

    def _differences(self, chosen: Sequence[Candidate], others: Sequence[Candidate], costs: float) -> dict[str, Json]:
        """What the others save of the highest peak, in bytes, and cost, in seconds where rates are known."""
        saves = round(max(pick.peak for pick in chosen) - max(other.peak for other in others))
        known = all(other.seconds is not None for other in others)
        return {"saves_bytes": saves} | ({"costs_seconds": costs} if known else {})

    def _why_not(self, place: int, other: Candidate) -> str:
        if self.search.holds(place, other):
            return "not needed, and no faster"
        limit = self.search.limits[place]
        if limit is not None and other.peak > limit:
            return f"its peak of {size(round(other.peak))} is over the limit"
        return f"the host has no room for {size(other.hosted)}"
