"""Several records as one: those of one node are one node, those of several are a fleet of several nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from planner.request import Usage
from schemas.form import Json

_Reading = dict[str, Json]


def join(records: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The unsealed body of the joined record.

    CPU ranks are numbered anew, in the order of the records, since each record counts its own from 0; alike ones share
    an entry. Cards keep their UUIDs. A node seen by several ranks has the most cores and memory that one of them saw,
    and the least free memory.

    Raises:
        Usage: a record or a card given twice, or toolchains that differ.
    """
    seals = [record["seal"]["digest"] for record in records]
    if len(set(seals)) != len(seals):
        raise Usage("--devices names one record twice; for N alike CPU ranks probe with --devices cpu:N")
    nodes: dict[str, Json] = {}
    for record in records:
        for name, node in record["nodes"].items():
            nodes[name] = _merged(nodes[name], node) if name in nodes else dict(node)
    return {
        "format": "dormouse.record",
        "format_version": 1,
        "toolchain": _toolchain(records),
        "nodes": nodes,
        "devices": _devices(records),
    }


def _devices(records: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    entries: list[dict[str, Json]] = []
    processors = 0
    for record in records:
        for device in record["devices"].values():
            entry = dict(device)
            if entry["kind"] == "cpu":
                entry["ids"] = [f"cpu-{processors + place}" for place in range(len(device["ids"]))]
                processors += len(entry["ids"])
                alike = [other for other in entries if _without_ids(other) == _without_ids(entry)]
                if alike:
                    alike[0]["ids"] = [*alike[0]["ids"], *entry["ids"]]
                    continue
            entries.append(entry)
    found = {entry["ids"][0]: entry for entry in entries}
    if len(found) != len(entries):
        twice = next(entry["ids"][0] for entry in entries if found[entry["ids"][0]] is not entry)
        raise Usage(f"--devices: the card {twice} is in two of the records")
    return found


def _without_ids(entry: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in entry.items() if key != "ids"}


def _merged(first: Mapping[str, Json], second: Mapping[str, Json]) -> dict[str, Json]:
    pick: dict[str, Callable[[_Reading, _Reading], _Reading]] = {"memory_free": _least}
    merged = {**second, **first}
    for key in first.keys() & second.keys():
        merged[key] = pick.get(key, _most)(first[key], second[key])
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
        for part, item in record["toolchain"].items():
            if item["value"] != first[part]["value"]:
                raise Usage(f"--devices: the records differ in {part}: {first[part]['value']} and {item['value']}")
    return first
