"""The readings of one NVIDIA card, or of one slice of it, as NVML tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from planner.machine.ask import Ask, text
from planner.machine.mps import Mps
from schemas.document import reading, unknown
from schemas.form import Json

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_EXCLUSIVE = (1, 3)
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # NVML's numbers of the clocks
_MEGA = 10**6

# CUDA cores of one multiprocessor by compute capability (CUDA C++ programming guide, "arithmetic instructions").
_CORES = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
_CORES |= dict.fromkeys(("5.0", "5.2", "5.3", "6.1", "6.2", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0"), 128)
_CORES |= dict.fromkeys(("12.0", "12.1"), 128)


@dataclass(frozen=True)
class Handle:
    """A card or slice to ask about.

    ``card`` and ``own`` are NVML's handles: the card's, which knows of link, clocks and modes, and the one whose name
    and memory are asked (the slice's, or the card's again). ``divided`` says that MIG is on; ``place`` counts cards in
    the order of the bus.
    """

    uuid: str
    place: int
    card: Any
    own: Any
    divided: bool = False

    @property
    def is_slice(self) -> bool:
        return self.own is not self.card


def entry(ask: Ask, handle: Handle, node: str, mps: Mps | None = None) -> dict[str, Json]:
    """The device entry of ``handle`` on ``node``, within what ``mps`` leaves this process."""
    nvml, card, own = ask.nvml, handle.card, handle.own
    now, idle = "at the time of probing", "at the time of probing; an idle card lowers it"
    sm = ask("", "compute capability", lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(card)))
    both = "card and slot together"
    return {
        "ids": [handle.uuid],
        "node": node,
        "kind": "cuda",
        "name": ask("", "NVML", lambda: text(nvml.nvmlDeviceGetName(own))),
        "sm": sm,
        "multiprocessors": _multiprocessors(ask, handle, sm["value"], mps),
        "memory_total": ask("B", "NVML", lambda: int(nvml.nvmlDeviceGetMemoryInfo(own).total)),
        "memory_free": _free(ask, handle, mps),
        "pcie_generation_max": ask("", both, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(card)),
        "pcie_generation_card": ask("", "the card alone", lambda: nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(card)),
        "pcie_width_max": ask("", both, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(card)),
        "pcie_generation_current": ask("", idle, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(card)),
        "pcie_width_current": ask("", now, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(card)),
        "mig": _mig(ask, handle),
        "compute_mode": ask("", "NVML", lambda: _mode(nvml.nvmlDeviceGetComputeMode(card))),
        "clock_sm_max": _clock(ask, card, _SM_CLOCK),
        "clock_memory_max": _clock(ask, card, _MEMORY_CLOCK),
        "ecc": ask("", "NVML", lambda: "on" if nvml.nvmlDeviceGetEccMode(card)[0] else "off"),
    }


def _mode(number: int) -> str:
    return _COMPUTE_MODES.get(number, f"mode {number}")


def _clock(ask: Ask, card: Any, which: int) -> dict[str, Json]:
    return ask("Hz", "the highest, by NVML", lambda: ask.nvml.nvmlDeviceGetMaxClockInfo(card, which), scale=_MEGA)


def _mig(ask: Ask, handle: Handle) -> dict[str, Json]:
    if handle.is_slice:
        return reading("slice", "", "probed", "a slice (MIG device) of a card")
    if handle.divided:
        return reading("on", "", "probed", "MIG mode is on and no slice is made: CUDA shows no device here")
    return ask("", "NVML", lambda: "on" if ask.nvml.nvmlDeviceGetMigMode(handle.card)[0] else "off")


def _free(ask: Ask, handle: Handle, mps: Mps | None) -> dict[str, Json]:
    """Free memory in bytes; unknown where the card would not give it to us though it is free."""
    nvml = ask.nvml
    mode, _ = ask.plain(lambda: nvml.nvmlDeviceGetComputeMode(handle.card))
    if mode in _EXCLUSIVE and mps is None:
        others, reason = ask.plain(lambda: _others(nvml, handle.own))
        if reason is not None:
            return unknown("B", f"the compute mode is exclusive, and who holds the card is not told: {reason}")
        if others:
            return unknown("B", "the compute mode is exclusive, and another process holds the card")
    now = "at the time of probing"
    free = ask("B", now, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle.own).free), zero=True)
    limit = mps.memory(handle.place, handle.uuid) if mps else None
    if limit is None or free["value"] is None or free["value"] <= limit:
        return free
    return reading(limit, "B", "probed", "what CUDA_MPS_PINNED_DEVICE_MEM_LIMIT leaves this process")


def _others(nvml: Any, handle: Any) -> bool:
    return any(int(process.pid) != os.getpid() for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _multiprocessors(ask: Ask, handle: Handle, sm: str | None, mps: Mps | None) -> dict[str, Json]:
    """Multiprocessors that this process may use: NVML tells a slice's own, and a card's CUDA cores."""
    nvml = ask.nvml
    if handle.is_slice:
        found = ask("", "NVML, of the slice", lambda: nvml.nvmlDeviceGetAttributes(handle.own).multiprocessorCount)
    elif sm not in _CORES:
        return unknown("", f"how many CUDA cores a multiprocessor of compute capability {sm} has is not known")
    else:
        why = f"NVML's count of CUDA cores, {_CORES[sm]} a multiprocessor at sm_{sm.replace('.', '')}"
        found = ask("", why, lambda: nvml.nvmlDeviceGetNumGpuCores(handle.card) // _CORES[sm])
    if mps is None or mps.share is None or found["value"] is None:
        return found
    left = max(1, round(found["value"] * mps.share))
    return reading(
        left, "", "probed", f"of {found['value']}, what CUDA_MPS_ACTIVE_THREAD_PERCENTAGE leaves this process"
    )
