"""The two divisions of work over unequal ranks, as plain algorithms: samples by time and memory, matrices by cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """``count`` ranks that are alike: time of b samples (not falling in b), and the most samples that memory holds."""

    count: int
    seconds: Callable[[int], float]
    cap: int


def split_samples(total: int, groups: Sequence[Group]) -> list[list[int]] | None:
    """Samples of each rank of each group: exactly ``total``, at least one a rank, none above its cap, and the slowest
    rank as fast as can be. None when the caps cannot hold ``total`` or there are more ranks than samples.

    For a candidate time each rank takes its largest batch that meets it; the least time whose sum suffices is found by
    bisection, and what is over is taken back from the slowest ranks.
    """
    ranks = sum(group.count for group in groups)
    if total < ranks or any(group.cap < 1 for group in groups):
        return None
    if sum(group.count * group.cap for group in groups) < total:
        return None
    time = _least_time(total, groups)
    batches = [[_largest(group, time, total)] * group.count for group in groups]
    _trim(batches, groups, sum(map(sum, batches)) - total)
    return batches


def _least_time(total: int, groups: Sequence[Group]) -> float:
    def suffices(time: float) -> bool:
        return sum(group.count * _largest(group, time, total) for group in groups) >= total

    low = max(group.seconds(1) for group in groups)
    if suffices(low):
        return low
    high = max(group.seconds(min(group.cap, total)) for group in groups)
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        low, high = (low, middle) if suffices(middle) else (middle, high)


def _largest(group: Group, time: float, total: int) -> int:
    """The largest batch of 1 to the cap that ``group`` finishes within ``time``; 1 when none does."""
    return largest_within(min(group.cap, total), lambda batch: group.seconds(batch) <= time)


def largest_within(most: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of 1 to ``most`` for which ``holds``, a property that once lost stays lost; else 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _trim(batches: list[list[int]], groups: Sequence[Group], excess: int) -> None:
    """Take ``excess`` samples back, each from the rank that is slowest then; of equals the one with most samples,
    then the last."""
    heap: list[tuple[float, int, int, int]] = []
    for place, group in enumerate(groups):
        for rank, batch in enumerate(batches[place]):
            heap.append((-group.seconds(batch), -batch, -place, -rank))
    heapq.heapify(heap)
    while excess > 0:
        _, batch, place, rank = heapq.heappop(heap)
        left = -batch - 1
        if left < 1:
            continue
        batches[-place][-rank] = left
        excess -= 1
        heapq.heappush(heap, (-groups[-place].seconds(left), -left, place, rank))


def assign_owners(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """The rank that owns each job: longest job first, each to the rank that would finish it soonest; of equals the
    lowest rank. ``costs`` by job, ``speeds`` by rank, in units of their own."""
    queues: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate(speeds):
        queues.setdefault(speed, []).append((0.0, rank))  # in order of rank: already a heap
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda place: -costs[place]):
        speed = min(queues, key=lambda speed: ((queues[speed][0][0] + costs[job]) / speed, queues[speed][0][1]))
        load, rank = queues[speed][0]
        heapq.heapreplace(queues[speed], (load + costs[job], rank))
        owners[job] = rank
    return owners
