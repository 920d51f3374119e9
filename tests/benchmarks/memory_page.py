"""What ``tests/benchmarks/memory.py`` tells: the page of a record, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

PEAK, STEP = "/ranks/0/memory/peak @0", "/ranks/0/step/total @0"
MARKS = ("backward_peak", "optimizer_peak", "peak")
ESTIMATORS = ("MemTracker", "accelerate", "DeepSpeed")
WORTH_TELLING = 0.001  # of a component, the least error that the page tells


def off(row: Mapping[str, Any], place: str) -> float | None:
    """Predicted over measured, less one; None where either is not there."""
    line = row.get("measured", {}).get(f"/ranks/0/{place} @0")
    if line is None or not line["value"] or line["predicted"] is None:
        return None
    return float(line["predicted"] / line["value"] - 1)


def errors(rows: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any] | None:
    """Of all rows that have both: the median and the worst by size, and the worst of those promised too little."""
    found = [(error, row["name"]) for row in rows if (error := off(row, place)) is not None]
    if not found:
        return None
    lines = (row["measured"][f"/ranks/0/{place} @0"] for row in rows if off(row, place) is not None)
    inside = sum(line.get("low", line["predicted"]) <= line["value"] <= line.get("high", line["predicted"])
                 for line in lines)  # fmt: skip
    return {"cases": len(found), "median": median(abs(error) for error, _ in found), "inside": inside,
            "worst": max(found, key=lambda pair: abs(pair[0])), "under": min(found)}  # fmt: skip


def render(record: Mapping[str, Any], about: str) -> str:
    """The page of a record. ``about``: what was done, of which the second to fourth paragraph open the page."""
    _, *reading = about.split("\n\n")
    rows, budgets = list(record["cases"].values()), list(record["budgets"].values())
    done = [row for row in rows if row.get("measured") and row["ended"] == 0]
    lines = ["# Memory, predicted and measured", "", *"\n\n".join(reading[:3]).splitlines(), "", record["machine"], ""]
    lines += [f"{len(done)} of {len(rows)} cases ran.", "", *_summary(done), "", *_grid(rows)]
    lines += ["", "## What mechanisms save", "", *_savings(done)]
    if budgets:
        lines += ["", "## Budgets", "", *_of_budgets(budgets)]
    refused = [row for row in (*rows, *budgets) if "refused" in row or row.get("ended")]
    if refused:
        lines += ["", "## Not run, or not to the end", ""]
        lines += [f"- {row['name']}: {_last(row.get('refused') or row.get('said', ''))}" for row in refused]
    return "\n".join(lines) + "\n"


def told(row: Mapping[str, Any]) -> str:
    """How the case of a row went, in a line."""
    if "refused" in row:
        return f"refused: {_last(row['refused'])}"
    if "held" in row:
        return f"held {row['held']}, a notch above failed {row['notch'].get('failed')}"
    return f"ended {row['ended']}, peak off {_percent(off(row, 'memory/peak'))}, {row['seconds']:.0f} s"


def _last(text: str) -> str:
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "no word")


def _summary(done: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| | cases | median | worst | lowest | within the plan's range |", "|---|--:|--:|---|---|--:|"]
    for place in (
        *(f"memory/{mark}" for mark in MARKS),
        "memory/reserved",
        "memory/hosted",
        "memory/pinned",
        "memory/host",
    ):
        found = errors(done, place)
        if found is not None:
            worst, under = (f"{error:+.2%} {name}" for error, name in (found["worst"], found["under"]))
            lines.append(
                f"| {place} | {found['cases']} | {found['median']:.2%} | {worst} | {under} | {found['inside']} |"
            )
    for name in ESTIMATORS:
        found_by = [(row["estimates"][name] / _peak(row) - 1, row["name"]) for row in done
                    if isinstance(row["estimates"].get(name), int) and _peak(row)]  # fmt: skip
        if found_by:
            worst, under = (f"{error:+.2%} {case}" for error, case in
                            (max(found_by, key=lambda pair: abs(pair[0])), min(found_by)))  # fmt: skip
            middle = median(abs(error) for error, _ in found_by)
            lines.append(f"| {name}: peak | {len(found_by)} | {middle:.2%} | {worst} | {under} | |")
        else:
            words = {str(row["estimates"][name]) for row in done if name in row["estimates"]}
            lines.append(f"| {name}: peak | 0 | | {'; '.join(sorted(words))} | | |")
    return lines


def _peak(row: Mapping[str, Any]) -> float:
    line = row["measured"].get(PEAK)
    return float(line["value"]) if line else 0.0


def _grid(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "MiB, as predicted / measured. Reserved is the allocator's highest in backward or the optimizer; what is "
        "beside it (CUDA's context) is no part of it.", "",
        "| case | backward peak | off | optimizer peak | off | other components off | reserved | off | retries "
        "| MemTracker |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    return [*lines, *(_row(row) for row in rows if row.get("measured"))]


def _row(row: Mapping[str, Any]) -> str:
    cells = [row["name"]]
    for mark in MARKS[:2]:
        cells += [_pair(row, f"memory/{mark}"), _percent(off(row, f"memory/{mark}"))]
    others = [label.split(" @")[0].removeprefix("/ranks/0/memory/") for label in row["measured"] if "/memory/" in label]
    wrong = {name: off(row, f"memory/{name}") for name in others if name not in (*MARKS, "reserved")}
    cells.append(", ".join(f"{name} {_percent(error)}" for name, error in wrong.items()
                           if error and abs(error) >= WORTH_TELLING))  # fmt: skip
    cells += [_pair(row, "memory/reserved"), _percent(off(row, "memory/reserved"))]
    cells.append(str(row["seen"].get("retries", "")))
    told = row["estimates"].get("MemTracker")
    cells.append(_percent(told / _peak(row) - 1) if isinstance(told, int) and _peak(row) else "")
    return f"| {' | '.join(cells)} |"


def _savings(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each case with mechanisms that has its like without: the peak without less the peak with, and where both ran
    alone how much longer a step is."""
    alone = {row["name"]: row for row in done if not row["predicted"]["mechanisms"]}
    lines = ["The peak without less the peak with them, of the same work; and what they add to a step, of those that "
             "ran alone.", "", "| case | MiB, predicted | measured | off | ms a step, predicted | measured | of |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for row in done:
        base = alone.get(row["name"].partition(" mechanisms ")[0])
        if base is None or not row["predicted"]["mechanisms"]:
            continue
        told, seen = (base["measured"][PEAK][key] - row["measured"][PEAK][key] for key in ("predicted", "value"))
        error = f"{told / seen - 1:+.2%}" if seen else ""
        saves = f"{told / 2**20:,.1f} | {seen / 2**20:,.1f} | {error}"
        lines.append(f"| {row['name']} | {saves} | {' | '.join(_added(base, row))} |")
    return lines


def _added(base: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Milliseconds that ``row``'s step has beyond ``base``'s, predicted and measured, and ``base``'s."""
    if not (base.get("alone") and row.get("alone")):
        return "", "", ""
    told, seen = (row["measured"][STEP][key] - base["measured"][STEP][key] for key in ("predicted", "value"))
    return f"{1e3 * told:+.1f}", f"{1e3 * seen:+.1f}", f"{1e3 * base['measured'][STEP]['value']:.1f}"


def _pair(row: Mapping[str, Any], place: str) -> str:
    line = row["measured"].get(f"/ranks/0/{place} @0")
    return "" if line is None else f"{line['predicted'] / 2**20:,.1f} / {line['value'] / 2**20:,.1f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _of_budgets(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    run = [row for row in rows if "held" in row]
    tried = [row["notch"] for row in run if "failed" in row["notch"]]
    lines = [
        f"{sum(row['held'] for row in run)} of {len(run)} plans held in their budget, of {len(rows)} drawn; "
        f"{sum(notch['failed'] for notch in tried)} of {len(tried)} ran out of memory a notch above it.", "",
        "| case | budget MiB | mechanisms | peak predicted / measured | reserved of the budget | retries | held "
        "| notch: batch, peak of the budget | failed |",
        "|---|--:|---|--:|--:|--:|---|--:|---|",
    ]  # fmt: skip
    for row in run:
        marks = [sizes["reserved_bytes"] for sizes in row["seen"].get("marks", {}).values()]
        notch, budget = row["notch"], row["budget"]
        above = f"{notch['batch']}, {notch['peak'] / budget:.2f}" if "peak" in notch else notch["refused"][-80:]
        cells = (
            row["name"], f"{budget / 2**20:,.1f}", ", ".join(row["predicted"]["mechanisms"]),
            _pair(row, "memory/peak"), f"{max(marks) / budget:.2f}" if marks else "",
            str(row["seen"].get("retries", "")), "yes" if row["held"] else "NO", above,
            {True: "yes", False: "NO"}.get(notch.get("failed"), ""),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines
