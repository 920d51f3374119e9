"""A curve of timed ring all-reduces: at which sizes they are timed, and the two numbers behind it, which are a latency
a ring step and the rate of the path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from planner.passes.link import ring_volume

Timing = Callable[[int], list[float]]

REFINED_FROM = 2**20
"""Bytes: below, an all-reduce is all latency, and its time matters little."""
APART = 0.03
"""Of a time, how far the line through its neighbours may miss it."""
DEEPEST = 3
"""Halvings of the gap between two sizes."""


def timed_curve(sizes: Sequence[int], timing: Timing, spent: Callable[[], bool]) -> list[tuple[int, list[float]]]:
    """(bytes, seconds of each repeat) of ``sizes``, which rise, and of as many between them as it takes for the line
    through neighbours to tell them: libraries change their protocol at some size, and the time then leaps.

    A size that took longer than the next larger one was disturbed, and is timed once more. Where ``spent``, no other is
    begun.
    """
    found: dict[int, list[float]] = {}
    for size in sizes:
        found[size] = timing(size)
        if spent():
            break
    for low, high in pairwise(sorted(found)):
        if median(found[low]) > median(found[high]):
            found[low] = min(found[low], timing(low), key=median)
    gaps = [(low, high, DEEPEST) for low, high in pairwise(sorted(found)) if low >= REFINED_FROM]
    while gaps and not spent():
        low, high, depth = gaps.pop(0)
        middle = (low + high) // 2
        found[middle] = timing(middle)
        line = (median(found[low]) + median(found[high])) / 2
        if depth > 1 and abs(line - median(found[middle])) > APART * median(found[middle]):
            gaps += [(low, middle, depth - 1), (middle, high, depth - 1)]
    return sorted(found.items())


@dataclass(frozen=True)
class RingFit:
    """seconds = 2(P-1) ``latency`` + ring_volume(bytes, P) / ``rate``.

    ``worst`` is the largest relative error of the fit over the points, ``at`` the bytes where it lies.
    """

    latency: float
    rate: float
    worst: float
    at: int

    def seconds(self, payload: float, world: int) -> float:
        """Predicted time of an all-reduce of ``payload`` bytes over ``world`` ranks."""
        return 2 * (world - 1) * self.latency + ring_volume(payload, world) / self.rate


def fit_ring(points: Sequence[tuple[int, float]], world: int) -> RingFit | None:
    """The fit over ``points`` (bytes, seconds), or None where they tell no rate (one size, or times that never grow).

    Least squares of the *relative* error, that is with weights 1 / seconds^2. Over sizes spaced evenly on a log scale
    every power of two then counts alike; plain least squares would let the largest size alone decide, and miss the
    small ones by their whole latency. Neither number is allowed below zero.
    """
    if len({size for size, _ in points}) < 2:
        return None
    # With u = 1/t and v = x/t the relative error is a u + b v - 1: two normal equations in a and b.
    rows = [(1 / seconds, ring_volume(size, world) / seconds) for size, seconds in points]
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = uu * vv - uv * uv
    intercept, slope = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if intercept < 0:
        intercept, slope = 0.0, v / vv
    if slope <= 0:
        return None
    errors = [(abs(intercept * a + slope * b - 1), size) for (a, b), (size, _) in zip(rows, points, strict=True)]
    worst, at = max(errors)
    return RingFit(intercept / (2 * (world - 1)), 1 / slope, worst, at)
