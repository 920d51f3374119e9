"""The joint choice of mechanisms and split, against a second implementation that tries every one of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from made_up import ORDER, accounts, subsets
from planner.passes.compile import compile_plan
from planner.passes.cost import Rank
from planner.passes.layout import lay_out
from planner.passes.mechanisms import offer
from planner.passes.order import PASSES
from planner.passes.ranks import rank_facts
from planner.refusals.rules import Refused
from worlds import account, fleet, request

LENGTH, MARGIN = 512, 512 * 2**20
OWN = ["moe_offload", "act_ckpt", "recompute"]
DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)  # an account is too much to be made smaller
SHARED = ["muon_state_bf16", "optim_8bit"]


class Brute:
    """Every split of ``total`` samples and every set of mechanisms of a fleet of unlike cards, one after the other."""

    def __init__(self, work: dict[str, Any], found: dict[str, Any], total: int) -> None:
        asked = request(batch=1, capacity="equal", fit=[10**12])
        draft: dict[str, Any] = lay_out(asked, found, work)
        for each in PASSES[:3]:
            draft = each(asked, found, work, draft)
        self.ranks = [rank_facts(draft, work, place) for place in range(len(draft["ranks"]))]
        exchange, offers = draft["exchange"], offer(draft, asked, work)
        self.reduce, self.buckets = exchange["seconds"]["value"], exchange["buckets"]["value"]
        self.gather, self.total = exchange["owners_seconds"]["value"], total
        self.shared = [name for name in SHARED if name in work["mechanisms"] and name not in offers.barred]
        self.own = [name for name in OWN if name in work["mechanisms"]]
        self._slow: dict[Any, float] = {}
        self._peaks: dict[Any, float] = {}

    def sets(self) -> list[tuple[str, ...]]:
        return [names for names in subsets(self.own) if "recompute" not in names or len(names) == 1]

    def compute(self, place: int, samples: int, own: tuple[str, ...]) -> float:
        key = place, samples, own
        if key not in self._slow:
            rank = self.ranks[place]
            self._slow[key] = max(rank.compute_seconds(samples, LENGTH, held) for held in subsets(own))
        return self._slow[key]

    def update(self, rank: Rank, shared: tuple[str, ...]) -> float:
        key = id(rank), shared
        if key not in self._slow:
            assert rank.rates is not None
            packing = 2 * len(rank.updated) * rank.rates[2]
            self._slow[key] = max(rank.update_seconds(held) for held in subsets(shared)) + packing
        return self._slow[key]

    def step(self, batches: tuple[int, ...], shared: tuple[str, ...], own: tuple[tuple[str, ...], ...]) -> float:
        slowest = max(self.compute(place, b, own[place]) for place, b in enumerate(batches))
        hidden = (self.buckets - 1) / self.buckets * min(self.reduce, slowest * 2 / 3)
        after = self.gather + max(self.update(rank, shared) for rank in self.ranks)
        return float(slowest + self.reduce - hidden + after)

    def fits(self, limits: list[float], batches: tuple[int, ...], shared: Any, own: Any) -> bool:
        rows = enumerate(zip(batches, own, limits, strict=True))
        return all(self.peak(place, b, (*shared, *names)) <= limit for place, (b, names, limit) in rows)

    def peak(self, place: int, samples: int, names: tuple[str, ...]) -> float:
        key = place, samples, names
        if key not in self._peaks:
            self._peaks[key] = self.ranks[place].peak(samples, LENGTH, names)
        return self._peaks[key]

    def splits(self) -> list[tuple[int, ...]]:
        ways = itertools.product(range(1, self.total + 1), repeat=len(self.ranks))
        return [batches for batches in ways if sum(batches) == self.total]

    def least(self, limits: list[float]) -> float | None:
        times = [
            self.step(batches, shared, own)
            for batches in self.splits()
            for shared in subsets(self.shared)
            for own in itertools.product(self.sets(), repeat=len(self.ranks))
            if self.fits(limits, batches, shared, own)
        ]
        return min(times, default=None)


def _limited(speeds: list[float], limits: list[float]) -> dict[str, Any]:
    found = fleet(*speeds)
    for place, limit in enumerate(limits):
        found["devices"][f"GPU-{place}"]["memory_free"]["value"] = int(limit) + MARGIN
    return found


def _chosen(made: dict[str, Any], ranks: int) -> tuple[tuple[int, ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
    entries = sorted(made["ranks"], key=lambda entry: entry["members"][0])
    assert [entry["members"] for entry in entries] == [[rank] for rank in range(ranks)]
    own = tuple(tuple(entry["mechanisms"]["chosen"]) for entry in entries)
    return tuple(entry["batch"]["chosen"] for entry in entries), tuple(made["fit"]["mechanisms"]["chosen"]), own


speeds = st.sampled_from([3e12, 1e13, 4e13, 1.5e14])


@settings(max_examples=8, deadline=None, phases=DRAWN)
@given(accounts(), st.lists(st.tuples(speeds, st.floats(0.0, 1.0)), min_size=2, max_size=2), st.integers(1, 3))
def test_split_and_mechanisms_together_are_the_fastest_of_all_that_fit(
    work: dict[str, Any], cards: list[tuple[float, float]], batch: int
) -> None:
    rates = [speed for speed, _ in cards]
    brute, everything = _pair(work, rates, batch * len(cards))
    limits = []
    for rank, (_, share) in zip(brute.ranks, cards, strict=True):
        least = min(rank.peak(1, LENGTH, names) for names in everything)
        limits.append(float(int(least + share * (rank.peak(brute.total, LENGTH) - least)) - 1))
    best = brute.least(limits)
    try:
        made = compile_plan(request(batch=batch, fit=[10**13]), _limited(rates, limits), work)
    except Refused as refused:
        assert best is None, refused.text()
        return
    chosen = _chosen(made, len(cards))
    assert best is not None and sum(chosen[0]) == brute.total and brute.fits(limits, *chosen)
    assert brute.step(*chosen) == pytest.approx(best, rel=1e-9)


def _pair(work: dict[str, Any], speeds: list[float], total: int) -> tuple[Brute, list[tuple[str, ...]]]:
    brute = Brute(work, fleet(*speeds), total)
    return brute, [(*shared, *own) for shared in subsets(brute.shared) for own in brute.sets()]


def test_the_split_knows_what_the_fleet_does_not_engage() -> None:
    """A card that could hold half of the samples only if the fleet altered its updates, for more than that gains."""
    work, rates = account("b1"), [1e13, 1e13]
    work["mechanisms"] = {"optim_8bit": work["mechanisms"]["optim_8bit"] | {"bytes": 0, "alike": False}}
    work["parameters"]["adamw"] = 3 * 10**8
    work["adamw"]["8bit"]["flops"] = 1e15
    brute, _ = _pair(work, rates, 16)
    limits = [brute.ranks[0].peak(5, LENGTH) + 1, brute.ranks[1].peak(16, LENGTH) + 1]
    assert brute.ranks[0].peak(8, LENGTH, ("optim_8bit",)) < limits[0]
    made = compile_plan(request(batch=8, fit=[10**13]), _limited(rates, limits), work)
    batches, shared, own = _chosen(made, 2)
    assert shared == () and batches == (5, 11)
    assert brute.step(batches, shared, own) == pytest.approx(brute.least(limits), rel=1e-9)
    (row,) = [row for row in made["fit"]["mechanisms"]["rejected"] if row["option"] == ["optim_8bit"]]
    assert row["why"] == "slower" and row["costs_seconds"] > 0 and row["saves_bytes"] > 0


@settings(max_examples=4, deadline=None, phases=DRAWN)
@given(accounts(), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2), st.floats(1.0, 1.3))
def test_a_larger_budget_never_makes_a_fleet_slower_nor_goes_further_in_the_order(
    work: dict[str, Any], shares: list[float], more: float
) -> None:
    rates = [1e13, 4e13]
    brute, everything = _pair(work, rates, 4)
    limits = []
    for rank, share in zip(brute.ranks, shares, strict=True):
        least = min(rank.peak(1, LENGTH, names) for names in everything)
        limits.append(least + share * (rank.peak(4, LENGTH) - least) + 1)
    for policy in ("cheapest", "in-order"):
        found = []
        for factor in (1.0, more):
            cards = _limited(rates, [limit * factor for limit in limits])
            try:
                made = compile_plan(request(batch=2, fit=[10**13], fit_policy=policy), cards, work)
            except Refused:
                found.append((float("inf"), len(ORDER)))
                continue
            batches, shared, own = _chosen(made, 2)
            engaged = {*shared, *itertools.chain(*own)}
            last = max((ORDER.index(name) for name in engaged), default=-1)
            found.append((brute.step(batches, shared, own), last))
        place = 0 if policy == "cheapest" else 1
        assert found[1][place] <= found[0][place] + 1e-9


def test_in_order_no_split_fits_with_fewer_turns_than_were_taken() -> None:
    work, rates = account("b1"), [1e13, 4e13]
    brute, everything = _pair(work, rates, 6)
    limits = [min(rank.peak(2, LENGTH, names) for names in everything) * 1.005 for rank in brute.ranks]
    made = compile_plan(request(batch=3, fit=[10**13], fit_policy="in-order"), _limited(rates, limits), work)
    batches, shared, own = _chosen(made, 2)
    assert sum(batches) == 6 and brute.fits(limits, batches, shared, own)
    last = max(ORDER.index(name) for name in {*shared, *itertools.chain(*own)})
    allowed = ORDER[:last]
    fewer = [tuple(name for name in names if name in allowed) for names in brute.sets()]
    for split in brute.splits():
        for less in itertools.product(set(fewer), repeat=2):
            assert not brute.fits(limits, split, tuple(name for name in SHARED if name in allowed), less)
