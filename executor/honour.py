"""Whether the plan can be honoured here: every rank gathers facts, all judge the same facts by the same list."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from executor.account import workload_digest
from executor.build import BadPlace
from executor.data import BadData, Corpus
from executor.meeting import Meeting
from executor.optim.routing import split
from executor.slices import RankSlice
from planner.door import BadWorkload, Workload
from planner.machine import probe
from planner.refusals.rules import refuse
from planner.request import Usage
from schemas.form import Json

# The readings of a device that a plan was made for, and that the rules compare.
_DEVICE = ("name", "cores", "vector_bits", "sm", "memory_free", "memory_total")


class BadRank(Exception):
    """A rank cannot take part for a fault of the user (data, model); the message is the same on every rank. Exit 2."""


def device_facts(rank: RankSlice) -> tuple[dict[str, Json], dict[str, Json]]:
    """(this rank's device as it is now, the toolchain's versions), as plain values, probed anew.

    Where the planned card is gone, the device is the CPU, and ``here`` says what there is instead.
    """
    here = None
    try:
        body = probe.fleet("auto" if rank.kind == "cuda" else "cpu:1")
    except Usage:  # the planned card is not among this machine's, or the driver is broken
        here, body = _cards_here(), probe.fleet("cpu:1")
    identity, device = next(iter(body["devices"].items()))
    found: dict[str, Json] = {"id": rank.device if device["kind"] == "cpu" else identity, "kind": device["kind"]}
    found |= {key: device[key]["value"] for key in _DEVICE if key in device}
    if rank.kind == "cuda" and device["kind"] == "cpu":
        found["here"] = here or "no card is visible here"
    return found, {name: item["value"] for name, item in body["toolchain"].items()}


def _cards_here() -> str:
    """What cards there are, whichever of them this process was to see."""
    environ = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        cards = probe.fleet("auto", environ=environ)["devices"]
    except Usage as error:
        return str(error)
    named = [f"{item['name']['value']} ({', '.join(item['ids'])})" for item in cards.values() if item["kind"] == "cuda"]
    return f"here are {', '.join(named)}" if named else "no card is visible here"


def workload_facts(workload: Workload, model: Any, opt: str) -> str:
    """The digest of what was built: names, shapes, dtypes, routes and kernel rows."""
    return workload_digest(split(model, opt), workload.kernels)


def data_facts(corpora: Sequence[Corpus]) -> list[dict[str, Json]]:
    """Name, length and SHA-256 of each source, read whole."""
    return [dict(corpus.digest._asdict()) for corpus in corpora]


def own_facts(seal: str, rank: RankSlice, gather: Callable[[], dict[str, Json]]) -> dict[str, Json]:
    """This rank's row of facts. A fault of the user that ``gather`` meets becomes the row's ``fault``."""
    device, toolchain = device_facts(rank)
    row: dict[str, Json] = {
        "rank": rank.rank,
        "seal": seal,
        "device": device,
        "threads": rank.threads,
        "toolchain": toolchain,
        "nccl_available": dist.is_nccl_available(),
        "launcher": {"torchrun": "TORCHELASTIC_RUN_ID" in os.environ},
        "fault": None,
    }
    try:
        return row | gather()
    except (BadData, BadPlace, BadWorkload) as error:
        return row | {"fault": str(error)}


def agree(plan: Mapping[str, Json], meeting: Meeting, row: Json, unwritable: str | None) -> list[Json]:
    """Gather every rank's facts and judge them: on every rank the same verdict. Gives the ranks' rows.

    Raises:
        BadRank: a rank met a fault of the user.
        Refused: the plan cannot be honoured, with every reason of every rank.
    """
    gathered = meeting.gather({"row": row, "unwritable": unwritable})
    rows = [item["row"] for item in gathered]
    for found in rows:
        if found["fault"] is not None:
            raise BadRank(found["fault"])
    facts = {
        "world_size": meeting.size,
        "rank": meeting.rank,
        "ranks": rows,
        "record_unwritable": gathered[0]["unwritable"],
    }
    refuse("start", plan, facts)
    return rows


def agree_on_smoke(plan: Mapping[str, Json], meeting: Meeting, row: Json) -> None:
    """Judge what the smoke launch of every rank showed. Raises Refused on every rank."""
    refuse("running", plan, {"smoke": meeting.gather(row)})
