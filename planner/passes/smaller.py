"""What would fit where a plan does not: budgets, batches and lengths for the whole fleet, or that nothing does.

Each way is tried on every rank before it is said, so that following it does not meet the next refusal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.passes import constants
from planner.passes.cost import STATE, Rank
from planner.passes.layout import device_pointer
from planner.passes.mechanisms import Mechanisms, Offer, offer
from planner.passes.ranks import device_room, rank_facts
from planner.passes.split import largest_within
from planner.views.words import size
from schemas.document import resolve
from schemas.form import Json

_MOST = 2**20


@dataclass(frozen=True)
class _Room:
    """One rank entry: how many ranks, their shape, what they may hold (``limit``; without a budget ``device``; None:
    unknown), and the sets of mechanisms there are."""

    count: int
    members: list[int]
    rank: Rank
    batch: int
    length: int
    limit: float | None
    device: float | None
    open: list[Mechanisms]
    every: list[Mechanisms]

    def holds(self, batch: int, length: int, sets: list[Mechanisms]) -> bool:
        return self.limit is None or any(self.rank.peak(batch, length, engaged) <= self.limit for engaged in sets)

    def least(self, length: int) -> float:
        """The peak of one sequence of ``length`` under the mechanisms that leave least."""
        return min(self.rank.peak(1, length, engaged) for engaged in self.every)

    def most(self, length: int) -> int:
        """The most sequences of ``length`` that fit; 0 where not even one does."""
        return (
            largest_within(_MOST, lambda b: self.holds(b, length, self.open)) if self.holds(1, length, self.open) else 0
        )


def ways_to_fit(plan: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json]) -> str:
    """The nearest changes under which every rank of a drafted plan fits its limit."""
    rooms = [_room(plan, request, account, place) for place in range(len(plan["ranks"]))]
    ways = []
    if request["fit"] in (None, "off") and all(room.holds(room.batch, room.length, room.every) for room in rooms):
        ways.append(f"--fit {_budgets(plan)}, which engages memory mechanisms")
    ways += _policies(rooms, request, offer(plan, request, account))
    ways += _more(rooms, request)
    ways += _batches(rooms, request)
    length = _longest(rooms, account["granule"])
    if length:
        ways.append(f"--seq {length}")
    if ways:
        return ", or ".join(ways)
    granule = account["granule"]
    worst = max(rooms, key=lambda room: room.least(granule) - (room.limit or 0))
    what = "weights, gradients, optimizer state" + (" and CUDA's libraries" if worst.rank.kind == "cuda" else "")
    return (
        f"a smaller model (--model, --set) or a larger device: one sequence of {granule} takes "
        f"{size(round(worst.least(granule)))}, and {what} alone hold {size(_state(worst))}"
    )


def _room(plan: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json], place: int) -> _Room:
    entry, rank = plan["ranks"][place], rank_facts(plan, account, place)
    offers = offer(plan, request, account)
    return _Room(
        count=len(entry["members"]),
        members=entry["members"],
        rank=rank,
        batch=entry["batch"]["chosen"],
        length=entry["seq"]["chosen"],
        limit=entry["memory"]["limit"]["value"],
        device=device_room(plan, entry),
        open=offers.open_sets(rank.kind, request["fit"]),
        every=offers.open_sets(rank.kind, "auto"),
    )


def _policies(rooms: list[_Room], request: Mapping[str, Json], offers: Offer) -> list[str]:
    """Another policy, where some set of mechanisms fits that the order does not lead to; or fewer asked for by name,
    where they exclude what would fit."""
    if request["fit"] in (None, "off"):
        return []
    if all(room.holds(room.batch, room.length, room.open) for room in rooms):
        blind = any(room.rank.rates is None for room in rooms)
        return ["--fit-policy cheapest"] if request["fit_policy"] == "in-order" and not blind else []
    for left in (*((name,) for name in offers.asked), offers.asked):
        others = replace(offers, asked=tuple(name for name in offers.asked if name not in left))
        sets = [others.open_sets(room.rank.kind, request["fit"]) for room in rooms]
        if left and all(room.holds(room.batch, room.length, of) for room, of in zip(rooms, sets, strict=True)):
            return [f"{', '.join(left)} left out of --mechanisms"]
    return []


def _more(rooms: list[_Room], request: Mapping[str, Json]) -> list[str]:
    """A larger budget, where the budget binds and the devices hold what was planned."""
    if not isinstance(request["fit"], list):
        return []
    needs = [min(room.rank.peak(room.batch, room.length, engaged) for engaged in room.open) for room in rooms]
    if any(room.device is None or need > room.device for need, room in zip(needs, rooms, strict=True)):
        return []
    least = math.ceil(max(needs) / constants.FIT_HEADROOM / 1e8) / 10
    return [f"--fit {max(least, max(request['fit']) / 1e9):.10g}"]


def _batches(rooms: list[_Room], request: Mapping[str, Json]) -> list[str]:
    """Fewer sequences: declared ones rank by rank, else the largest --batch that some split of fits."""
    most = [room.most(room.length) for room in rooms]
    if min(most) < 1:
        return []
    if isinstance(request["capacity"], list):
        fitting = {member: min(b, room.batch) for b, room in zip(most, rooms, strict=True) for member in room.members}
        return ["--capacity " + ",".join(str(fitting[member]) for member in sorted(fitting))]
    world = sum(room.count for room in rooms)
    if request["capacity"] == "equal":
        batch = min(most)
    else:
        batch = sum(room.count * b for room, b in zip(rooms, most, strict=True)) // world
    planned = sum(room.count * room.batch for room in rooms) // world
    return [f"--batch {batch}"] if 1 <= batch < planned else []


def _longest(rooms: list[_Room], granule: int) -> int:
    """The longest length, in whole granules, at which every rank holds its batch; 0 where none is."""
    longest = min(room.length for room in rooms) // granule

    def holds(count: int) -> bool:
        return all(room.holds(room.batch, count * granule, room.open) for room in rooms)

    return largest_within(longest, holds) * granule if longest >= 1 and holds(1) else 0


def _state(room: _Room) -> int:
    """Bytes held from step to step under the mechanisms that leave least."""
    held = (room.rank.memory(1, 1, engaged) for engaged in room.every)
    return min(sum(components[name] for name in STATE) for components in held)


def _budgets(plan: Mapping[str, Json]) -> str:
    """auto where free memory is known everywhere; else each rank's own device memory in GB."""
    devices = {
        member: resolve(plan, device_pointer(plan, entry)) for entry in plan["ranks"] for member in entry["members"]
    }
    if all(device["memory_free"]["value"] is not None for device in devices.values()):
        return "auto"
    budgets = [f"{(devices[member]['memory_total']['value'] or 0) / 1e9:.4g}" for member in sorted(devices)]
    return budgets[0] if len(set(budgets)) == 1 else ",".join(budgets)
