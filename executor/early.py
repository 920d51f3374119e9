"""What a plan can be refused for before torch is imported and any rank is started: by the plan alone, the number of
processes, and the place it is to be recorded in."""

from __future__ import annotations

import os
from collections.abc import Mapping

from executor.guest import file_of
from executor.launch import ALLOCATOR_VARIABLE
from planner.refusals.refusal import Refusal
from planner.refusals.rules import judge
from schemas.form import Json

# The variables that torch reads how a card's memory grows from.
_ALLOCATOR = (ALLOCATOR_VARIABLE, "PYTORCH_ALLOC_CONF")


def strange_code(plan: Mapping[str, Json], named: str | None) -> str | None:
    """What code the model of ``plan`` is, where that is not ``named`` by the command; None where it is, or is ours.
    Nothing of it is run."""
    name = plan["workload"]["model"]
    if ":" not in name or name == named:
        return None
    file = file_of(name.partition(":")[0])
    return "a module that is not found from here" if file is None else f"the code of {file}"


def refusals(
    plan: Mapping[str, Json],
    processes: int,
    path: str = "PLAN",
    unrecordable: str | None = None,
    strange: str | None = None,
) -> list[Refusal]:
    """Every refusal so far of running ``plan``, which lies at ``path``, in so many ``processes``.

    What planning would refuse is judged too: a plan may have been sealed anew by other hands. ``unrecordable`` is why
    the run could not be recorded, ``strange`` what code it would import that nobody here asked for.
    """
    facts = {"world_size": processes, "rank": 0, "ranks": [], "record_unwritable": unrecordable, "plan_path": path}
    facts |= {"strange": strange}
    facts["allocator"] = {name: os.environ[name] for name in _ALLOCATOR if name in os.environ}
    return [*judge("plan", plan, {}), *judge("start", plan, facts)]
