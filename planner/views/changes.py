"""What is different in a newer plan, causes first. How it is shown is `planner.views.diff_render`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.views.causes import Links
from planner.views.words import amount, plural, ranks
from schemas.document import escape, is_decision, is_reading
from schemas.form import Json

_UNCOMPARED = ("/counts", "/seal", "/runs")  # what follows from the body, or is no part of it
# What may be another in a reading or a decision, the weightiest first: only that is told.
_PARTS = (("value",), ("chosen",), ("low", "high"), ("asked",), ("basis",), ("outcome",))
_CARRYING = ("value", "chosen", "range", "whole")  # what an item computed from it sees


def changed(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json]:
    """What is different in ``new``: each change names the changed leaves that it was computed from."""
    rows = _changes(old, new, "")
    links = Links((old, new), [row["pointer"] for row in rows], [r["pointer"] for r in rows if r["part"] in _CARRYING])
    for row in rows:
        row["causes"] = links.causes(row["pointer"])
    return {
        "format": "dormouse.diff",
        "format_version": 1,
        "mode": "changed",
        "old": old["seal"]["digest"],
        "new": new["seal"]["digest"],
        "changes": [row for row in rows if not row["causes"]] + [row for row in rows if row["causes"]],
    }


def _changes(old: Json, new: Json, pointer: str) -> list[dict[str, Json]]:
    if pointer in _UNCOMPARED or old == new:
        return []
    if _is_item(old) and _is_item(new):
        part = next((part for part in _PARTS if any(old.get(key) != new.get(key) for key in part)), None)
        return [] if part is None else [_item(pointer, old, new, part)]
    pairs = None if pointer == "/request/calibrate" else _pairs(old, new)
    if pairs is None:
        return [_whole(pointer, "changed", old, new)]
    rows = []
    for key, (before, after) in pairs.items():
        below = f"{pointer}/{escape(key)}"
        if before is _NOTHING or after is _NOTHING:
            rows.append(_whole(below, "added" if before is _NOTHING else "removed", before, after))
        else:
            rows += _changes(before, after, below)
    return rows


_NOTHING = object()


def _pairs(old: Json, new: Json) -> dict[str, tuple[Json, Json]] | None:
    """The entries of two containers of one kind side by side; None for anything else and for lists of scalars."""
    if isinstance(old, dict) and isinstance(new, dict) and not _is_item(old) and not _is_item(new):
        return {key: (old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in {**new, **old}}
    if isinstance(old, list) and isinstance(new, list) and any(isinstance(entry, dict) for entry in [*old, *new]):
        most = range(max(len(old), len(new)))
        return {str(i): (_at(old, i), _at(new, i)) for i in most}
    return None


def _at(entries: list[Json], place: int) -> Json:
    return entries[place] if place < len(entries) else _NOTHING


def _is_item(value: Json) -> bool:
    return is_reading(value) or is_decision(value)


def _item(pointer: str, old: Json, new: Json, part: tuple[str, ...]) -> dict[str, Json]:
    """A reading or a decision of which ``part`` is another."""
    both = is_reading(old) and is_reading(new)
    sides = [item.get(part[0]) if len(part) == 1 else _range(item) for item in (old, new)]
    row: dict[str, Json] = {"pointer": pointer, "change": "changed", "what": "reading" if both else "decision"}
    row |= {"part": part[0] if len(part) == 1 else "range", "unit": old["unit"] if both else None}
    return row | {"old": sides[0], "new": sides[1]}


def _range(item: Mapping[str, Any]) -> Json:
    return [item["low"], item["high"]] if "low" in item else None


def _whole(pointer: str, change: str, old: Json, new: Json) -> dict[str, Json]:
    """What is there on one side only, or is no reading and no decision."""
    some = new if old is _NOTHING else old
    what = "reading" if is_reading(some) else "decision" if is_decision(some) else "plain"
    unit = some["unit"] if what == "reading" else "B" if pointer.startswith("/request/fit") else None
    row = {"pointer": pointer, "change": change, "what": what, "part": "whole", "unit": unit}
    return row | {"old": _plain(pointer, old), "new": _plain(pointer, new)}


def _plain(pointer: str, value: Json) -> Json:
    """The value of an item, and what a container holds in a few words; None for nothing."""
    if value is _NOTHING:
        return None
    if is_reading(value):
        return value["value"]
    if is_decision(value):
        return value["chosen"]
    if pointer == "/request/calibrate":
        return list(dict.fromkeys(f"{row['seal'][:12]} ({row['run']})" for row in value))
    if isinstance(value, dict):
        return _gist(value)
    return [_gist(entry) for entry in value] if _of_objects(value) else value


def _of_objects(value: Json) -> bool:
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


def _gist(entry: Mapping[str, Any]) -> str:
    """A rank entry, a device, a source, or any other object in a few words."""
    if "members" in entry and "batch" in entry:
        work = f"{amount(entry['batch']['chosen'])} x {amount(entry['seq']['chosen'])}"
        many = "ranks" if len(entry["members"]) > 1 else "rank"
        return f"{many} {ranks(entry['members'])} on {', '.join(entry['devices'])}: {entry['dtype']['chosen']}, {work}"
    if "ids" in entry:
        return f"{len(entry['ids'])} x {amount(entry['name']['value'])}"
    if isinstance(entry.get("name"), str):
        return str(entry["name"])
    return f"{plural(len(entry), 'entry', 'entries')}: {', '.join(entry)}"
