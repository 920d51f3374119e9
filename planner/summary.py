"""What compiling says on stderr, in a few lines: the step, the seed's fit line, fallbacks, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.page import Page
from planner.show import ids
from planner.words import choice, clean, ranks, told
from schemas.document import is_decision, walk

Plan = Mapping[str, Any]
_OUTSIDE = ("backward_peak", "optimizer_peak", "peak", "limit", "host")  # not parts of the device's peak


def summarise(plan: Plan, page: Page) -> None:
    """The plan in a few lines on ``page``."""
    work, step = plan["workload"], plan["step"]
    page.line(
        f"plan {plan['seal']['digest'][:12]}: {clean(work['model'])}, {told(work['steps'])} steps of"
        f" {told(step['global_batch'])} ({told(step['global_tokens'])})",
        "bold",
    )
    for rank in plan["ranks"]:
        page.line(f"  rank {ranks(rank['members'])}: {_rank(plan, rank)}")
    page.line(f"  step: {told(step['seconds'])}, {told(step['tokens_per_second'])}; {told(step['regime'])}")
    page.line(f"  {told(step['verdict'])}")
    for line in fit_lines(plan):
        page.line(f"  {line}")
    for pointer, item in walk(plan):
        if is_decision(item) and item["outcome"] == "fallback":
            said = f"asked {choice(item['asked'])}, " if item["asked"] is not None else ""
            page.line(f"  fallback {pointer}: {said}chosen {choice(item['chosen'])}: {clean(item['why'])}", "yellow")
    counts = plan["counts"]["weakest"]
    page.line(
        f"  readings that rest on something assumed: {counts['assumed']}, on something unknown: {counts['unknown']}"
    )


def _rank(plan: Plan, rank: Mapping[str, Any]) -> str:
    count = rank["threads"]["chosen"] if "threads" in rank else 0
    threads = f", {count} thread{'s' * (count != 1)}" if count else ""
    devices = plan["fleet"]["devices"].values()
    name = next(item["name"] for item in devices if rank["devices"][0] in item["ids"])
    where = f"{told(name)} ({ids(rank['devices'])})"
    return f"{where}, {told(rank['dtype'])}, {told(rank['batch'])} x {told(rank['seq'])}{threads}"


def fit_lines(plan: Plan) -> list[str]:
    """``fit=16.0GB: est_peak=8.03GiB engaged=... (weights=...GiB ...)``, one for each group of alike ranks."""
    lines = []
    budgets = plan["request"].get("fit")
    for rank in plan["ranks"]:
        whose = f"rank {ranks(rank['members'])} " if len(plan["ranks"]) > 1 else ""
        engaged = [*(plan["fit"]["mechanisms"]["chosen"] or ()), *(rank["mechanisms"]["chosen"] or ())]
        memory = rank["memory"]
        parts = [f"{_name(key)}={_gib(item['value'])}" for key, item in memory.items() if key not in _OUTSIDE]
        lines.append(
            f"{whose}fit={_budget(budgets, rank['members'][0])}: est_peak={_gib(memory['peak']['value'])}"
            f" engaged={','.join(dict.fromkeys(engaged)) or 'none'} ({' '.join(parts)})"
        )
    return lines


def _name(component: str) -> str:
    return "weights" if component == "masters" else component


def _budget(budgets: Any, member: int) -> str:
    if not isinstance(budgets, list):
        return budgets or "off"
    return f"{budgets[member if len(budgets) > 1 else 0] / 1e9:.1f}GB"


def _gib(value: float | None) -> str:
    if value is None:
        return "unknown"
    scaled = value / 2**30
    return f"{scaled:.2f}GiB" if scaled >= 1 or scaled == 0 else f"{scaled:.2g}GiB"
