"""Bytes alive at their highest, by phase of a step: from the allocator of the card, or on a CPU from the profiler.

A CPU's allocator keeps no statistics, but the profiler sees each allocation and release. One step is run under it, and
left out of the timing. Nothing here reckons: every number is a sum of bytes that were really allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.cuda.memory import memory_stats_as_nested_dict
from torch.profiler import ProfilerActivity, profile, record_function

from schemas.form import Json

LEAST_STEPS = 4  # a run of fewer has no step to spare for the profiler
PROFILED_STEP = 1  # counted from 0
OPTIMIZER_BEGINS = "dormouse: optimizer begins"


@dataclass
class Peaks:
    """Bytes by phase, each the highest over ``samples`` steps, and the instrument. ``absent`` says why there are none.

    ``backward``: of forward and backward; ``optimizer``: of all after them. ``reserved``: what a card's allocator held
    at most in either, given out or not; None where there is no such allocator.
    """

    instrument: str
    backward: int = 0
    optimizer: int = 0
    samples: int = 0
    reserved: int | None = None
    absent: str | None = None

    def add(self, backward: int, optimizer: int) -> None:
        self.samples += 1
        self.backward, self.optimizer = max(self.backward, backward), max(self.optimizer, optimizer)


class Probe(Protocol):
    """Told of a step's phases. ``disturbs`` says whether a step's timing is spoilt by the looking."""

    peaks: Peaks

    def begin(self, step: int) -> None: ...
    def optimizer(self) -> None: ...
    def end(self) -> None: ...
    def disturbs(self, step: int) -> bool: ...


def probe(kind: str, steps: int, alive: Callable[[], int]) -> Probe:
    """The probe of a device of ``kind`` for a run of ``steps``; ``alive`` sums the bytes that live between steps."""
    return CardProbe() if kind == "cuda" else CpuProbe(steps, alive)


def allocator(kind: str) -> str | None:
    """How the memory of this process's card grows, by what lies there: "expandable" or "segments"; None on a CPU."""
    if kind != "cuda":
        return None
    lying = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return "expandable" if any(row["is_expandable"] for row in lying) else "segments"


def pressure(kind: str) -> dict[str, dict[str, Json]]:
    """How near the card's allocator came to its end, ``{name: {"value", "reason"}}``: how often it gave its whole cache
    back to find room. It is of the process, the smoke launch included."""
    value = torch.cuda.memory_stats()["num_alloc_retries"] if kind == "cuda" else None
    return {"allocator_retries": {"value": value, "reason": None if kind == "cuda" else "a CPU's allocator has none"}}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors``, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class CardProbe:
    """The CUDA allocator's own statistics, reset at each phase of every step."""

    def __init__(self) -> None:
        self.peaks = Peaks("cuda allocator")
        self._backward = self._reserved = 0

    def begin(self, step: int) -> None:
        torch.cuda.reset_peak_memory_stats()

    def optimizer(self) -> None:
        self._backward, self._reserved = _highest_on_card()
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        allocated, reserved = _highest_on_card()
        self.peaks.add(self._backward, allocated)
        self.peaks.reserved = max(self.peaks.reserved or 0, self._reserved, reserved)

    def disturbs(self, step: int) -> bool:
        return False


def _highest_on_card() -> tuple[int, int]:
    """(allocated, reserved) bytes at their highest since they were reset. As torch keeps them: flattened and sorted, as
    ``torch.cuda.max_memory_allocated`` has them, they take the host six times as long, within the step."""
    kept = memory_stats_as_nested_dict()
    return kept["allocated_bytes"]["all"]["peak"], kept["reserved_bytes"]["all"]["peak"]


@dataclass
class CpuProbe:
    """The profiler's allocator events of one step, on top of the bytes alive when it starts."""

    steps: int
    alive: Callable[[], int]
    peaks: Peaks = field(default_factory=lambda: Peaks("torch profiler"))
    _profile: Any = None
    _start: int = 0

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            self.peaks.absent = f"a run of {self.steps} steps has none to spare for the profiler (from {LEAST_STEPS})"
        else:
            self.peaks.absent = f"step {PROFILED_STEP + 1}, which is profiled for it, was not reached or not finished"

    def begin(self, step: int) -> None:
        if self.disturbs(step):
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints a line at each start and stop
            self._start = self.alive()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profile.start()

    def optimizer(self) -> None:
        if self._profile is not None:
            with record_function(OPTIMIZER_BEGINS):
                pass

    def end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self.peaks.add(*_highest(self._profile, self._start))
            self.peaks.absent = self._profile = None

    def disturbs(self, step: int) -> bool:
        return self.steps >= LEAST_STEPS and step == PROFILED_STEP


def _highest(seen: Any, start: int) -> tuple[int, int]:
    """(backward peak, optimizer peak) of one profiled step that began with ``start`` bytes alive."""
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive, peaks, phase = start, [start, start], 0
    for event in events:
        if event.name() == OPTIMIZER_BEGINS:
            phase, peaks[1] = 1, alive
        elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            alive += event.nbytes()
            peaks[phase] = max(peaks[phase], alive)
    return peaks[0], peaks[1]
