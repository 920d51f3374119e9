"""A plan for a person: what runs where, what it will need and take, why, and how its runs went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.passes.cost import COMPONENTS
from planner.views.next_step import next_step
from planner.views.page import Page, Row
from planner.views.words import amount, choice, clean, gigabytes, named, plural, ranks, told
from schemas.document import is_decision, is_reading, walk
from schemas.form import Json

Plan = Mapping[str, Any]

_PARTS = ("compute", "exchange", "owners", "optimizer")
_STYLES = {"fallback": "yellow", "finished": "green", "stopped": "yellow", "failed": "red"}


def show(plan: Plan, page: Page) -> None:
    """The whole plan on ``page``. Judges nothing: a plan of another machine, or a stale one, is shown as it stands."""
    work = plan["workload"]
    world = sum(len(rank["members"]) for rank in plan["ranks"])
    page.line(
        f"Plan {plan['seal']['digest'][:12]}: {clean(work['model'])} on {plural(world, 'rank')},"
        f" {plural(work['steps']['chosen'], 'step')}, seed {told(work['seed'])}, {told(work['opt'])}",
        "bold",
    )
    page.line(f"Asked: {asked(plan['request'])}")
    page.line("Data: " + ", ".join(_source(source) for source in work["data"]["sources"]))
    _fleet(plan, page)
    _ranks(plan, page)
    _memory(plan, page)
    _worth(plan, page)
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
            parts.append(option if value is True else f"{option} {_option(_asked_for(name, value))}")
    return clean(" ".join(parts)) or "nothing (every default)"


def _asked_for(name: str, value: Json) -> Json:
    """A budget in GB, and measured plans by the beginnings of their seals; the rest as it is."""
    if name == "calibrate":
        return list(dict.fromkeys(row["seal"][:12] for row in value))
    if name == "fit" and isinstance(value, list):
        return [gigabytes(budget) for budget in value]
    return value


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
    single = ((key, item) for key, item in items.items() if is_reading(item) and not isinstance(item["value"], list))
    return ", ".join(" ".join(named(key, {**item, "low": None})) for key, item in single)


def _ranks(plan: Plan, page: Page) -> None:
    page.title("Ranks")
    rows: list[Row] = []
    for rank in plan["ranks"]:
        kernels = ", ".join(_kernel(rank, name) for name in rank["kernels"]) or "none"
        cells = [ranks(rank["members"]), ids(rank["devices"]), told(rank["dtype"])]
        cells += [f"{told(rank['batch'])} x {told(rank['seq'])}", told(rank["threads"]) if "threads" in rank else ""]
        rows.append(([*cells, kernels, told(rank["mechanisms"]), told(rank["token_weight"])], ""))
    page.table(("rank", "device", "dtype", "batch x seq", "threads", "kernels", "mechanisms", "token weight"), rows)


def _kernel(rank: Mapping[str, Any], name: str) -> str:
    tuned = f" (tuned: {told(rank['tuned'][name])})" if name in rank.get("tuned", {}) else ""
    return f"{name} {told(rank['kernels'][name])}{tuned}"


def _memory(plan: Plan, page: Page) -> None:
    page.title("Memory of a rank")
    known = [rank["memory"] for rank in plan["ranks"]]
    last = ("backward_peak", "optimizer_peak", "peak", "reserved", "limit")
    others = [key for key in known[0] if key not in (*COMPONENTS, *last, "alive")]
    rows: list[Row] = []
    for name in (*COMPONENTS, *others, *last):
        if any(name in memory for memory in known):
            cells = [told(memory[name]) if name in memory else "" for memory in known]
            rows.append(([name.replace("_", " "), *cells], "bold" if name in ("peak", "limit") else ""))
        rows += _alive([memory.get("alive", {}) for memory in known]) if name == "activations" else []
    page.table(("component", *_headings(plan)), rows)


def _alive(known: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each part of the activations, the largest first."""
    largest: dict[str, float] = {}
    for alive in known:
        for name, item in alive.items():
            largest[name] = max(largest.get(name, 0), item["value"] or 0)
    for name in sorted(largest, key=lambda name: -largest[name]):
        cells = [told(alive[name]) if name in alive else "" for alive in known]
        yield [f"  {name.replace('_', ' ')}", *cells], ""


def _worth(plan: Plan, page: Page) -> None:
    """What each mechanism engaged saves and costs, beside the others."""
    known = [rank.get("worth", {}) for rank in plan["ranks"]]
    names = dict.fromkeys(name for worth in known for name in worth)
    if not names:
        return
    page.title("Mechanisms engaged")
    rows: list[Row] = []
    for name in names:
        cells = [
            f"saves {told(worth[name]['saves'])}, costs {told(worth[name]['costs'])}" if name in worth else ""
            for worth in known
        ]
        rows.append(([name, *cells], ""))
    page.table(("mechanism", *_headings(plan)), rows)


def _step(plan: Plan, page: Page) -> None:
    page.title("Step")
    steps = [rank["step"] for rank in plan["ranks"]]
    binding = [binds(rank) for rank in plan["ranks"]]
    rows: list[Row] = []
    for part in (*_PARTS, "total", "tokens_per_second"):
        cells = [_marked(step, part, bound) for step, bound in zip(steps, binding, strict=True)]
        label = named(part, next((step[part] for step in steps if part in step), {"chosen": None}))[0]
        rows.append(([label, *cells], "bold" if part == "total" else ""))
    page.table(("part", *_headings(plan)), rows)
    page.line("(* the part that binds)")
    page.line()
    for name, item in plan["step"].items():
        page.line(": ".join(named(name, item)))


def _marked(step: Mapping[str, Any], part: str, bound: str | None) -> str:
    if part not in step:
        return ""
    return named(part, step[part])[1] + (" *" if part == bound else "")


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
            page.line(f"owners: {_owners(item['chosen'])}")
        elif name == "calibration":
            for part, curve in item.items():
                page.line(f"calibration of {part.replace('_', ' ')}: {clean(curve['why'])}: {amount(curve['value'])}")
        else:
            page.line(": ".join(named(name, item)))


def _owners(chosen: Sequence[int]) -> str:
    counts = ((owner, chosen.count(owner)) for owner in sorted(set(chosen)))
    return ", ".join(f"rank {owner} owns {plural(many, 'matrix', 'matrices')}" for owner, many in counts) or "none"


def _choices(plan: Plan, page: Page) -> None:
    page.title("Decisions")
    rows: list[Row] = []
    for pointer, item in _decisions(plan):
        wanted = "" if item["asked"] is None else choice(item["asked"])
        chosen = choice(item["chosen"])
        shown = chosen if len(chosen) <= 40 else f"{chosen[:37].rstrip(', ')} ..."
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
    readings = plural(counts["readings"], "reading")
    page.line(f"{readings} by weakest basis: {weak}; {counts['measurable']} can be measured")
    made = ", ".join(f"{many} {outcome}" for outcome, many in counts["decisions"].items() if many)
    page.line(f"decisions: {made}", "yellow" if counts["fallbacks"] else "")


def _runs(plan: Plan, page: Page) -> None:
    page.title("Runs")
    if not plan["runs"]:
        page.line(f"none yet. {next_step(plan, 'PLAN')}")
        return
    rows: list[Row] = []
    for place, run in enumerate(plan["runs"], 1):
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
