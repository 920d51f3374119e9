"""A diff document as text for a terminal, as markdown for a review, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.page import Page, Row
from planner.words import amount, choice, clean, span
from schemas.form import Json, render
from schemas.validate import refuse_other_shape

_STYLES = {"inside": "green", "equal": "green", "outside": "red", "differs": "red"}
_STYLES |= {"no range": "yellow", "not predicted": "yellow"}
_MEASURED = (
    "quantity",
    "rank",
    "predicted",
    "low .. high",
    "verdict",
    "measured",
    "error",
    "weakest basis",
    "instrument",
)
_ABSENT = ("not measured", "rank", "reason")
_FAILED = ("fails", "rank", "why")
_CHANGED = ("changed", "how", "old", "new", "caused by")


def as_json(document: Mapping[str, Json]) -> bytes:
    """``document`` in the one form of documents, proved against its schema."""
    refuse_other_shape(document, "diff")
    return render(document)


def as_text(document: Mapping[str, Json], page: Page) -> None:
    """``document`` on ``page``, a line a row."""
    page.line(heading(document))
    for names, rows in tables(document):
        page.table(names, rows)


def as_markdown(document: Mapping[str, Json]) -> str:
    """``document`` as markdown tables."""
    parts = [heading(document)]
    for names, rows in tables(document):
        lines = [_bar(names), _bar(["---"] * len(names)), *(_bar(cells) for cells, _ in rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def heading(document: Mapping[str, Json]) -> str:
    """One sentence on what is compared."""
    if document["mode"] == "changed":
        old, new = document["old"][:12], document["new"][:12]
        if old == new:
            return f"Plan {old}: the same plan twice."
        many = len(document["changes"])
        what = f"{many} change{'s' * (many != 1)}, causes first" if many else "only the wording of reasons differs"
        return f"Plan {old} to plan {new}: {what}."
    run, plan = document["run"], document["plan"][:12]
    if run is None:
        return f"Plan {plan}: not run yet. Run it with: torchrun -m executor PLAN"
    reason = f" ({clean(run['reason'])})" if run["reason"] else ""
    place = f"run {run['place']} of {document['runs']}, counted from 0"
    return f"Plan {plan}, {place}: {run['outcome']}{reason} after {run['steps']} steps."


def tables(document: Mapping[str, Json]) -> list[tuple[Sequence[str], list[Row]]]:
    """(column names, rows) of each table that has rows."""
    if document["mode"] == "changed":
        found: list[tuple[Sequence[str], list[Row]]] = [(_CHANGED, [_change(row) for row in document["changes"]])]
    else:
        found = [
            (_MEASURED, [_line(row) for row in document["rows"]]),
            (_ABSENT, [_plain(row, "reason", "yellow") for row in document["absent"]]),
            (_FAILED, [_plain(row, "why", "red") for row in document["failures"]]),
        ]
    return [(names, rows) for names, rows in found if rows]


def _line(row: Mapping[str, Json]) -> Row:
    error = "" if row["error"] is None else f"{row['error']:+.1f} %"
    cells = [row["pointer"], _rank(row), _value(row["predicted"], row["unit"]), span(row), row["verdict"]]
    cells += [_value(row["value"], row["unit"]), error, row["weakest"] or "decision", clean(row["instrument"])]
    return cells, _STYLES[row["verdict"]]


def _plain(row: Mapping[str, Json], said: str, style: str) -> Row:
    return [row["pointer"], _rank(row), clean(row[said])], style


def _change(row: Mapping[str, Json]) -> Row:
    sides = ["" if row["change"] == gone else _value(row[side], row["unit"]) for side, gone in _SIDES]
    return [row["pointer"], row["change"], *sides, ", ".join(row["causes"])], "" if row["causes"] else "bold"


_SIDES = (("old", "added"), ("new", "removed"))


def _rank(row: Mapping[str, Json]) -> str:
    return "" if row["rank"] is None else str(row["rank"])


def _value(value: Json, unit: str | None) -> str:
    return choice(value) if unit is None or isinstance(value, list) else amount(value, unit)
