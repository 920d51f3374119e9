"""What the NVIDIA cards of this machine are, by NVML: metadata only, no context is made on any card.

The module ``pynvml`` (or one like it) is passed in, so that recorded answers can stand for cards that are not here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.request import Usage
from schemas.document import reading, unknown
from schemas.form import Json

_HIDDEN = ("-1", "NoDevFiles")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True)
class Cards:
    """The visible cards by id in visible order, the driver's reading, and why there are none where there are none."""

    devices: dict[str, dict[str, Json]] = field(default_factory=dict)
    driver: dict[str, Json] | None = None
    absent: str | None = None


def module() -> Any | None:
    """nvidia-ml-py's module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read(nvml: Any | None, visible: str | None, node: str) -> Cards:
    """The cards that ``visible`` (the value of CUDA_VISIBLE_DEVICES, or None) leaves, as device entries of ``node``.

    Indices count in the order of the PCI bus, which the executor sets for CUDA too.

    Raises:
        Usage: ``visible`` names a card that is not there, one twice, or a form not known.
    """
    if nvml is None:
        return Cards(absent="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Cards(driver=unknown("", f"NVML: {error}"), absent=f"NVML: {error}")
    try:
        driver = _ask(nvml, "", "NVML", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
        cards = sorted(_handles(nvml), key=lambda card: card[0])
        chosen = select([uuid for _, uuid, _ in cards], visible)
        devices = {cards[place][1]: _entry(nvml, cards[place], node) for place in chosen}
        absent = None if devices else "no card" if not cards else f"CUDA_VISIBLE_DEVICES={visible} hides every card"
        return Cards(devices, driver, absent)
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> list[tuple[tuple[str, int], str, Any]]:
    """(sort key by PCI bus, id, handle) of each card. A card without a readable UUID is known by its NVML index."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        except nvml.NVMLError:
            bus = ""
        try:
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            uuid = f"cuda-{index}"
        found.append(((bus, index), uuid, handle))
    return found


def select(uuids: list[str], visible: str | None) -> list[int]:
    """Places in ``uuids`` that ``visible`` leaves, in its order. None leaves all; "", "-1" and what follows -1 none.

    Raises:
        Usage: an entry names no card, several, one already named, or a MIG slice.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in [part.strip() for part in visible.split(",")] if visible.strip() else []:
        if entry in _HIDDEN:
            break
        place = _place(uuids, entry, visible)
        if place in chosen:
            raise Usage(f"CUDA_VISIBLE_DEVICES={visible} names the card {uuids[place]} twice")
        chosen.append(place)
    return chosen


def _place(uuids: list[str], entry: str, visible: str) -> int:
    shown = f"CUDA_VISIBLE_DEVICES={visible}"
    if re.fullmatch(r"[0-9]+", entry, re.ASCII):
        if int(entry) >= len(uuids):
            raise Usage(f"{shown} names card {entry}; this machine has {len(uuids)}, counted from 0")
        return int(entry)
    if entry.startswith("MIG-"):
        raise Usage(f"{shown} names a MIG slice; whole cards are known yet, by index or UUID")
    if not entry.startswith("GPU-"):
        raise Usage(f"{shown}: {entry!r} is neither an index nor the beginning of a UUID (GPU-...)")
    places = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
    if len(places) != 1:
        raise Usage(f"{shown}: {len(places)} of this machine's {len(uuids)} cards have a UUID that begins with {entry}")
    return places[0]


def _entry(nvml: Any, card: tuple[tuple[str, int], str, Any], node: str) -> dict[str, Json]:
    _, uuid, handle = card
    now, idle = "at the time of probing", "at the time of probing; an idle card lowers it"

    def ask(unit: str, why: str, call: Callable[[], Any]) -> dict[str, Json]:
        return _ask(nvml, unit, why, call)

    return {
        "ids": [uuid],
        "node": node,
        "kind": "cuda",
        "name": ask("", "NVML", lambda: _text(nvml.nvmlDeviceGetName(handle))),
        "uuid": ask("", "NVML", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        "sm": ask("", "compute capability", lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "memory_total": ask("B", "NVML", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "memory_free": _ask(nvml, "B", now, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free), zero=True),
        "pcie_generation_max": ask(
            "", "card and slot together", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        ),
        "pcie_width_max": ask("", "card and slot together", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        "pcie_generation_current": ask("", idle, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_width_current": ask("", now, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "mig": ask("", "NVML", lambda: "on" if nvml.nvmlDeviceGetMigMode(handle)[0] else "off"),
        "compute_mode": ask("", "NVML", lambda: _mode(nvml.nvmlDeviceGetComputeMode(handle))),
    }


def _mode(number: int) -> str:
    return _COMPUTE_MODES.get(number, f"mode {number}")


def _ask(nvml: Any, unit: str, why: str, call: Callable[[], Any], *, zero: bool = False) -> dict[str, Json]:
    """The answer as a probed reading, or an unknown with NVML's reason.

    0 and "" are no answers unless ``zero``: NVML gives them for a link or a name that it cannot see.
    """
    try:
        value = call()
    except nvml.NVMLError as error:
        return unknown(unit, f"NVML: {error}")
    except AttributeError as error:  # an older nvidia-ml-py lacks the function
        return unknown(unit, f"nvidia-ml-py: {error}")
    if value in ("", "[N/A]", "N/A") or (value == 0 and not zero):
        return unknown(unit, f"NVML answered {value!r}, which is no value")
    return reading(value, unit, "probed", why)


def _text(answer: Any) -> str:
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
