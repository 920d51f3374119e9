"""What the fleet gains: over an even split of the same global batch, and over the best device alone with all of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planner.passes.cost import Rank, ratio_at
from planner.passes.ledger import Ledger
from planner.passes.link import Rings
from planner.passes.mechanisms import Mechanisms
from planner.passes.moves import moves_of
from planner.passes.paths import link_inputs, rings
from planner.passes.ranks import rank_facts, whole_device, world_size
from planner.passes.search import Search
from schemas.document import unknown
from schemas.form import Json

_RATES = ("products", "bandwidth", "launch")


class Times(NamedTuple):
    """Seconds of a step: as planned, with an even split, and of the best device alone."""

    planned: float
    even: float
    alone: float


def gains(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """Put the two gains and the times they come from, as formulas over the rates, so that a rate's range moves both
    sides of a quotient together."""
    fleet = _Fleet(ledger, request, account)
    if any(value is None for value in fleet.nominal.values()):
        for name in ("even", "best"):
            why = "a rank's rates or the link's are unknown"
            ledger.put(f"/step/gain_over_{name}", unknown("", why, inputs=fleet.inputs))
        return
    for name, even in (("even_seconds", True), ("best_alone_seconds", False)):
        if even and not math.isfinite(fleet.times([ledger.value(source) for source in fleet.inputs]).even):
            why = "the even split does not fit every rank's memory, so there is nothing to compare with"
            ledger.put("/step/gain_over_even", unknown("", why, inputs=fleet.inputs))
            continue
        side = "the same global batch split evenly" if even else "the best device alone with the whole global batch"
        ledger.compute(
            f"/step/{name}", "s", lambda *v, even=even: fleet.other(v, even), fleet.inputs, f"step time of {side}"
        )
        ledger.compute(
            f"/step/gain_over_{'even' if even else 'best'}",
            "",
            lambda *v, even=even: fleet.other(v, even) / fleet.times(v).planned,
            fleet.inputs,
            f"that time / this plan's: {side}",
        )


class _Fleet:
    def __init__(self, ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
        self.draft = draft = ledger.draft
        entries = draft["ranks"]
        self.ranks = [rank_facts(draft, account, place) for place in range(len(entries))]
        self.shapes = [(entry["batch"]["chosen"], entry["seq"]["chosen"]) for entry in entries]
        engaged = draft["fit"]["mechanisms"]["chosen"]
        self.mechanisms = [[*engaged, *entry["mechanisms"]["chosen"]] for entry in entries]
        self.search, self.engaged = Search(draft, request, account), tuple(engaged)
        self._fitting: dict[tuple[int, int], list[Mechanisms]] = {}
        self._times: dict[tuple[Any, ...], Times] = {}
        self.cores = [whole_device(draft, entry) for entry in entries]
        self.world, self.total = world_size(draft), ledger.value("/step/global_batch")
        self.moves = moves_of(draft)
        owned = draft["exchange"].get("owners_payload")
        self.owned = None if owned is None else owned["value"]
        taught = draft["exchange"].get("calibration", {})
        self.link_ratios = [taught[part]["value"] if part in taught else () for part in ("all_reduce", "owners")]
        self._rates(ledger)

    def _rates(self, ledger: Ledger) -> None:
        """The rates at their own values, by pointer, and the pointers whose ranges move the times: where a measured
        ratio speaks, a rate's range says nothing more, and the calibration is the input instead."""
        self.nominal: dict[str, float | None] = {}
        self.inputs: list[str] = []
        for place, rank in enumerate(self.ranks):
            pointers = [f"/ranks/{place}/rates/{name}" for name in _RATES]
            values = rank.rates or (None, None, None)
            self.nominal |= dict(zip(pointers, values, strict=True))
            self.inputs += [f"/ranks/{place}/calibration/compute"] if rank.compute_ratios else pointers
        link = link_inputs(ledger.draft)
        self.nominal |= {pointer: ledger.value(pointer) for pointer in link}
        self.inputs += ["/exchange/calibration/all_reduce"] if self.link_ratios[0] else link

    def times(self, values: Sequence[float]) -> Times:
        """The three times with ``inputs`` at ``values`` and all else at its own."""
        key = tuple(map(str, values))
        if key not in self._times:
            self._times[key] = self._timed(values)
        return self._times[key]

    def _timed(self, values: Sequence[float]) -> Times:
        at: dict[str, Any] = {**self.nominal, **dict(zip(self.inputs, values, strict=True))}
        ring = rings(self.draft, *[at[pointer] for pointer in link_inputs(self.draft)])
        ranks = [self._at(place, at) for place in range(len(self.ranks))]
        ratio = ratio_at(self.link_ratios[0], 0)
        moved = self.moves.seconds(ring) * ratio, self.moves.forward(ring) * ratio
        sending = [self._sending(ring, rank, at[f"/ranks/{place}/rates/launch"]) for place, rank in enumerate(ranks)]
        planned = [
            rank.compute_seconds(*self.shapes[place], self.mechanisms[place]) for place, rank in enumerate(ranks)
        ]
        even = [self._part(rank, place, self.total / self.world) for place, rank in enumerate(ranks)]
        updates = [rank.update_seconds(held) for rank, held in zip(ranks, self.mechanisms, strict=True)]
        alone = min(self._alone(ranks[place], place) for place in range(len(ranks)))
        return Times(self._fleet(planned, updates, moved, sending), self._fleet(even, updates, moved, sending), alone)

    def _at(self, place: int, at: Mapping[str, Any]) -> Rank:
        products, bandwidth, launch = (at[f"/ranks/{place}/rates/{name}"] for name in _RATES)
        return dataclasses.replace(self.ranks[place], rates=(products, bandwidth, launch))

    def _sending(self, ring: Rings, rank: Rank, launch: float) -> float:
        if self.owned is None:
            return 0.0
        return (ring.all_gather(self.owned) + rank.packing_seconds(launch)) * ratio_at(self.link_ratios[1], 0)

    def other(self, values: Sequence[float], even: bool) -> float:
        times = self.times(values)
        return times.even if even else times.alone

    def _fleet(
        self, computes: list[float], updates: list[float], moved: tuple[float, float], sending: list[float]
    ) -> float:
        slowest = max(computes)
        return max(
            own + self.moves.exposed(own, slowest, *moved) + update + sent
            for own, update, sent in zip(computes, updates, sending, strict=True)
        )

    def _part(self, rank: Rank, place: int, samples: float) -> float:
        """Forward and backward of ``samples`` sequences under the best mechanisms that fit; infinite where none do. A
        fraction is taken between its neighbours."""
        low = max(1, int(samples))
        at = self._least(rank, place, low)
        return at if low == samples else at + (self._least(rank, place, low + 1) - at) * (samples - low)

    def _least(self, rank: Rank, place: int, samples: int) -> float:
        if (place, samples) not in self._fitting:
            weighed = self.search.candidates(place, samples, self.engaged)
            self._fitting[place, samples] = [item.mechanisms for item in weighed if self.search.holds(place, item)]
        length, fitting = self.shapes[place][1], self._fitting[place, samples]
        return min((rank.compute_seconds(samples, length, held) for held in fitting), default=math.inf)

    def _alone(self, rank: Rank, place: int) -> float:
        """All samples and all matrices on one device, no exchange; a CPU then has all of its cores."""
        assert rank.rates is not None
        products, bandwidth, launch = rank.rates
        cores, everything = self.cores[place], tuple(range(len(rank.account["matrices"])))
        rates = (products * cores, bandwidth * cores, launch)
        whole = dataclasses.replace(rank, owned=everything, updated=everything, world=1, rates=rates, shards=None)
        length, mechanisms = self.shapes[place][1], self.mechanisms[place]
        return whole.compute_seconds(self.total, length, mechanisms) + whole.update_seconds(mechanisms)
