"""Moments on a rank's own timeline: the host's clock on a CPU, events in stream order on a card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Moment = Any
"""A float in seconds on a CPU, a CUDA event on a card: only `Clock.seconds` reads it."""


class Clock:
    """Takes moments without holding the device up; a card's are readable once its work is done (`settle`)."""

    def __init__(self, kind: str) -> None:
        self.on_card = kind == "cuda"
        self.instrument = "cuda events" if self.on_card else "perf_counter"

    def now(self) -> Moment:
        """This moment: of the host, or of the current stream when it comes to it."""
        if not self.on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all moments taken so far can be read."""
        if self.on_card:
            torch.cuda.synchronize()

    def seconds(self, start: Moment, end: Moment) -> float:
        """Seconds from ``start`` to ``end``."""
        return float(start.elapsed_time(end)) / 1e3 if self.on_card else float(end - start)

    def union(self, spans: Sequence[tuple[Moment, Moment]], until: Moment | None = None) -> float:
        """Seconds covered by at least one of ``spans``; with ``until``, only those before it."""
        if not spans:
            return 0.0
        origin = spans[0][0]
        last = float("inf") if until is None else self.seconds(origin, until)
        cut = ((self.seconds(origin, start), min(last, self.seconds(origin, end))) for start, end in spans)
        ends = sorted((start, end) for start, end in cut if start < end)
        covered, reached = 0.0, float("-inf")
        for start, end in ends:
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered
