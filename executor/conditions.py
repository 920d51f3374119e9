"""The conditions of a run: clocks, temperature and throttling of each card in the middle of the run, each a value or
why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.machine import nvml
from schemas.form import Json

_ON_CPU = {
    "clocks": "a CPU's clocks vary by core and moment; none stands for the run",
    "temperature": "not read on a CPU",
    "throttling": "not read on a CPU",
}


def seen(kind: str, device: str, cards: Any = None) -> dict[str, dict[str, Json]]:
    """``{name: {"value", "reason"}}`` at this moment. ``device`` is the card's UUID, ``cards`` a module like pynvml."""
    if kind != "cuda":
        return {name: {"value": None, "reason": reason} for name, reason in _ON_CPU.items()}
    module = nvml.module() if cards is None else cards
    if module is None:
        return {name: {"value": None, "reason": "nvidia-ml-py is not installed"} for name in _ON_CPU}
    try:
        module.nvmlInit()
        handle = module.nvmlDeviceGetHandleByUUID(device)
    except module.NVMLError as error:
        return {name: {"value": None, "reason": f"NVML: {error}"} for name in _ON_CPU}
    asked: dict[str, Callable[[], Json]] = {
        "clocks": lambda: f"{module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM)} MHz",
        "temperature": lambda: f"{module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU)} C",
        "throttling": lambda: hex(module.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }
    found = {name: _ask(module, call) for name, call in asked.items()}
    module.nvmlShutdown()
    return found


def of_ranks(ranks: Mapping[int, Mapping[str, Json]]) -> dict[str, Json]:
    """The conditions of all ``ranks`` by name; those of others than rank 0 are NAME @RANK where there is a value."""
    missed = {name: {"value": None, "reason": "the run did not come to its middle"} for name in _ON_CPU}
    found: dict[str, Json] = {**missed, **ranks.get(0, {})}
    for rank, rows in sorted(ranks.items()):
        found |= {f"{name} @{rank}": row for name, row in rows.items() if rank and row["value"] is not None}
    return found


def _ask(module: Any, call: Callable[[], Json]) -> dict[str, Json]:
    try:
        return {"value": call(), "reason": None}
    except module.NVMLError as error:
        return {"value": None, "reason": f"NVML: {error}"}
