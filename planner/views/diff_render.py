"""A diff document as text for a terminal, as markdown for a review, or as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from planner.views.page import Page, Row
from planner.views.words import DIGITS, MOST_DIGITS, amount, choice, clean, ends, exactly, gigabytes, plural, span
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
    "10 .. 90 %",
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
    return "| " + " | ".join(clean(cell).replace("|", "\\|") for cell in cells) + " |"


def heading(document: Mapping[str, Json]) -> str:
    """One sentence on what is compared."""
    if document["mode"] == "changed":
        old, new = document["old"][:12], document["new"][:12]
        if document["old"] == document["new"]:
            return f"Plan {old}: the same plan twice."
        many = len(document["changes"])
        what = f"{plural(many, 'change')}, causes first" if many else "only the wording of reasons differs"
        return f"Plan {old} to plan {new}: {what}."
    run, plan = document["run"], document["plan"][:12]
    if run is None:
        return f"Plan {plan}: not run yet. How to run it: dormouse-plan show PLAN"
    reason = f" ({clean(run['reason'])})" if run["reason"] else ""
    steps = f"after {plural(run['steps'], 'step')}"
    steps = "" if steps in reason else f" {steps}"
    return f"Plan {plan}, run {run['place']} of {document['runs']}: {run['outcome']}{reason}{steps}."


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
    unit = row["unit"]
    alike = row["predicted"] == row["value"]
    predicted, value = [_text(row["predicted"], unit)] * 2 if alike else apart(row["predicted"], row["value"], unit)
    spread = _spread(row["spread"], unit)
    cells = [row["pointer"], _rank(row), predicted, span(row), row["verdict"], value, spread, error]
    return [*cells, row["weakest"] or "decision", clean(row["instrument"])], _STYLES[row["verdict"]]


def _spread(quantiles: Sequence[float] | None, unit: str) -> str:
    if quantiles is None:
        return ""
    low, high = quantiles
    return ends(low, high, unit) or amount(low, unit)


def _plain(row: Mapping[str, Json], said: str, style: str) -> Row:
    return [row["pointer"], _rank(row), clean(row[said])], style


def _rank(row: Mapping[str, Json]) -> str:
    return "" if row["rank"] is None else str(row["rank"])


def _change(row: Mapping[str, Json]) -> Row:
    caused = ", ".join(row["causes"]) or _root(row)
    return [row["pointer"], row["change"], *_sides(row), caused], "" if row["causes"] else "bold"


def _root(row: Mapping[str, Json]) -> str:
    """What a change comes from that rests on no other change."""
    pointer = row["pointer"]
    if pointer.startswith("/request/"):
        return "(asked)"
    if pointer.startswith(("/fleet/", "/toolchain/")):
        return "(the record)"
    if pointer == "/workload/digest":
        return "(another source of the model)"
    return "(no input in the plan changed)"


def _sides(row: Mapping[str, Json]) -> tuple[str, str]:
    """The older and the newer side; never two texts alike."""
    old, new, part, unit = row["old"], row["new"], row["part"], row["unit"]
    if row["pointer"].startswith("/request/fit"):
        return _budget(old), _budget(new)
    if row["change"] != "changed":
        text = _shortened(new if row["change"] == "added" else old, unit)
        return ("", text) if row["change"] == "added" else (text, "")
    if part == "range":
        return _apart(lambda ends_, digits: _range(ends_, unit or "", digits), old, new)
    if part in ("asked", "basis", "outcome"):
        return _said(part, old), _said(part, new)
    asked = [_NOT_ASKED if value is None and row["pointer"].startswith("/request/") else None for value in (old, new)]
    before, after = apart(old, new, unit)
    return asked[0] or before, asked[1] or after


def _budget(asked: Json) -> str:
    """A value of --fit as that option takes it."""
    if isinstance(asked, list):
        return ", ".join(f"{gigabytes(size)} GB" for size in asked)
    return _NOT_ASKED if asked is None else str(asked)


_NOT_ASKED = "not asked"
_LONGEST_LIST, _SHOWN_PLACES = 6, 4
_DIGEST = re.compile("[0-9a-f]{64}")


def _said(part: str, value: Json) -> str:
    return _NOT_ASKED if part == "asked" and value is None else f"{part}: {choice(value)}"


def _range(range_: Json, unit: str, digits: int) -> str:
    return "no range" if range_ is None else "range " + " .. ".join(amount(end, unit, digits) for end in range_)


def apart(old: Json, new: Json, unit: str | None) -> tuple[str, str]:
    """Two values that differ as texts that differ, with more digits where few do not tell; of a list or a digest only
    what tells."""
    if _is_digest(old) and _is_digest(new):
        first = next((place for place in range(len(old)) if old[place] != new[place]), 0)
        return old[: max(12, first + 1)], new[: max(12, first + 1)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) > _LONGEST_LIST:
        places = [place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
        more = f", ... ({len(places)} of {len(old)} differ)" if len(places) > _SHOWN_PLACES else ""
        pairs = [(place, apart(old[place], new[place], unit)) for place in places[:_SHOWN_PLACES]]
        before, after = (", ".join(f"[{place}] {pair[side]}" for place, pair in pairs) + more for side in (0, 1))
        return before, after
    return _apart(lambda value, digits: _shortened(value, unit, digits), old, new, unit or "")


def _apart(shown: Callable[[Json, int], str], old: Json, new: Json, unit: str = "") -> tuple[str, str]:
    for digits in range(DIGITS, MOST_DIGITS + 1):
        texts = shown(old, digits), shown(new, digits)
        if texts[0] != texts[1]:
            return texts
    return exactly(old, unit), exactly(new, unit)


def _is_digest(value: Json) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _shortened(value: Json, unit: str | None, digits: int = DIGITS) -> str:
    """A value by itself: a digest by its beginning, a long list by its first entries and their number."""
    if _is_digest(value):
        return str(value[:12])
    if isinstance(value, list) and len(value) > _LONGEST_LIST:
        return f"{_text(value[:_SHOWN_PLACES], unit, digits)}, ... ({len(value)} entries)"
    return _text(value, unit, digits)


def _text(value: Json, unit: str | None, digits: int = DIGITS) -> str:
    if isinstance(value, list):
        return ", ".join(_text(part, unit, digits) for part in value) or "none"
    return choice(value) if unit is None else amount(value, unit, digits)
