"""The record: what the machine is, sealed, so that it can be carried to another machine and planned for there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from planner import benchmark, catalogue, cpu, nvml, toolchain
from planner.join import join
from planner.request import Usage
from schemas.form import Json
from schemas.seal import seal
from schemas.store import load

Timing = Callable[[int, int], Json]


def record(
    devices: Json,
    *,
    timed: bool = False,
    environ: Mapping[str, str] | None = None,
    cards: Any = None,
    timing: Timing = benchmark.measure,
) -> dict[str, Json]:
    """The sealed record of what ``devices`` (as `planner.request.devices` gives it) names.

    Args:
        timed: whether to time the machine.
        environ: where CUDA_VISIBLE_DEVICES is read (default: the process's own).
        cards: a module like pynvml to ask about cards (default: pynvml itself).
        timing: what times ``ranks`` CPU ranks on ``cores`` cores.

    Raises:
        Usage: a record and timing together, records that do not join, or cards that cannot be told.
        Unfaithful: a record that is not what it claims to be.
    """
    if isinstance(devices, list):
        return _carried(devices, timed)
    if devices != "auto" and not devices.startswith("cpu:"):
        if timed:
            raise Usage("--benchmark times this machine, and cards of the catalogue are not in it")
        return seal(catalogue.record_body(devices))
    return seal(fleet(devices, timed=timed, environ=environ, cards=cards, timing=timing))


def _carried(paths: list[str], timed: bool) -> dict[str, Json]:
    if timed:
        raise Usage(
            "--benchmark times this machine; a record holds what was timed where it was made (probe --benchmark)"
        )
    records = [load(path, "dormouse.record") for path in paths]
    return records[0] if len(records) == 1 else seal(join(records))


def fleet(
    devices: str,
    *,
    timed: bool = False,
    environ: Mapping[str, str] | None = None,
    cards: Any = None,
    timing: Timing = benchmark.measure,
) -> dict[str, Json]:
    """The unsealed body of this machine's record, for "auto" or "cpu:N"; see `record`."""
    node = cpu.node_id()
    found = nvml.Cards(absent="not asked: a CPU was named")
    if devices == "auto":
        visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        found = nvml.read(nvml.module() if cards is None else cards, visible, node)
    body: dict[str, Json] = {
        "format": "dormouse.record",
        "format_version": 1,
        "toolchain": toolchain.read(found.driver),
        "nodes": {node: cpu.node()},
        "devices": found.devices or _processors(1 if devices == "auto" else int(devices.removeprefix("cpu:")), node),
    }
    if timed:
        _time(body, node, timing)
    return body


def _processors(ranks: int, node: str) -> dict[str, Json]:
    ids = [f"cpu-{rank}" for rank in range(ranks)]
    return {ids[0]: cpu.device(ids, node)}


def _time(body: dict[str, Json], node: str, timing: Timing) -> None:
    kinds = {device["kind"] for device in body["devices"].values()}
    if kinds != {"cpu"}:
        raise Usage("--benchmark times CPUs yet, not cards: plan without it, or with --devices cpu[:N]")
    (device,) = body["devices"].values()
    cores = body["nodes"][node]["cores"]["value"] or 1
    found = timing(len(device["ids"]), cores)
    device |= found["device"]
    body["nodes"][node] |= found["node"]
