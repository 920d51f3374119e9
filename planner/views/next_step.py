"""The command that a person types next with a plan that has not been run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from planner.passes.likeness import node_count
from planner.views.words import clean


def next_step(plan: Mapping[str, Any], file: str) -> str:
    """One sentence with the command for the plan in ``file``. Data is called by its name: a plan holds no paths."""
    shown = f"Show it with: dormouse-plan show {file}"
    if node_count(plan) > 1:
        return f"{shown} (a plan of several nodes is for comparing: it cannot run yet)"
    if any(rank["devices"][0].startswith("card-") for rank in plan["ranks"]):
        return f"{shown} (its cards are known by data sheet: it runs where such cards are, or better ones)"
    names = [source["name"] for source in plan["workload"]["data"]["sources"] if source["name"] != "stdlib"]
    data = f" --data {shlex.quote(clean(','.join(names)))}" if names else ""
    name = clean(plan["workload"]["model"])
    model = f" --model {shlex.quote(name)}" if ":" in name else ""
    return f"Run it with: torchrun -m executor {file}{model}{data}"
