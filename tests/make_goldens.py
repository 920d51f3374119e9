"""The golden plans under tests/cases/plans, made anew by hand when the planner is meant to plan otherwise:
``python tests/make_goldens.py``. With ``accounts`` the accounts of the presets under tests/cases/accounts first, when
the model or its counting is meant to be otherwise. And docs/fits.md, which rests on both. The difference is then read
in review."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import make_fits  # noqa: E402
from planner.machine import catalogue  # noqa: E402
from planner.passes.compile import compile_plan  # noqa: E402
from schemas.form import render  # noqa: E402
from schemas.seal import seal  # noqa: E402
from worlds import CASES, account, cases, record, request  # noqa: E402


def golden(row: dict[str, Any]) -> bytes:
    """The plan of one row of tests/cases/goldens.json."""
    found = record(row["record"]) if "record" in row else seal(catalogue.record_body(row["cards"]))
    return render(compile_plan(request(**row["request"]), found, account()))


def path(row: dict[str, Any]) -> Path:
    return CASES / "plans" / f"{row['name']}.json"


def recount() -> None:
    """Make the recorded accounts anew, as the command would on a machine where nothing was tuned."""
    from executor.account import account as counted

    for name in ("tiny", "small", "medium", "b1"):
        (CASES / "accounts" / f"{name}.json").write_bytes(render(seal(counted({"model": name}))))


if __name__ == "__main__":
    if sys.argv[1:] == ["accounts"]:
        recount()
    for row in cases("goldens.json"):
        path(row).parent.mkdir(exist_ok=True)
        path(row).write_bytes(golden(row))
        print(path(row))
    make_fits.PAGE.write_text(make_fits.page(), encoding="utf-8")
    print(make_fits.PAGE)
