"""The conditions of a run: clocks, temperature and throttling of rank 0's card, each a value or why there is none."""

from __future__ import annotations

from collections.abc import Callable
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


def _ask(module: Any, call: Callable[[], Json]) -> dict[str, Json]:
    try:
        return {"value": call(), "reason": None}
    except module.NVMLError as error:
        return {"value": None, "reason": f"NVML: {error}"}
