"""A plan for a person: what runs where, what it will need and take, why, and how its runs went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.page import Page, Row
from planner.words import amount, choice, clean, ranks, told
from schemas.document import is_decision, walk
from schemas.form import Json

Plan = Mapping[str, Any]

_COMPONENTS = ("masters", "gradients", "muon_momentum", "adamw_state", "activations", "buckets", "update", "workspace")
_PARTS = ("compute", "exchange", "owners", "optimizer")
_STYLES = {"fallback": "yellow", "finished": "green", "stopped": "yellow", "failed": "red"}


def show(plan: Plan, page: Page) -> None:
    """The whole plan on ``page``. Judges nothing: a plan of another machine, or a stale one, is shown as it stands."""
    work = plan["workload"]
    world = sum(len(rank["members"]) for rank in plan["ranks"])
    page.line(
        f"Plan {plan['seal']['digest'][:12]}: {clean(work['model'])} on {world} rank{'s' * (world != 1)},"
        f" {told(work['steps'])} steps, seed {told(work['seed'])}, {told(work['opt'])}",
        "bold",
    )
    page.line(f"Asked: {asked(plan['request'])}")
    page.line("Data: " + ", ".join(_source(source) for source in work["data"]["sources"]))
    _fleet(plan, page)
    _ranks(plan, page)
    _memory(plan, page)
    _step(plan, page)
    _exchange(plan, page)
    _choices(plan, page)
    _rejected(plan, page)
    _rests(plan, page)
    _runs(plan, page)


def asked(request: Mapping[str, Json]) -> str:
    """The request's values that were asked for, as options."""
    parts = [f"--set {key}={value}" for key, value in request.get("set", {}).items()]
    for name, value in request.items():
        if name not in ("set", "data") and value not in (None, False, [], {}):
            option = "--" + name.replace("_", "-")
            shown = [f"{budget / 1e9:.6g}" for budget in value] if name == "fit" and isinstance(value, list) else value
            parts.append(option if value is True else f"{option} {_option(shown)}")
    return clean(" ".join(parts)) or "nothing (every default)"


def _option(value: Json) -> str:
    if isinstance(value, list):
        return ",".join("x".join(str(x) for x in v if x is not None) if isinstance(v, list) else str(v) for v in value)
    return str(value)


def _source(source: Mapping[str, Any]) -> str:
    length, digest = source["length"], source["sha256"]
    weight = "" if source["weight"] == 1 else f" x {source['weight']}"
    known = "bound at the run" if digest["value"] is None else f"{told(length)}, sha256 {digest['value'][:12]}"
    return f"{clean(source['name'])}{weight} ({known})"


def _fleet(plan: Plan, page: Page) -> None:
    page.title("Fleet")
    rows: list[Row] = []
    for name, node in plan["fleet"]["nodes"].items():
        rows.append(([name, "node", _readings(node)], ""))
    for device in plan["fleet"]["devices"].values():
        facts = {key: item for key, item in device.items() if isinstance(item, dict) and key != "name"}
        many = f"{len(device['ids'])} x " if len(device["ids"]) > 1 else ""
        rows.append(([ids(device["ids"]), f"{many}{told(device['name'])}", _readings(facts)], ""))
    page.table(("device", "what", "readings"), rows)


def ids(names: Sequence[str]) -> str:
    """Ids of alike devices, the first and the last where there are many."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]}"


def _readings(items: Mapping[str, Json]) -> str:
    short = (
        f"{key.replace('_', ' ')} {amount(item['value'], item['unit'])}"
        for key, item in items.items()
        if not isinstance(item["value"], list)
    )
    return ", ".join(short)


def _ranks(plan: Plan, page: Page) -> None:
    page.title("Ranks")
    rows: list[Row] = []
    for rank in plan["ranks"]:
        kernels = ", ".join(f"{name} {told(item)}" for name, item in rank["kernels"].items()) or "none"
        cells = [ranks(rank["members"]), ids(rank["devices"]), told(rank["dtype"])]
        cells += [f"{told(rank['batch'])} x {told(rank['seq'])}", told(rank["threads"]) if "threads" in rank else ""]
        rows.append(([*cells, kernels, told(rank["mechanisms"]), told(rank["token_weight"])], ""))
    page.table(("rank", "device", "dtype", "batch x seq", "threads", "kernels", "mechanisms", "token weight"), rows)


def _memory(plan: Plan, page: Page) -> None:
    page.title("Memory of a rank")
    known = [rank["memory"] for rank in plan["ranks"]]
    others = [key for key in known[0] if key not in (*_COMPONENTS, "backward_peak", "optimizer_peak", "peak", "limit")]
    names = (*_COMPONENTS, *others, "backward_peak", "optimizer_peak", "peak", "limit")
    rows = []
    for name in names:
        cells = [told(memory[name]) if name in memory else "" for memory in known]
        rows.append(([name.replace("_", " "), *cells], "bold" if name in ("peak", "limit") else ""))
    page.table(("component", *_headings(plan)), rows)


def _step(plan: Plan, page: Page) -> None:
    page.title("Step")
    steps = [rank["step"] for rank in plan["ranks"]]
    binding = [binds(rank) for rank in plan["ranks"]]
    rows: list[Row] = []
    for part in (*_PARTS, "total", "tokens_per_second"):
        cells = [_marked(step, part, bound) for step, bound in zip(steps, binding, strict=True)]
        rows.append(([part.replace("_", " "), *cells], "bold" if part == "total" else ""))
    page.table(("part", *_headings(plan)), rows)
    page.line("(* the part that binds)")
    page.line()
    for name, item in plan["step"].items():
        page.line(f"{name.replace('_', ' ')}: {told(item)}")


def _marked(step: Mapping[str, Any], part: str, bound: str | None) -> str:
    if part not in step:
        return ""
    return told(step[part]) + (" *" if part == bound else "")


def binds(rank: Mapping[str, Any]) -> str | None:
    """The part that takes most of the rank's step; None when no part is known."""
    known = {part: rank["step"][part]["value"] for part in _PARTS if part in rank["step"]}
    return max((part for part in known if known[part]), key=lambda part: known[part], default=None)


def _headings(plan: Plan) -> list[str]:
    return [f"rank {ranks(rank['members'])}" for rank in plan["ranks"]]


def _exchange(plan: Plan, page: Page) -> None:
    page.title("Exchange")
    for name, item in plan["exchange"].items():
        if name == "owners" and isinstance(item.get("chosen"), list):
            counts = {owner: item["chosen"].count(owner) for owner in sorted(set(item["chosen"]))}
            said = (
                ", ".join(
                    f"rank {owner} owns {many} matri{'x' if many == 1 else 'ces'}" for owner, many in counts.items()
                )
                or "none"
            )
        else:
            said = told(item)
        page.line(f"{name.replace('_', ' ')}: {said}")


def _choices(plan: Plan, page: Page) -> None:
    page.title("Decisions")
    rows: list[Row] = []
    for pointer, item in _decisions(plan):
        wanted = "" if item["asked"] is None else choice(item["asked"])
        chosen = choice(item["chosen"])
        shown = chosen if len(chosen) <= 40 else f"{chosen[:37]}..."
        rows.append(([pointer, wanted, shown, item["outcome"], clean(item["why"])], _STYLES.get(item["outcome"], "")))
    page.table(("decision", "asked", "chosen", "outcome", "why"), rows)


def _decisions(plan: Plan) -> Iterator[tuple[str, Any]]:
    return ((pointer, item) for pointer, item in walk(plan) if is_decision(item))


def _rejected(plan: Plan, page: Page) -> None:
    rows: list[Row] = []
    for pointer, item in _decisions(plan):
        for row in item.get("rejected", ()):
            saves = amount(row["saves_bytes"], "B") if "saves_bytes" in row else ""
            costs = amount(row["costs_seconds"], "s") if "costs_seconds" in row else ""
            rows.append(([pointer, choice(row["option"]), saves, costs, clean(row["why"])], ""))
    if rows:
        page.title("Rejected")
        page.table(("decision", "option", "would save", "would cost", "why"), rows)


def _rests(plan: Plan, page: Page) -> None:
    page.title("What the numbers rest on")
    counts = plan["counts"]
    weak = ", ".join(f"{many} {basis}" for basis, many in counts["weakest"].items() if many)
    page.line(f"{counts['readings']} readings by weakest basis: {weak}; {counts['measurable']} can be measured")
    made = ", ".join(f"{many} {outcome}" for outcome, many in counts["decisions"].items() if many)
    page.line(f"decisions: {made}", "yellow" if counts["fallbacks"] else "")


def _runs(plan: Plan, page: Page) -> None:
    page.title("Runs")
    if not plan["runs"]:
        page.line("none yet. Run it with: torchrun -m executor PLAN")
        return
    rows: list[Row] = []
    for place, run in enumerate(plan["runs"]):
        bits = run.get("bits_per_byte")
        cells = [
            str(place),
            clean(run["id"]),
            run["start"],
            run["outcome"],
            str(run["steps"]),
            amount(run["final_loss"]),
        ]
        rows.append(([*cells, amount(bits), clean(run["reason"] or "")], _STYLES[run["outcome"]]))
    page.table(("run", "id", "start", "outcome", "steps", "final loss", "bits per byte", "reason"), rows)
    page.line("Predicted against measured: dormouse-plan diff PLAN")
