"""The two divisions of work over unequal ranks, as plain algorithms: samples by time and memory, matrices by cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Curve = Callable[[int], float]


@dataclass(frozen=True)
class Group:
    """``count`` ranks that are alike: time of b samples, and the most samples that memory holds. Neither time nor
    ``work`` (the part of it that samples cause, without launches) may fall in b."""

    count: int
    seconds: Curve
    cap: int
    work: Curve | None = None


def split_samples(total: int, groups: Sequence[Group]) -> list[list[int]] | None:
    """Samples of each rank of each group: exactly ``total``, at least one a rank, none above its cap, and the slowest
    rank as fast as can be. None when the caps cannot hold ``total`` or there are more ranks than samples.

    For a candidate time each rank takes its largest batch that meets it; the least time whose sum suffices is found by
    bisection. Launch-bound ranks meet many splits in that time, so of those the one with the least work on any rank is
    taken, by the same bisection; and what is over is taken back from the ranks with most work.
    """
    ranks = sum(group.count for group in groups)
    if total < ranks or any(group.cap < 1 for group in groups):
        return None
    if sum(group.count * group.cap for group in groups) < total:
        return None
    counts, caps = [group.count for group in groups], [min(group.cap, total) for group in groups]
    for curves in ([group.seconds for group in groups], [group.work or group.seconds for group in groups]):
        level = _least_level(total, counts, caps, curves)
        caps = [_largest(cap, curve, level) for cap, curve in zip(caps, curves, strict=True)]
    batches = [[cap] * count for cap, count in zip(caps, counts, strict=True)]
    _trim(batches, curves, sum(map(sum, batches)) - total)
    return batches


def _least_level(total: int, counts: Sequence[int], caps: Sequence[int], curves: Sequence[Curve]) -> float:
    """The least level at which the ranks' largest batches below it add up to ``total``."""

    def suffices(level: float) -> bool:
        rows = zip(counts, caps, curves, strict=True)
        return sum(count * _largest(cap, curve, level) for count, cap, curve in rows) >= total

    low = max(curve(1) for curve in curves)
    if suffices(low):
        return low
    high = max(curve(cap) for curve, cap in zip(curves, caps, strict=True))
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        low, high = (low, middle) if suffices(middle) else (middle, high)


def _largest(cap: int, curve: Curve, level: float) -> int:
    """The largest batch of 1 to ``cap`` that stays within ``level``; 1 when none does."""
    return largest_within(cap, lambda batch: curve(batch) <= level)


def largest_within(most: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of 1 to ``most`` for which ``holds``, a property that once lost stays lost; else 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _trim(batches: list[list[int]], curves: Sequence[Curve], excess: int) -> None:
    """Take ``excess`` samples back, each from the rank that stands highest then; of equals the one with most samples,
    then the last."""
    heap: list[tuple[float, int, int, int]] = []
    for place, curve in enumerate(curves):
        for rank, batch in enumerate(batches[place]):
            heap.append((-curve(batch), -batch, -place, -rank))
    heapq.heapify(heap)
    while excess > 0:
        _, batch, place, rank = heapq.heappop(heap)
        left = -batch - 1
        if left < 1:
            continue
        batches[-place][-rank] = left
        excess -= 1
        heapq.heappush(heap, (-curves[-place](left), -left, place, rank))


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
