"""The record: what the machine is, sealed, so that it can be carried to another machine and planned for there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from planner.machine import benchmark, benchmark_cards, catalogue, links
from planner.machine import body as machine
from planner.machine.join import join
from planner.passes.likeness import grouped
from planner.request import Usage
from schemas.form import Json
from schemas.seal import seal
from schemas.store import load

Say = Callable[[str], None]
Timing = Callable[[int, int], Json]
CardTiming = Callable[[Mapping[str, Json], Mapping[str, Json] | None], Json]


def silent(_: str) -> None:
    """Nobody listens."""


def record(
    devices: Json,
    *,
    timed: bool = False,
    beyond: bool = False,
    environ: Mapping[str, str] | None = None,
    cards: Any = None,
    timing: Timing = benchmark.measure,
    card_timing: CardTiming = benchmark_cards.measure,
    say: Say = silent,
) -> dict[str, Json]:
    """The sealed record of what ``devices`` (as `planner.request.devices` gives it) names.

    Args:
        timed: whether to time the machine.
        beyond: whether links to cards that are not visible are kept, for a record that another is to be joined with.
        environ: where CUDA_VISIBLE_DEVICES is read (default: the process's own).
        cards: a module like pynvml to ask about cards (default: pynvml itself).
        timing: what times ``ranks`` CPU ranks on ``cores`` cores.
        card_timing: what times the cards of device entries, and the classes of their links.
        say: is told what a person should hear of how the machine was read.

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
    how = {"timed": timed, "beyond": beyond, "environ": environ, "cards": cards}
    return seal(fleet(devices, **how, timing=timing, card_timing=card_timing, say=say))


def _carried(paths: list[str], timed: bool) -> dict[str, Json]:
    if timed:
        raise Usage(
            "--benchmark times this machine; a record holds what was timed where it was made (probe --benchmark)"
        )
    records = [load(path, "dormouse.record") for path in paths]
    return seal(join(records)) if len(records) > 1 else _alone(records[0])


def _alone(record: dict[str, Json]) -> dict[str, Json]:
    """``record`` without links to cards that it does not hold, which only a join can use."""
    known = record.get("links", {})
    kept = links.between([known], [identity for item in record["devices"].values() for identity in item["ids"]])
    if kept == known:
        return record
    body = {key: item for key, item in record.items() if key != "links"}
    _put_links(body, kept)
    return seal(body)


def fleet(
    devices: str,
    *,
    timed: bool = False,
    beyond: bool = False,
    environ: Mapping[str, str] | None = None,
    cards: Any = None,
    timing: Timing = benchmark.measure,
    card_timing: CardTiming = benchmark_cards.measure,
    say: Say = silent,
) -> dict[str, Json]:
    """The unsealed body of this machine's record, for "auto" or "cpu:N"; see `record`."""
    body = machine.body(devices, os.environ if environ is None else environ, cards, say)
    (node,), known = body["nodes"], body.pop("links", {})
    _put_links(body, links.between([known], list(body["devices"])))
    if timed:
        _time(body, node, timing, card_timing)
    if beyond:
        _put_links(body, links.between([body.get("links", {}), known], None))
    body["nodes"], body["devices"] = grouped(body["nodes"], body["devices"])
    return body


def _put_links(body: dict[str, Json], found: Mapping[str, Json]) -> None:
    if found:
        body["links"] = dict(found)


def _time(body: dict[str, Json], node: str, timing: Timing, card_timing: CardTiming) -> None:
    if all(device["kind"] == "cuda" for device in body["devices"].values()):
        found = card_timing(body["devices"], body.get("links"))
        body |= {key: found[key] for key in ("devices", "links") if found[key]}
    else:
        (device,) = body["devices"].values()
        found = timing(len(device["ids"]), body["nodes"][node]["cores"]["value"] or 1)
        device |= found["device"]
    body["nodes"][node] |= found["node"]
