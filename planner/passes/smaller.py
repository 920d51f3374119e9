"""What would fit where a plan does not: the nearest changes of what was asked, or that none does.

Each is proposed from the formulas and then really planned before it is said, so that following it does not meet the
next refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planner.passes.budget import needed
from planner.passes.cost import STATE, Rank
from planner.passes.layout import device_pointer
from planner.passes.mechanisms import Mechanisms, Offer, offer
from planner.passes.ranks import rank_facts
from planner.passes.split import largest_within
from planner.views.words import size
from schemas.document import resolve
from schemas.form import Json

_MOST = 2**20

Planned = Callable[[Mapping[str, Json]], bool]
"""Whether the request with these changes makes a plan."""


class Way(NamedTuple):
    """A change as a person is told of it, and as the request has it."""

    said: str
    changes: Mapping[str, Json]


@dataclass(frozen=True)
class _Room:
    """One rank entry: how many ranks, their shape, what they may hold (``limit``; None: unknown), and the sets of
    mechanisms that were open to it, and those that there are."""

    count: int
    members: list[int]
    rank: Rank
    batch: int
    length: int
    limit: float | None
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


def ways_to_fit(
    plan: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json], planned: Planned
) -> str:
    """The nearest changes of the ``request`` under which every rank of a plan fits, each of them ``planned``."""
    rooms = [_room(plan, request, account, place) for place in range(len(plan["ranks"]))]
    proposed = [*_budget_of(plan, request), *_policies(request, offer(plan, request, account)), *_more(rooms, request)]
    ways = [way for way in proposed if planned(way.changes)]
    ways += _batches(rooms, request, planned)
    ways += [way for way in _freer_split(rooms, request) if planned(way.changes)]
    # Of a module of one's own nothing is known of lengths below those at which it was counted.
    granule = account["granule"]
    least = account["made_from"].get("lengths", [granule])[0]
    ways += _lengths(rooms, granule, least, planned)
    ways += [way for way in _others(plan, request) if planned(way.changes)]
    if ways:
        return ", or ".join(way.said for way in ways)
    worst = max(rooms, key=lambda room: room.least(least) - (room.limit or 0))
    if worst.limit is not None and worst.limit <= 0:
        return "fewer ranks (--devices), or memory that others hold given free: nothing of it is left for a rank"
    what = "weights, gradients, optimizer state" + (" and CUDA's libraries" if worst.rank.kind == "cuda" else "")
    return (
        f"a smaller model (--model, --set) or a larger device: one sequence of length {least} takes "
        f"{size(round(worst.least(least)))}, and {what} alone hold {size(_state(worst))}"
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
        open=offers.open_sets(rank.kind, request["fit"]),
        every=offers.open_sets(rank.kind, "auto"),
    )


def _budget_of(plan: Mapping[str, Json], request: Mapping[str, Json]) -> Iterator[Way]:
    """Memory mechanisms, where none may be engaged yet."""
    if request["fit"] in (None, "off"):
        budgets = _budgets(plan)
        fit: Json = budgets if budgets == "auto" else [round(float(text) * 1e9) for text in budgets.split(",")]
        yield Way(f"--fit {budgets}, which engages memory mechanisms", {"fit": fit})


def _policies(request: Mapping[str, Json], offers: Offer) -> Iterator[Way]:
    """Another policy, since the order need not lead to the set that fits; or fewer mechanisms asked for by name, where
    they exclude what would."""
    if request["fit"] not in (None, "off") and request["fit_policy"] == "in-order":
        yield Way("--fit-policy cheapest", {"fit_policy": "cheapest"})
    for left in dict.fromkeys((*((name,) for name in offers.asked), offers.asked)):
        kept = [name for name in offers.asked if name not in left]
        if left:
            yield Way(f"{', '.join(left)} left out of --mechanisms", {"mechanisms": kept or None})


def _more(rooms: list[_Room], request: Mapping[str, Json]) -> Iterator[Way]:
    """A larger budget, where the budget binds."""
    if isinstance(request["fit"], list):
        needs = [min(room.rank.peak(room.batch, room.length, engaged) for engaged in room.open) for room in rooms]
        least = math.ceil(needed(max(needs), rooms[0].rank.allocator) / 1e8) / 10
        budget = max(least, max(request["fit"]) / 1e9)
        yield Way(f"--fit {budget:.10g}", {"fit": [round(budget * 1e9)]})


def _batches(rooms: list[_Room], request: Mapping[str, Json], planned: Planned) -> Iterator[Way]:
    """Fewer sequences: declared ones rank by rank, else the largest --batch that some split of fits."""
    most = [room.most(room.length) for room in rooms]
    if min(most) < 1:
        return
    if isinstance(request["capacity"], list):
        fitting = {member: min(b, room.batch) for b, room in zip(most, rooms, strict=True) for member in room.members}
        rows = [[fitting[member], request["capacity"][member][1]] for member in sorted(fitting)]
        if planned({"capacity": rows}):
            yield Way("--capacity " + ",".join(str(batch) for batch, _ in rows), {})
        return
    world = sum(room.count for room in rooms)
    batch = min(most)
    if request["capacity"] != "equal":
        batch = sum(room.count * b for room, b in zip(rooms, most, strict=True)) // world
    batch = _largest(min(batch, _even(rooms) - 1), lambda count: {"batch": count}, planned)
    if batch:
        yield Way(f"--batch {batch}", {})


def _freer_split(rooms: list[_Room], request: Mapping[str, Json]) -> Iterator[Way]:
    """The same samples divided by what each rank holds, where the split was asked for and they divide evenly."""
    total, world = sum(room.count * room.batch for room in rooms), sum(room.count for room in rooms)
    if request["capacity"] not in (None, "auto") and world > 1 and total % world == 0:
        batch = total // world
        yield Way(f"--capacity auto --batch {batch}", {"capacity": "auto", "batch": batch})


def _even(rooms: list[_Room]) -> int:
    """Sequences a rank, over the whole fleet."""
    return sum(room.count * room.batch for room in rooms) // sum(room.count for room in rooms)


def _largest(most: int, change: Callable[[int], dict[str, Json]], planned: Planned) -> int:
    """The largest number up to ``most`` whose change is planned; 0 where none is. ``most`` is nearly always right."""
    if most < 1:
        return 0
    if planned(change(most)):
        return most
    return largest_within(most, lambda count: planned(change(count))) if planned(change(1)) else 0


def _lengths(rooms: list[_Room], granule: int, least: int, planned: Planned) -> Iterator[Way]:
    """The longest length from ``least`` on, in whole granules, at which every rank holds its batch."""
    shortest, below = min(room.length for room in rooms), -(-least // granule) - 1
    longest = shortest // granule - (shortest % granule == 0) - below

    def length(count: int) -> int:
        return (below + count) * granule

    def holds(count: int) -> bool:
        return all(room.holds(room.batch, length(count), room.open) for room in rooms)

    if longest >= 1 and holds(1):
        most = largest_within(longest, holds)
        found = _largest(most, lambda count: {"seq": length(count)}, planned)
        if found:
            yield Way(f"--seq {length(found)}", {})


def _others(plan: Mapping[str, Json], request: Mapping[str, Json]) -> Iterator[Way]:
    """Another dtype of compute or of reduction, or parameters in parts."""
    used = {entry["dtype"]["chosen"] for entry in plan["ranks"]}
    for dtype in ("bf16", "fp16"):
        if used == {"fp32"} and all(entry["capability"][dtype]["value"] for entry in plan["ranks"]):
            yield Way(f"--dtype {dtype}", {"dtype": [dtype]})
    if plan["exchange"].get("reduce_dtype", {}).get("chosen") in ("bf16", "fp16"):
        yield Way("--reduce fp32, which needs no buffers for narrower gradients", {"reduce": "fp32"})
    if request["shard"] in (None, "none") and plan["workload"]["opt"]["chosen"] == "adamw":
        yield Way("--shard fsdp", {"shard": "fsdp"})


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
