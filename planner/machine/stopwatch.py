"""Timing work on one card by CUDA events, or in a dry run on the CPU by the host's clock. torch is imported late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from schemas.form import Json

Work = Callable[[], Any]

LEAD_CYCLES = 60_000  # a repeat: some 30 us, which the card waits while the host queues the work
STABLE = 0.03  # two batches in a row whose medians differ by less are warm
BATCH = 3
MOST_REPEATS = 100
_SPARE = 2**26  # libraries' own workspaces, beside what a quantity needs
_FAULTS = (RuntimeError, AssertionError)  # AssertionError: torch built without CUDA


def tried(timing: Callable[[], Json]) -> Json:
    """What ``timing`` gives, or {"error": the first line} of a fault of the card or of a library."""
    try:
        return timing()
    except _FAULTS as error:
        return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"}


class Place:
    """Card ``index`` of those that this process sees.

    ``dry`` takes the CPU in its place, as {"sm": what it passes for, "free": how much memory it says is free}.
    """

    def __init__(self, index: int, dry: Mapping[str, Json] | None) -> None:
        import torch

        self.dry = dry
        self.device = torch.device("cuda", index) if dry is None else torch.device("cpu")

    def capability(self) -> str:
        """Compute capability, like "8.6"."""
        import torch

        if self.dry is not None:
            return str(self.dry["sm"])
        return "{}.{}".format(*torch.cuda.get_device_capability(self.device))

    def free(self) -> int:
        """Bytes that this process can still take, inside a limit of MPS where there is one."""
        import gc

        import torch

        if self.dry is not None:
            return int(self.dry["free"])
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def lacks(self, needed: int) -> str | None:
        """Why ``needed`` bytes cannot be taken here; None when they can."""
        needed, free = needed + needed // 10 + _SPARE, self.free()
        return f"needs {needed} B of free memory, and {free} B are free" if needed > free else None

    def wait(self) -> None:
        """Return once the card has done all that was queued."""
        import torch

        if self.dry is None:
            torch.cuda.synchronize(self.device)

    def times(self, work: Work, count: int, lead: int | None = None) -> list[float]:
        """Seconds of each of ``count`` repeats of ``work``, back to back.

        The card first spins for ``lead`` cycles, so that the host has queued the repeats before they begin: what is
        timed is the card's work, not the host's.
        """
        if self.dry is not None:
            return [_host_seconds(work) for _ in range(count)]
        import torch

        with torch.cuda.device(self.device):
            marks = [_event() for _ in range(count + 1)]
            self.wait()
            torch.cuda._sleep(LEAD_CYCLES * count if lead is None else lead)  # type: ignore[no-untyped-call]
            for mark in marks[:-1]:
                mark.record()
                work()
            marks[-1].record()
            self.wait()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


def settled(batch: Callable[[int], list[float]], repeats: int, share: float) -> tuple[list[float], bool]:
    """Seconds of at least ``repeats`` repeats, some ``share`` seconds of them, and whether they were stable before.

    ``batch(n)`` times n repeats. Warm-up goes on for at least half a share, until two batches in a row agree, and
    gives up after four shares.
    """
    start, previous = time.perf_counter(), 0.0
    while True:
        middle = median(batch(BATCH))
        spent = time.perf_counter() - start
        stable = abs(middle - previous) <= STABLE * middle
        if spent >= share / 2 and (stable or spent >= 4 * share):
            break
        previous = middle
    count = min(max(repeats, int(share / middle)), max(repeats, MOST_REPEATS))
    return batch(count), stable
