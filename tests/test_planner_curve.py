"""The fit of a ring's curve: what was put in comes out, and small sizes are predicted as well as large ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.machine.curve import RingFit, fit_ring, timed_curve
from planner.passes.link import at_size

SIZES = [2**power for power in range(16, 31)]


def _seconds(size: int, world: int, latency: float, rate: float) -> float:
    """An oracle of its own: P-1 steps of a slice to scatter, as many to gather."""
    return 2 * (world - 1) * (latency + size / world / rate)


def _plain_fit(points: list[tuple[int, float]], world: int) -> RingFit:
    """Least squares of seconds, unweighted: the fault that the relative weights are for."""
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    volume = 2 * (world - 1) / world
    return RingFit((mean_y - slope * mean_x) / (2 * (world - 1)), volume / slope, 0.0, 0)


@given(
    world=st.integers(2, 16),
    latency=st.floats(1e-7, 1e-3),
    rate=st.floats(1e9, 1e12),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)),
)
@settings(max_examples=200, deadline=None)
def test_every_size_is_predicted_within_what_the_noise_allows(
    world: int, latency: float, rate: float, noise: list[float]
) -> None:
    true = [_seconds(size, world, latency, rate) for size in SIZES]
    points = [(size, value * (1 + off)) for size, value, off in zip(SIZES, true, noise, strict=True)]
    fit = fit_ring(points, world)
    assert fit is not None
    # A least squares fit moves by no more than the noise as a whole, sqrt(15) x 5 %; with exact points, by nothing.
    bound = 1.12 * sum(off * off for off in noise) ** 0.5 + 1e-6
    for size, value in zip(SIZES, true, strict=True):
        assert fit.seconds(size, world) == pytest.approx(value, rel=bound)
    errors = [abs(fit.seconds(size, world) / value - 1) for size, value in points]
    assert fit.worst == pytest.approx(max(errors), abs=1e-9)


def test_exact_points_give_latency_and_rate_back() -> None:
    fit = fit_ring([(size, _seconds(size, 4, 7e-6, 3e11)) for size in SIZES], 4)
    assert fit is not None
    assert (fit.latency, fit.rate) == (pytest.approx(7e-6), pytest.approx(3e11))


def test_plain_least_squares_would_miss_the_small_sizes() -> None:
    noise = [0.0] * (len(SIZES) - 2) + [-0.04, 0.04]
    points = [(size, _seconds(size, 2, 3e-6, 3e11) * (1 + off)) for size, off in zip(SIZES, noise, strict=True)]
    fit = fit_ring(points, 2)
    assert fit is not None and fit.worst < 0.05
    plain = _plain_fit(points, 2)
    assert max(abs(plain.seconds(size, 2) / value - 1) for size, value in points) > 0.5


CASES: list[Any] = [
    ("one size", [(2**20, 1e-3), (2**20, 1.1e-3)]),
    ("no points", []),
    ("times that fall", [(2**16, 1e-3), (2**20, 1e-4)]),
]


@pytest.mark.parametrize("points", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_points_that_tell_no_rate_give_no_fit(points: list[tuple[int, float]]) -> None:
    assert fit_ring(points, 2) is None


def test_a_latency_below_zero_is_never_fitted() -> None:
    fit = fit_ring([(2**16, 1e-7), (2**20, 1e-5), (2**24, 1e-2)], 2)
    assert fit is not None
    assert fit.latency == 0.0 and fit.rate > 0


OCTAVES = [2**power for power in range(16, 31)]


def _leaping(size: int) -> float:
    """As NCCL over NVLink was seen: another protocol from 1.3 MiB on."""
    return 8e-6 + size / 1.1e11 if size < 1.3 * 2**20 else 2.2e-5 + size / 3.3e11


def test_sizes_are_added_until_the_line_through_neighbours_tells_what_lies_between() -> None:
    asked: list[int] = []

    def timing(size: int) -> list[float]:
        asked.append(size)
        return [0.97 * _leaping(size), _leaping(size), 1.5 * _leaping(size)]

    curve = [(size, sorted(times)[1]) for size, times in timed_curve(OCTAVES, timing, lambda: False)]
    assert [size for size, _ in curve] == sorted(asked) and len(asked) == len(set(asked)) < 2 * len(OCTAVES) + 6
    sizes = [2**20 * 1.19**step for step in range(64)]
    off = {size: abs(at_size(curve, size) / _leaping(int(size)) - 1) for size in sizes}
    # What is left is the leap itself, in the eighth of an octave that it lies in.
    assert [size for size in sizes if off[size] > 0.01 and not 1.25 < size / 2**20 < 1.38] == []
    coarse = [(size, _leaping(size)) for size in OCTAVES]
    assert abs(at_size(coarse, 1.4 * 2**20) / _leaping(int(1.4 * 2**20)) - 1) > 0.1


def test_a_size_that_took_longer_than_a_larger_one_is_timed_again() -> None:
    seen: dict[int, int] = {}

    def timing(size: int) -> list[float]:
        seen[size] = seen.get(size, 0) + 1
        return [4 * size / 1e9 if (size, seen[size]) == (2**19, 1) else size / 1e9] * 3

    curve = timed_curve(OCTAVES, timing, lambda: False)
    assert all(times == [size / 1e9] * 3 for size, times in curve)
    assert [size for size, count in seen.items() if count > 1] == [2**19]


def test_no_size_is_begun_once_the_budget_is_spent() -> None:
    asked: list[int] = []
    curve = timed_curve(OCTAVES, lambda size: asked.append(size) or [size / 1e9], lambda: len(asked) >= 4)
    assert asked == OCTAVES[:4] and [size for size, _ in curve] == OCTAVES[:4]
