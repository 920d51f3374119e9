"""Which NVIDIA cards this machine has, by NVML: metadata only, no context is made on any card.

The module ``pynvml`` (or one like it) is passed in, so that recorded answers can stand for cards that are not here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.machine import device, links, mps, visible
from planner.machine.ask import Ask, text
from planner.request import Usage
from schemas.document import unknown
from schemas.form import Json

_NO_DRIVER = (9, 12)  # driver not loaded, library not found: a machine without NVIDIA's driver
_NO_PERMISSION, _LOST, _MISMATCH = 4, 15, 18
_REMEDIES = {
    _NO_PERMISSION: "this user may not ask the driver: join the group that owns /dev/nvidia*, or give the container"
    " its cards",
    _LOST: "a card fell off the bus: reset it (nvidia-smi --gpu-reset) or reboot",
    _MISMATCH: "the driver's library is newer or older than the driver loaded: reboot, or reload the driver",
}

_UNKNOWN = "a card does not answer"


@dataclass(frozen=True)
class Cards:
    """The visible cards by id in visible order, and what was learned on the way.

    ``links`` joins them to each other and to cards that are not visible, ``driver`` is its reading, ``absent`` says why
    there are no cards where there are none, ``missing`` that NVML itself was not there to be asked, and ``notes`` what
    a person should hear.
    """

    devices: dict[str, dict[str, Json]] = field(default_factory=dict)
    driver: dict[str, Json] | None = None
    absent: str | None = None
    links: dict[str, Json] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: bool = False


@dataclass(frozen=True)
class _Found:
    """One card of the machine: id, NVML's handle (None: lost), bus id, and a handle for each of ``seen.slices``."""

    seen: visible.Card
    handle: Any
    bus: str
    slices: tuple[Any, ...] = ()
    lost: str | None = None

    @property
    def joins(self) -> bool:
        """Whether links of it can be asked for: it answers, and is not divided."""
        return self.lost is None and not self.seen.divided


def module() -> Any | None:
    """nvidia-ml-py's module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read(nvml: Any | None, environ: Mapping[str, str], node: str, aside: str = "") -> Cards:
    """The cards and slices that ``environ`` leaves visible, as device entries of ``node``.

    Args:
        environ: where CUDA_VISIBLE_DEVICES and MPS's limits are read. Indices count in the order of the PCI bus, which
            the executor sets for CUDA too.
        aside: follows NVML's reason of what it will not tell (a platform's limits).

    Raises:
        Usage: CUDA_VISIBLE_DEVICES cannot be honoured (see `planner.machine.visible.select`), or the driver is broken.
    """
    if nvml is None:
        return Cards(absent="nvidia-ml-py is not installed", missing=True)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _unasked(error)
    try:
        ask = Ask(nvml, aside)
        driver = ask("", "NVML", lambda: text(nvml.nvmlSystemGetDriverVersion()))
        found = _machine(ask)
        chosen = visible.select([one.seen for one in found], environ)
        handles = [_handle(found[place], place, part) for place, part in chosen.places]
        limits = mps.read(environ)
        devices = {handle.uuid: device.entry(ask, handle, node, limits) for handle in handles}
        whole = {place for place, part in chosen.places if part is None and not found[place].seen.divided}
        ends = [_end(found[place]) for place, _ in chosen.places if place in whole]
        others = [_end(one) for place, one in enumerate(found) if place not in whole and one.joins]
        joined = links.read(ask, ends, others, environ)
        absent = None if devices else "no card" if not found else "CUDA_VISIBLE_DEVICES hides every card"
        return Cards(devices, driver, absent, joined, chosen.notes)
    finally:
        nvml.nvmlShutdown()


def _unasked(error: Any) -> Cards:
    """Why NVML would not start: no driver is a machine without cards, all else is a fault to be told."""
    code = getattr(error, "value", None)
    if code in _REMEDIES:
        raise Usage(f"NVML: {error}: {_REMEDIES[code]}; to plan for the CPU: --devices cpu")
    why = f"NVML: {error}"
    notes = () if code in _NO_DRIVER else (f"{why}: no card is read by it",)
    return Cards(driver=unknown("", why), absent=why, notes=notes, missing=True)


def _machine(ask: Ask) -> list[_Found]:
    """Every card in the order of the PCI bus. NVML counts so too: where a bus id is not told, its order is kept.

    Cards that this user may not touch are none of CUDA's either. A card without a readable UUID is known by its place.
    """
    count, reason = ask.get("nvmlDeviceGetCount")
    if reason is not None:
        raise Usage(f"{reason}: the cards cannot be counted; to plan for the CPU: --devices cpu")
    found = [one for one in (_card(ask, index) for index in range(count)) if one is not None]
    ordered = sorted(found, key=lambda one: one.bus) if all(one.bus for one in found) else found
    return [
        one if one.seen.uuid else replace(one, seen=replace(one.seen, uuid=f"{visible.UNNAMED}{place}"))
        for place, one in enumerate(ordered)
    ]


def _card(ask: Ask, index: int) -> _Found | None:
    """The card of NVML's ``index``, with an empty id where it tells none; None where this user may not touch it."""
    nvml = ask.nvml
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        if error.value == _NO_PERMISSION:
            return None
        return _Found(visible.Card(""), None, "", lost=f"NVML: {error}: {_REMEDIES.get(error.value, _UNKNOWN)}")
    bus, _ = ask.plain(lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower())
    uuid, _ = ask.plain(lambda: text(nvml.nvmlDeviceGetUUID(handle)))
    mode, _ = ask.plain(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    slices = _slices(ask, handle) if mode else []
    seen = visible.Card(uuid or "", bool(mode), tuple(part for part, _ in slices))
    return _Found(seen, handle, bus or "", tuple(own for _, own in slices))


def _slices(ask: Ask, parent: Any) -> list[tuple[visible.Slice, Any]]:
    """(slice, its handle) of each MIG device of ``parent``; NVML leaves gaps among their numbers."""
    found = []
    most, _ = ask.get("nvmlDeviceGetMaxMigDeviceCount", parent)
    for number in range(most or 0):
        own, reason = ask.get("nvmlDeviceGetMigDeviceHandleByIndex", parent, number)
        if reason is not None:
            continue
        uuid, reason = ask.get("nvmlDeviceGetUUID", own)
        if uuid is None:
            raise Usage(f"{reason}: a MIG slice does not tell its UUID, by which alone CUDA can be given it")
        gpu, _ = ask.get("nvmlDeviceGetGpuInstanceId", own)
        compute, _ = ask.get("nvmlDeviceGetComputeInstanceId", own)
        found.append((visible.Slice(text(uuid), (gpu, compute)), own))
    return found


def _end(one: _Found) -> links.End:
    return links.End(one.seen.uuid, one.handle, one.bus)


def _handle(one: _Found, place: int, part: int | None) -> device.Handle:
    if one.lost:
        raise Usage(f"{one.lost} (card {place}); or name the others in CUDA_VISIBLE_DEVICES")
    if part is None:
        return device.Handle(one.seen.uuid, place, one.handle, one.handle, one.seen.divided)
    return device.Handle(one.seen.slices[part].uuid, place, one.handle, one.slices[part], True)
