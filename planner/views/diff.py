"""How a plan's predictions differ from what a run measured, as a plain document (format "dormouse.diff").

How it is shown is `planner.views.diff_render`; what differs between two plans is in `planner.views.changes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.request import Usage
from planner.views.words import plural
from schemas.document import resolve, walk
from schemas.form import Json, six

FAIL_KINDS = ("memory", "step", "exchange", "fit", "tokens")
"""The kinds that --fail-over takes."""

Limits = Sequence[tuple[str | None, float]]


def measured(plan: Mapping[str, Json], run: int | None = None, limits: Limits = ()) -> dict[str, Json]:
    """Predicted against measured by a run, and which rows exceed ``limits``.

    Args:
        run: its number, from 1; the newest when None.
        limits: (kind or None for every kind, percent) pairs; a kind's own limit wins over the general one.

    Raises:
        Usage: there is no such run, or a limit's kind is of nothing that this plan could measure.
    """
    runs = plan["runs"]
    if run is not None and run > len(runs):
        raise Usage(f"--run {run}: the plan has {plural(len(runs), 'run')}, counted from 1")
    document: dict[str, Json] = {"format": "dormouse.diff", "format_version": 1, "mode": "measured"}
    document |= {
        "plan": plan["seal"]["digest"],
        "runs": len(runs),
        "run": None,
        "rows": [],
        "absent": [],
        "failures": [],
    }
    _refuse_idle_kinds(plan, None if not runs else runs[(run or len(runs)) - 1], limits)
    if not runs:
        document["failures"] = [{"pointer": "/runs", "rank": None, "why": "not run yet"}] if limits else []
        return document
    place = run or len(runs)
    entry = runs[place - 1]
    document["run"] = {"place": place, **{key: entry[key] for key in ("id", "outcome", "reason", "steps")}}
    document["rows"] = [_row(plan, label, line) for label, line in entry["measured"].items()]
    document["absent"] = [{**_label(label), "reason": reason} for label, reason in _absent(plan, entry)]
    document["failures"] = list(_failures(document, limits))
    return document


def _refuse_idle_kinds(plan: Mapping[str, Json], run: Mapping[str, Json] | None, limits: Limits) -> None:
    """A limit of a kind that no row is of would judge nothing, and pass."""
    labels = [pointer for pointer, item in walk(plan) if item.get("measurable")]
    labels += [] if run is None else [*run["measured"], *run["absent"]]
    found = dict.fromkeys(kind(label.split(" @")[0]) for label in labels)
    for asked, percent in limits:
        if asked is not None and asked not in found:
            has = ", ".join(name for name in FAIL_KINDS if name in found) or "nothing to measure"
            raise Usage(f"--fail-over {asked}={percent:g}: this plan has no measurable row of that kind; it has {has}")


def _row(plan: Mapping[str, Json], label: str, line: Mapping[str, Json]) -> dict[str, Json]:
    """One measured line beside its prediction. ``error`` is in percent of the prediction, None where there is none."""
    item = resolve(plan, label.split(" @")[0])
    predicted, value = line["predicted"], line["value"]
    row = {**_label(label), "predicted": predicted, "value": value, "unit": line["unit"]}
    row |= {"low": line.get("low"), "high": line.get("high"), "spread": line.get("spread"), "error": None}
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
