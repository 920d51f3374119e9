"""What compiling says on stderr, in a few lines: the step, the seed's fit line, fallbacks, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.views.next_step import next_step
from planner.views.page import Page
from planner.views.show import ids
from planner.views.words import choice, clean, gigabytes, plural, ranks, told
from schemas.document import is_decision, is_reading, resolve, walk

Plan = Mapping[str, Any]
_WAY_OUT = "to know it, plan with --benchmark where the devices are, or with --calibrate after a run"
# Not parts of the device's peak.
_OUTSIDE = (
    "alive",
    "recurrent_share",
    "backward_peak",
    "optimizer_peak",
    "peak",
    "reserved",
    "limit",
    "host",
    "hosted",
    "pinned",
)


def summarise(plan: Plan, page: Page) -> None:
    """The plan in a few lines on ``page``."""
    work, step = plan["workload"], plan["step"]
    page.line(
        f"plan {plan['seal']['digest'][:12]}: {clean(work['model'])}, {plural(work['steps']['chosen'], 'step')} of"
        f" {told(step['global_batch'])} ({told(step['global_tokens'])})",
        "bold",
    )
    for rank in plan["ranks"]:
        page.line(f"  rank {ranks(rank['members'])}: {_rank(plan, rank)}")
        for kernel, item in rank.get("tuned", {}).items():
            if item["value"] != "exact":
                page.line(f"  rank {ranks(rank['members'])}: kernel {kernel}: {clean(item['why'])}", "yellow")
    for line in _step(plan):
        page.line(f"  {line}")
    for line in fit_lines(plan):
        page.line(f"  {line}")
    for line in _beyond(plan):
        page.line(f"  {line}", "yellow")
    for pointer, item in walk(plan):
        if is_decision(item) and item["outcome"] == "fallback":
            said = f"asked {choice(item['asked'])}, " if item["asked"] is not None else ""
            page.line(f"  fallback {pointer}: {said}chosen {choice(item['chosen'])}: {clean(item['why'])}", "yellow")
    counts = plan["counts"]["weakest"]
    page.line(
        f"  readings that rest on something assumed: {counts['assumed']}, on something unknown: {counts['unknown']}"
    )
    page.line(f"  {next_step(plan, 'plan.json')}")


def _step(plan: Plan) -> list[str]:
    step = plan["step"]
    if step["seconds"]["value"] is None:
        unread = list(dict.fromkeys(_unread(plan, "/step/seconds")))
        why = clean(resolve(plan, unread[0])["why"])
        return [f"step: how long it takes is unknown, since {', '.join(unread)} could not be read ({why}); {_WAY_OUT}"]
    lines = [f"step: {told(step['seconds'])}, {told(step['tokens_per_second'])}; {told(step['regime'])}"]
    verdict = step["verdict"]
    return [*lines, told(verdict) if verdict["value"] is not None else f"gain not known: {clean(verdict['why'])}"]


_NEVER = {
    "warmup": "the learning rate never comes to its whole",
    "checkpoint_every": "no checkpoint is kept before the end",
    "eval_every": "nothing is evaluated before the end",
    "warmup_steps_unmeasured": "no step is measured",
}
"""By key, what follows where it is as long as the run or longer."""


def _beyond(plan: Plan) -> list[str]:
    """What was asked for after more steps than there are: it is honoured, and comes to nothing."""
    steps, config = plan["workload"]["steps"]["chosen"], plan["workload"]["config"]
    asked = {key: config[key]["chosen"] for key in _NEVER if key in config and config[key]["asked"] is not None}
    never = [key for key, value in asked.items() if value >= steps + (key == "warmup")]  # whose last step is whole
    return [f"{_NEVER[key]}: {key}={asked[key]} of {plural(steps, 'step')}" for key in never]


def _unread(plan: Plan, pointer: str) -> list[str]:
    """The unknown readings that the unknown reading at ``pointer`` rests on, and that rest on no other."""
    items = ((source, resolve(plan, source)) for source in resolve(plan, pointer).get("inputs", ()))
    below = [source for source, item in items if is_reading(item) and item["value"] is None]
    return [leaf for source in below for leaf in _unread(plan, source)] or [pointer]


def _rank(plan: Plan, rank: Mapping[str, Any]) -> str:
    count = rank["threads"]["chosen"] if "threads" in rank else 0
    threads = f", {plural(count, 'thread')}" if count else ""
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
    text = gigabytes(budgets[member if len(budgets) > 1 else 0])
    return f"{text}GB" if "." in text or "e" in text else f"{text}.0GB"


def _gib(value: float | None) -> str:
    if value is None:
        return "unknown"
    scaled = value / 2**30
    return f"{scaled:.2f}GiB" if scaled >= 1 or scaled == 0 else f"{scaled:.2g}GiB"
