"""What differs: a plan's predictions from what a run measured, or a newer plan from an older one.

Both give a plain document (format "dormouse.diff"); how it is shown is `planner.diff_render`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.request import Usage
from schemas.document import escape, is_decision, is_reading, resolve, walk
from schemas.form import Json, six

Limits = Sequence[tuple[str | None, float]]


def measured(plan: Mapping[str, Json], run: int | None = None, limits: Limits = ()) -> dict[str, Json]:
    """Predicted against measured by run number ``run`` (the newest when None), and which rows exceed ``limits``.

    Args:
        limits: (kind or None for every kind, percent) pairs; a kind's own limit wins over the general one.

    Raises:
        Usage: there is no such run.
    """
    runs = plan["runs"]
    if run is not None and run >= len(runs):
        raise Usage(f"--run {run}: the plan has {len(runs)} run{'s' * (len(runs) != 1)}, counted from 0")
    document: dict[str, Json] = {"format": "dormouse.diff", "format_version": 1, "mode": "measured"}
    document |= {
        "plan": plan["seal"]["digest"],
        "runs": len(runs),
        "run": None,
        "rows": [],
        "absent": [],
        "failures": [],
    }
    if not runs:
        document["failures"] = [{"pointer": "/runs", "rank": None, "why": "not run yet"}] if limits else []
        return document
    place = len(runs) - 1 if run is None else run
    entry = runs[place]
    document["run"] = {"place": place, **{key: entry[key] for key in ("id", "outcome", "reason", "steps")}}
    document["rows"] = [_row(plan, label, line) for label, line in entry["measured"].items()]
    document["absent"] = [{**_label(label), "reason": reason} for label, reason in _absent(plan, entry)]
    document["failures"] = list(_failures(document, limits))
    return document


def _row(plan: Mapping[str, Json], label: str, line: Mapping[str, Json]) -> dict[str, Json]:
    """One measured line beside its prediction. ``error`` is in percent of the prediction, None where there is none."""
    item = resolve(plan, label.split(" @")[0])
    predicted, value = line["predicted"], line["value"]
    row = {**_label(label), "predicted": predicted, "value": value, "unit": line["unit"]}
    row |= {"low": line.get("low"), "high": line.get("high"), "error": None}
    row |= {"weakest": item.get("weakest"), "instrument": line["instrument"]}
    if _is_number(predicted) and _is_number(value):
        row["error"] = 0.0 if value == predicted else six(100 * (value - predicted) / predicted) if predicted else None
        row["verdict"] = _inside(row)
    elif predicted is None:
        row["verdict"] = "not predicted"
    else:
        row["verdict"] = "equal" if predicted == value else "differs"
    return row


def _inside(row: Mapping[str, Json]) -> str:
    if row["low"] is None:
        return "equal" if row["value"] == row["predicted"] else "no range"
    return "inside" if row["low"] <= row["value"] <= row["high"] else "outside"


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(label: str) -> dict[str, Json]:
    pointer, _, rank = label.partition(" @")
    return {"pointer": pointer, "rank": int(rank) if rank else None}


def _absent(plan: Mapping[str, Json], run: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """(label, reason) of every measurable reading, by rank where it is a rank's, that the run did not measure."""
    wanted = [label for pointer, item in walk(plan) if item.get("measurable") for label in _labels(plan, pointer)]
    for label in dict.fromkeys([*wanted, *run["absent"]]):
        if label not in run["measured"]:
            yield label, run["absent"].get(label, "the run gives no reason")


def _labels(plan: Mapping[str, Json], pointer: str) -> list[str]:
    parts = pointer.split("/")
    if parts[1] != "ranks":
        return [pointer]
    return [f"{pointer} @{member}" for member in plan["ranks"][int(parts[2])]["members"]]


def kind(pointer: str) -> str:
    """What a limit of ``--fail-over`` calls ``pointer``: tokens, or the part of a rank or of the plan it stands in."""
    parts = pointer.split("/")[1:]
    if parts[-1].startswith("tokens"):
        return "tokens"
    return parts[2] if parts[0] == "ranks" and len(parts) > 2 else parts[0]


def _failures(document: Mapping[str, Json], limits: Limits) -> Iterator[dict[str, Json]]:
    allowed = dict(limits)
    for row in document["rows"]:
        limit = allowed.get(kind(row["pointer"]), allowed.get(None))
        if limit is None or row["verdict"] == "equal" or (row["error"] is not None and abs(row["error"]) <= limit):
            continue
        missed = f"misses by {abs(row['error']):.3g} %" if row["error"] is not None else "is not what was predicted"
        missed = "was not predicted" if row["predicted"] is None else missed
        yield {"pointer": row["pointer"], "rank": row["rank"], "why": f"{missed}; {limit:g} % is allowed"}
    for row in document["absent"]:
        if allowed.get(kind(row["pointer"]), allowed.get(None)) is not None:
            yield {"pointer": row["pointer"], "rank": row["rank"], "why": f"was not measured: {row['reason']}"}


def changed(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json]:
    """What is different in ``new``, causes first: each change names the changed leaves that it was computed from."""
    rows = _changes(old, new, "")
    changes = dict.fromkeys(row["pointer"] for row in rows)
    beneath = {pointer: _beneath(pointer, (old, new), changes) for pointer in changes}
    for row in rows:
        row["causes"] = _leaves(row["pointer"], beneath)
    return {
        "format": "dormouse.diff",
        "format_version": 1,
        "mode": "changed",
        "old": old["seal"]["digest"],
        "new": new["seal"]["digest"],
        "changes": [row for row in rows if not row["causes"]] + [row for row in rows if row["causes"]],
    }


_UNCOMPARED = ("/counts", "/seal", "/runs")  # what follows from the body, or is no part of it
_SAID = ("value", "low", "high", "basis", "asked", "chosen", "outcome")


def _changes(old: Json, new: Json, pointer: str) -> list[dict[str, Json]]:
    if pointer in _UNCOMPARED or old == new:
        return []
    if _is_item(old) and _is_item(new):
        same = all(old.get(part) == new.get(part) for part in _SAID)
        return [] if same else [_change(pointer, "changed", old, new)]
    pairs = _pairs(old, new)
    if pairs is None:
        return [_change(pointer, "changed", old, new)]
    rows = []
    for key, (before, after) in pairs.items():
        below = f"{pointer}/{escape(key)}"
        if before is _NOTHING or after is _NOTHING:
            rows.append(_change(below, "added" if before is _NOTHING else "removed", before, after))
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


def _change(pointer: str, change: str, old: Json, new: Json) -> dict[str, Json]:
    some = new if old is _NOTHING else old
    what = "reading" if is_reading(some) else "decision" if is_decision(some) else "plain"
    unit = some["unit"] if what == "reading" else None
    return {"pointer": pointer, "change": change, "what": what, "unit": unit, "old": _plain(old), "new": _plain(new)}


def _plain(value: Json) -> Json:
    """The value of an item; a container that is there on one side only is not spelled out."""
    if is_reading(value):
        return value["value"]
    if is_decision(value):
        return value["chosen"]
    spelled = not isinstance(value, dict) and not (isinstance(value, list) and any(isinstance(x, dict) for x in value))
    return value if spelled and value is not _NOTHING else None


def _beneath(pointer: str, plans: Sequence[Json], changes: Mapping[str, None]) -> list[str]:
    """The changes that the inputs of ``pointer``, in either plan, touch."""
    touched = [change for source in _inputs(pointer, plans) for change in _touched(source, changes)]
    return [change for change in dict.fromkeys(touched) if change != pointer]


def _touched(pointer: str, changes: Mapping[str, None]) -> list[str]:
    """The changes at, beneath or around ``pointer``: an input may name a whole object, or a part of a changed one."""
    if pointer in changes:
        return [pointer]
    return [change for change in changes if change.startswith(pointer + "/") or pointer.startswith(change + "/")]


def _leaves(pointer: str, beneath: Mapping[str, Sequence[str]]) -> list[str]:
    """The changes that ``pointer`` rests on and that rest on no other change; none where it is such a leaf itself."""
    reached, waiting = {pointer}, [pointer]
    while waiting:
        for below in beneath[waiting.pop()]:
            if below not in reached:
                reached.add(below)
                waiting.append(below)
    return sorted(change for change in reached - {pointer} if not beneath[change])


def _inputs(pointer: str, plans: Sequence[Json]) -> list[str]:
    sources: list[str] = []
    for plan in plans:
        try:
            item = resolve(plan, pointer)
        except KeyError:
            continue
        sources += item.get("inputs", ()) if isinstance(item, dict) else ()
    return list(dict.fromkeys(sources))
