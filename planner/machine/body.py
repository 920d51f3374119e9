"""This machine as a record's body, untimed: its node, its toolchain, and its devices one by one, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.machine import catalogue, cpu, host, nvml, toolchain, torch_cards
from planner.passes.likeness import numbered
from schemas.form import Json

Say = Callable[[str], None]


def body(devices: str, environ: Mapping[str, str], cards: Any, say: Say) -> dict[str, Json]:
    """The body for "auto" (every visible card, else one CPU rank) or "cpu:N", with an entry a card.

    Links are there from each visible card to every card of the machine, visible or not.

    Args:
        environ: where CUDA_VISIBLE_DEVICES, MPS's limits and NCCL's settings are read.
        cards: a module like pynvml to ask about cards (None: pynvml itself, then torch).
        say: is told what a person should hear of how the cards were read.

    Raises:
        Usage: CUDA_VISIBLE_DEVICES cannot be honoured, or the driver is broken.
    """
    node = cpu.node_id()
    found = nvml.Cards(absent="not asked: a CPU was named")
    if devices == "auto":
        found = _cards(environ, node, cards)
    for note in found.notes:
        say(note)
    ranks = 1 if devices == "auto" else int(devices.removeprefix("cpu:"))
    made: dict[str, Json] = {
        "format": "dormouse.record",
        "format_version": 1,
        "toolchain": toolchain.read(found.driver),
        "nodes": {node: host.node()},
        "devices": numbered(found.devices or _processors(ranks, node)),
    }
    return made | ({"links": found.links} if found.links else {})


def _cards(environ: Mapping[str, str], node: str, cards: Any) -> nvml.Cards:
    """The visible cards by NVML, or by torch alone where NVML is not there, each beside its data sheet."""
    aside = " (under WSL)" if host.is_wsl() else ""
    found = nvml.read(nvml.module() if cards is None else cards, environ, node, aside)
    if found.missing and cards is None and toolchain.for_cuda() and torch_cards.driver_present():
        rows = torch_cards.ask(environ)
        note = f"{found.absent}; the cards are told by torch alone" if rows else f"{found.absent}; torch shows no card"
        found = replace(found, devices=torch_cards.entries(rows or [], node, environ), notes=(*found.notes, note))
    devices = {
        key: {**catalogue.sheet_for(item["name"]["value"], item["memory_total"]["value"]), **item}
        for key, item in found.devices.items()
    }
    return replace(found, devices=devices)


def _processors(ranks: int, node: str) -> dict[str, Json]:
    ids = [f"cpu-{rank}" for rank in range(ranks)]
    return {ids[0]: cpu.device(ids, node)}
