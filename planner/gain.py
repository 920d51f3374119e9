"""What the fleet gains: over an even split of the same global batch, and over the best device alone with all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.cost import Rank, exposed_seconds
from planner.exchange import all_gather_seconds, all_reduce_seconds
from planner.ledger import Ledger
from planner.ranks import rank_facts, sharing, world_size
from schemas.document import unknown
from schemas.form import Json

_RATES = ("products", "bandwidth", "launch")


class Times(NamedTuple):
    """Seconds of a step: as planned, with an even split, and of the best device alone."""

    planned: float
    even: float
    alone: float


def gains(ledger: Ledger, account: Mapping[str, Json]) -> None:
    """Put the two gains and the times they come from, as formulas over the rates, so that a rate's range moves both
    sides of a quotient together."""
    fleet = _Fleet(ledger, account)
    pointers = [f"/ranks/{place}/rates/{name}" for place in range(len(fleet.ranks)) for name in _RATES]
    pointers += ["/exchange/latency", "/exchange/rate"]
    if any(ledger.value(pointer) is None for pointer in pointers):
        for name in ("even", "best"):
            why = "a rank's rates or the link's are unknown"
            ledger.put(f"/step/gain_over_{name}", unknown("", why, inputs=pointers))
        return
    for name, even in (("even_seconds", True), ("best_alone_seconds", False)):
        side = "the same global batch split evenly" if even else "the best device alone with the whole global batch"
        ledger.compute(
            f"/step/{name}", "s", lambda *v, even=even: fleet.other(v, even), pointers, f"step time of {side}"
        )
        ledger.compute(
            f"/step/gain_over_{'even' if even else 'best'}",
            "",
            lambda *v, even=even: fleet.other(v, even) / fleet.times(v).planned,
            pointers,
            f"that time / this plan's: {side}",
        )


class _Fleet:
    def __init__(self, ledger: Ledger, account: Mapping[str, Json]) -> None:
        draft = ledger.draft
        entries = draft["ranks"]
        self.ranks = [rank_facts(draft, account, place) for place in range(len(entries))]
        self.shapes = [(entry["batch"]["chosen"], entry["seq"]["chosen"]) for entry in entries]
        engaged = draft["fit"]["mechanisms"]["chosen"]
        self.mechanisms = [[*engaged, *entry["mechanisms"]["chosen"]] for entry in entries]
        self.cores = [sharing(draft, entry) for entry in entries]
        self.world, self.total = world_size(draft), ledger.value("/step/global_batch")
        self.payload, self.buckets = ledger.value("/exchange/payload"), ledger.value("/exchange/buckets")
        owned = draft["exchange"].get("owners_payload")
        self.owned = None if owned is None else owned["value"]

    def times(self, values: Sequence[float]) -> Times:
        """The three times at ``values``: three rates a rank entry, then latency and rate of the link."""
        latency, rate = values[-2:]
        ranks = [
            dataclasses.replace(rank, rates=(values[3 * place], values[3 * place + 1], values[3 * place + 2]))
            for place, rank in enumerate(self.ranks)
        ]
        reduce = all_reduce_seconds(self.payload, self.world, rate, latency, self.buckets)
        sending = 0.0 if self.owned is None else all_gather_seconds(self.owned, self.world, rate, latency)
        planned = [self._part(ranks, place, float(b)) for place, (b, _) in enumerate(self.shapes)]
        even = [self._part(ranks, place, self.total / self.world) for place in range(len(ranks))]
        updates = [rank.update_seconds() for rank in ranks]
        alone = min(self._alone(ranks[place], place) for place in range(len(ranks)))
        return Times(*(self._fleet(computes, updates, reduce, sending) for computes in (planned, even)), alone)

    def other(self, values: Sequence[float], even: bool) -> float:
        times = self.times(values)
        return times.even if even else times.alone

    def _fleet(self, computes: list[float], updates: list[float], reduce: float, sending: float) -> float:
        slowest = max(computes)
        return max(
            own + exposed_seconds(own, slowest, reduce, self.buckets) + update + sending
            for own, update in zip(computes, updates, strict=True)
        )

    def _part(self, ranks: Sequence[Rank], place: int, samples: float) -> float:
        """Forward and backward of ``samples`` sequences; a fraction is taken between its neighbours."""
        low, length, mechanisms = max(1, int(samples)), self.shapes[place][1], self.mechanisms[place]
        at, after = (ranks[place].compute_seconds(b, length, mechanisms) for b in (low, low + 1))
        return at + (after - at) * (samples - low)

    def _alone(self, rank: Rank, place: int) -> float:
        """All samples and all matrices on one device, no exchange; a CPU then has all of its cores."""
        assert rank.rates is not None
        products, bandwidth, launch = rank.rates
        cores, everything = self.cores[place], tuple(range(len(rank.account["matrices"])))
        rates = (products * cores, bandwidth * cores, launch)
        whole = dataclasses.replace(rank, owned=everything, world=1, rates=rates)
        length, mechanisms = self.shapes[place][1], self.mechanisms[place]
        return whole.compute_seconds(self.total, length, mechanisms) + whole.update_seconds()
