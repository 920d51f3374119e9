"""Several records as one: those of one node are one node, those of several are a fleet of several nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.machine.links import between
from planner.passes.likeness import Devices, Nodes, grouped, in_order
from planner.request import Usage
from schemas.form import Json

_Reading = dict[str, Json]


def join(records: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The unsealed body of the joined record.

    Devices stand in the order of the records, and ranks follow it. CPU ranks are numbered anew, since each record
    counts its own from 0; cards keep their UUIDs. A node seen by several ranks has the most cores and memory that one
    of them saw, and the least free memory; an all-reduce timed over some of its cards says nothing of all, and is left
    out; what else was timed of it is the first record's that timed it. Links are kept where both ends are in the joined
    fleet, also those that a record knew to cards it did not see.

    Raises:
        Usage: a record or a card given twice, or toolchains that differ.
    """
    seals = [record["seal"]["digest"] for record in records]
    if len(set(seals)) != len(seals):
        raise Usage("--devices names one record twice; for N alike CPU ranks probe with --devices cpu:N")
    alone: Nodes = {}
    for record in records:
        for name, node in _nodes(record):
            alone[name] = _merged(alone[name], node) if name in alone else node
    devices = _devices(records)
    links = between([record.get("links", {}) for record in records], devices.keys())
    nodes, entries = grouped(alone, devices)
    body: dict[str, Json] = {
        "format": "dormouse.record",
        "format_version": 1,
        "toolchain": _toolchain(records),
        "nodes": nodes,
        "devices": entries,
    }
    return body | ({"links": links} if links else {})


def _nodes(record: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
    """Every node by name, those that share an entry too."""
    for name, node in record["nodes"].items():
        for member in node.get("members", [name]):
            yield member, {key: item for key, item in node.items() if key != "members"}


def _devices(records: Sequence[Mapping[str, Json]]) -> Devices:
    """Every device of the records by id, each with an entry of its own and its place in the joined fleet."""
    found: Devices = {}
    processors = 0
    for record in records:
        owners = dict(_owners(record))
        for key, identity in in_order(record["devices"]):
            entry, name = record["devices"][key], identity
            if entry["kind"] == "cpu":
                name, processors = f"cpu-{processors}", processors + 1
            if name in found:
                raise Usage(
                    f"--devices: the card {name} is in two of the records: one card is one rank. To probe each rank"
                    " inside its own limits, let each see a card of its own (CUDA_VISIBLE_DEVICES)"
                )
            found[name] = {**entry, "ids": [name], "order": [len(found)], "node": owners[identity]}
    return found


def _owners(record: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """(id, node) of every device: an entry on alike nodes has as many ids on each, node after node."""
    for entry in record["devices"].values():
        members = record["nodes"][entry["node"]].get("members", [entry["node"]])
        each = len(entry["ids"]) // len(members)
        for place, identity in enumerate(entry["ids"]):
            yield identity, members[place // each]


def _merged(first: Mapping[str, Json], second: Mapping[str, Json]) -> dict[str, Json]:
    """One node as two of its ranks saw it."""
    pick: dict[str, Callable[[_Reading, _Reading], _Reading]] = {
        "cores": _most,
        "memory_total": _most,
        "memory_free": _least,
        "pinned_limit": _least,
    }
    merged = {key: item for key, item in {**second, **first}.items() if not key.startswith("allreduce_")}
    for key in first.keys() & second.keys() & pick.keys():
        merged[key] = pick[key](first[key], second[key])
    return merged


def _most(first: _Reading, second: _Reading) -> _Reading:
    return second if _known(second) and (not _known(first) or second["value"] > first["value"]) else first


def _least(first: _Reading, second: _Reading) -> _Reading:
    return second if _known(second) and (not _known(first) or second["value"] < first["value"]) else first


def _known(item: _Reading) -> bool:
    return isinstance(item["value"], int | float)


def _toolchain(records: Sequence[Mapping[str, Json]]) -> Json:
    """The one toolchain of all records; a plan holds one, so records of unlike ones do not join."""
    first = records[0]["toolchain"]
    for record in records[1:]:
        for part in sorted(first.keys() | record["toolchain"].keys()):
            ours, theirs = (chain.get(part, {}).get("value") for chain in (first, record["toolchain"]))
            if ours != theirs:
                raise Usage(f"--devices: the records differ in {part}: {ours!s:.60} and {theirs!s:.60}")
    return first
