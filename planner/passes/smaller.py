"""What would fit where a plan does not: the largest batch and length, the budget, or the word that nothing does."""

from __future__ import annotations

from collections.abc import Mapping

from planner.passes.cost import Rank
from planner.passes.layout import device_pointer
from planner.passes.mechanisms import Mechanisms, names_of, open_sets
from planner.passes.ranks import rank_facts
from planner.passes.split import largest_within
from planner.views.words import size
from schemas.document import resolve
from schemas.form import Json


def ways_to_fit(plan: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json], place: int) -> str:
    """The nearest changes under which entry ``place`` of a draft fits its limit, each tried before it is said."""
    entry, rank = plan["ranks"][place], rank_facts(plan, account, place)
    b, t, limit = entry["batch"]["chosen"], entry["seq"]["chosen"], entry["memory"]["limit"]["value"]
    every = open_sets(account["mechanisms"], rank.kind, "auto")
    sets = open_sets(account["mechanisms"], rank.kind, request["fit"])
    ways = []
    if request["fit"] in (None, "off") and _fits(rank, b, t, every, limit):
        ways.append(f"--fit {_budget(plan, entry)}, which engages memory mechanisms")
    ways += _smaller(rank, b, t, sets, limit, account["granule"])
    if not ways:
        state = rank.memory(1, 1, _everything(account, rank.kind))
        names = ("masters", "gradients", "muon_momentum", "adamw_state", "workspace")
        held = size(sum(state[name] for name in names))
        what = "weights, gradients, optimizer state" + (" and CUDA's libraries" if rank.kind == "cuda" else "")
        return f"a smaller model or a larger device: {what} alone hold {held}"
    return ", or ".join(ways)


def _smaller(rank: Rank, b: int, t: int, sets: list[Mechanisms], limit: float, granule: int) -> list[str]:
    ways = []
    if b > 1 and _fits(rank, 1, t, sets, limit):
        ways.append(f"--batch {largest_within(b, lambda batch: _fits(rank, batch, t, sets, limit))}")
    if t > granule and _fits(rank, b, granule, sets, limit):
        steps = largest_within(t // granule, lambda count: _fits(rank, b, count * granule, sets, limit))
        ways.append(f"--seq {steps * granule}")
    if not ways and t > granule and _fits(rank, 1, granule, sets, limit):
        steps = largest_within(t // granule, lambda count: _fits(rank, 1, count * granule, sets, limit))
        ways.append(f"--batch 1 --seq {steps * granule}")
    return ways


def _fits(rank: Rank, b: int, t: int, sets: list[Mechanisms], limit: float) -> bool:
    return any(rank.peak(b, t, engaged) <= limit for engaged in sets)


def _everything(account: Mapping[str, Json], kind: str) -> Mechanisms:
    return (*names_of(account["mechanisms"], "fleet", [kind]), *names_of(account["mechanisms"], "rank", [kind]))


def _budget(plan: Mapping[str, Json], entry: Mapping[str, Json]) -> str:
    """auto where free memory is known; else the device's own memory in GB."""
    device = resolve(plan, device_pointer(plan, entry))
    return "auto" if device["memory_free"]["value"] is not None else f"{device['memory_total']['value'] / 1e9:.4g}"
