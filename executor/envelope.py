"""The most bytes alive in a course of operators, as a function of the number of tokens: an upper envelope of lines."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from executor.count import number

Course = list[tuple[int, int]]


def envelope(few: tuple[int, Course], many: tuple[int, Course]) -> list[dict[str, int | float]]:
    """The bytes alive in a course (or beyond those saved), as lines one + bt B T whose highest counts.

    Backward is a course of operators, the same at two numbers of tokens, and what is alive after each is such a line:
    so are the highest of all of them, of which a few are highest somewhere. ``inside``: bytes a token that an opaque
    operator takes within itself at that place. Where the courses differ, one line through their highest points.
    """
    (n0, first), (n1, second) = few, many
    if len(first) != len(second):
        first, second = [max(first, default=(0, 0))], [max(second, default=(0, 0))]
    step = n1 - n0
    # As (slope, value at 0), both times the step, so that they are whole.
    lines = {
        (high - low, low * step - (high - low) * n0): inside
        for (low, _), (high, inside) in zip(first, second, strict=True)
    }
    return [
        {
            "one": number(Fraction(one, step)),
            "bt": number(Fraction(slope, step)),
            "inside": number(Fraction(lines[slope, one], n1)),
        }
        for slope, one in _highest(sorted(lines))
    ]


def _highest(lines: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of lines (slope, value at 0) of rising slope, those that are the highest somewhere from 0 on."""
    kept: list[tuple[int, int]] = []
    for slope, one in lines:
        while kept and kept[-1][1] <= one:
            kept.pop()
        while len(kept) > 1 and _meet(kept[-2], (slope, one)) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append((slope, one))
    return kept


def _meet(low: tuple[int, int], high: tuple[int, int]) -> Fraction:
    """Where a line meets one of a greater slope."""
    return Fraction(low[1] - high[1], high[0] - low[0])
