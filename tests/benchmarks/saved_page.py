"""What ``tests/benchmarks/saved_bytes.py`` tells: the page of a record, a line a piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 6  # sizes that are told of a difference


def off(row: Mapping[str, Any], mark: str, side: str = "requested") -> float:
    """The relative error of the count."""
    wanted = row[side][mark]
    return (row["counted"][mark] - wanted) / wanted if wanted else float(row["counted"][mark] != 0)


def render(record: Mapping[str, Any], about: str) -> str:
    """The page of a record. ``about``: what was done, in paragraphs, of which the first and the last are of the
    command."""
    _, *reading = about.split("\n\n")
    done = [row for row in record["rows"] if "error" not in row]
    lines = ["# What a module keeps for backward, counted and real", "", *"\n\n".join(reading[:-1]).splitlines(), ""]
    lines += [f"{record['device']}; torch {record['torch']}; preset {record['options']['preset']}, "
              f"length {record['options']['seq']}.", ""]  # fmt: skip
    lines += [f"- {name}: {size / 2**20:.2f} MiB kept" for name, size in record["workspaces"].items()]
    for mark in ("saved", "backward"):
        wrong = [row for row in done if abs(off(row, mark)) > 0.001]
        lines += ["", f"{len(wrong)} of {len(done)} counts of {mark} are off by more than 0.1 %."]
    lines += [
        "", "MiB; each as counted / requested / allocated.", "",
        "| piece | under | dtype | batch | forward peak | saved | off | backward peak | off | only counted "
        "| only real |",
        "|---|---|---|--:|---|---|--:|---|--:|---|---|",
    ]  # fmt: skip
    return "\n".join([*lines, *map(_line, record["rows"])]) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    first = (row["title"], "+".join(row["engaged"]) or "nothing", row["dtype"], str(row["batch"]))
    if "error" in row:
        return f"| {' | '.join(first)} | {row['error']} |  |  |  |  |  |  |"
    cells = []
    for mark in ("forward", "saved", "backward"):
        cells.append(" / ".join(f"{row[side][mark] / 2**20:.2f}" for side in ("counted", "requested", "allocated")))
        if mark != "forward":
            cells.append(f"{off(row, mark):+.2%}")
    return f"| {' | '.join((*first, *cells, _sizes(row['only_counted']), _sizes(row['only_real'])))} |"


def _sizes(lies: Sequence[Sequence[Any]]) -> str:
    shown = [f"{size / 2**20:.3f} {text}".strip() for size, text in lies[:SHOWN]]
    return "; ".join(shown) + (f"; {len(lies) - SHOWN} more" if len(lies) > SHOWN else "")
