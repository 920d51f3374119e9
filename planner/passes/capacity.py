"""Second pass: who does how much. Each rank's batch and length, its weight in the loss, each matrix's owner."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from planner.passes.cost import Rank
from planner.passes.layout import device_pointer, per_rank
from planner.passes.ledger import Ledger
from planner.passes.mechanisms import least_seconds, offer
from planner.passes.ranks import matrix_flops, rank_facts, set_limit, world_size
from planner.passes.split import Curve, Group, assign_owners, largest_within, split_samples
from schemas.form import Json

MOST_SAMPLES = 2**20


def capacity(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the split of the global batch (batch x world size, or the sum of declared batches) and the owners."""
    ledger = Ledger(draft)
    if world_size(draft) > 1 and account["matrices"]:
        _owners(ledger, account)
    for place in range(len(ledger.draft["ranks"])):
        set_limit(ledger, request, place)
    _batches(ledger, request, account)
    _weights(ledger)
    return ledger.draft


def _owners(ledger: Ledger, account: Mapping[str, Json]) -> None:
    ranks = sorted((rank, place) for place, entry in enumerate(ledger.draft["ranks"]) for rank in entry["members"])
    rates = [ledger.draft["ranks"][place]["rates"]["products"]["value"] for _, place in ranks]
    speeds = [1.0] * len(rates) if None in rates else rates
    costs = [matrix_flops(account, place) for place in range(len(account["matrices"]))]
    owners = assign_owners(costs, speeds)
    why = "longest job first, each to the rank that finishes it soonest"
    why += ", all ranks taken as equal: a rate is unknown" if None in rates else ""
    inputs = [f"/ranks/{place}/rates/products" for place in range(len(ledger.draft["ranks"]))]
    ledger.decide("/exchange/owners", None, owners, why, inputs=inputs)


def _batches(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    asked = request["capacity"]
    if isinstance(asked, list):
        for place in range(len(ledger.draft["ranks"])):
            batch, seq = per_rank(asked, ledger.draft["ranks"][place]["members"][0])
            ledger.decide(f"/ranks/{place}/batch", batch, batch, "declared by --capacity")
            _seq(ledger, place, seq if seq is not None else request["seq"], account)
        return
    even, world = request["batch"] or account["defaults"]["batch"], world_size(ledger.draft)
    for place in range(len(ledger.draft["ranks"])):
        _seq(ledger, place, request["seq"], account)
    alone = len(ledger.draft["ranks"]) == 1
    if asked == "equal" or alone:
        why = "one rank" if world == 1 else "all ranks are alike" if alone else "--capacity equal"
        _even(ledger, request, even, why)
        return
    groups = _groups(ledger, request, account)
    if groups is None and _alike(ledger):
        _even(ledger, request, even, "all ranks are alike")
        return
    if groups is None:
        _even(ledger, request, even, "a rank's rates are unknown, so the split is even", outcome="fallback")
        return
    batches = split_samples(even * world, groups)
    if batches is None:  # the draft keeps the even split, and the refusal names the memory that cannot hold it
        _even(ledger, request, even, "no split of the global batch fits every rank's memory")
        return
    _uneven(ledger, request, batches, groups, even)


def _alike(ledger: Ledger) -> bool:
    """Whether all ranks compute with the same on devices of one name: then an even split needs no rates."""
    traits = set()
    for entry in ledger.draft["ranks"]:
        name = ledger.value(f"{device_pointer(ledger.draft, entry)}/name")
        kernels = sorted((kernel, choice["chosen"]) for kernel, choice in entry["kernels"].items())
        traits.add((name, entry["dtype"]["chosen"], *kernels))
    return len(traits) == 1 and None not in next(iter(traits))


def _seq(ledger: Ledger, place: int, asked: int | None, account: Mapping[str, Json]) -> None:
    default = account["defaults"]["seq"]
    ledger.decide(f"/ranks/{place}/seq", asked, asked or default, f"{default} unless asked otherwise")


def _even(ledger: Ledger, request: Mapping[str, Json], batch: int, why: str, outcome: str | None = None) -> None:
    if outcome is None:
        outcome = "default" if request["batch"] is None and request["capacity"] != "equal" else "granted"
    for place in range(len(ledger.draft["ranks"])):
        inputs = [f"/ranks/{place}/rates/products"] if outcome == "fallback" else []
        ledger.decide(f"/ranks/{place}/batch", request["batch"], batch, why, outcome=outcome, inputs=inputs)


def _groups(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> list[Group] | None:
    groups, offers = [], offer(ledger.draft, request, account)
    for place, entry in enumerate(ledger.draft["ranks"]):
        facts, length = rank_facts(ledger.draft, account, place), entry["seq"]["chosen"]
        if facts.rates is None:
            return None
        limit = entry["memory"]["limit"]["value"]
        sets = offers.open_sets(facts.kind, request["fit"])

        def seconds(b: int, facts: Rank = facts, length: int = length, sets: Any = sets, limit: Any = limit) -> float:
            return least_seconds(facts, b, length, sets, limit)

        def fits(b: int, seconds: Curve = seconds) -> bool:
            return seconds(b) < float("inf")

        def work(b: int, facts: Rank = facts, length: int = length) -> float:
            return facts.sample_seconds(b, length)

        cap = largest_within(MOST_SAMPLES, fits) if fits(1) else 0
        groups.append(Group(len(entry["members"]), seconds, cap, work))
    return groups


def _uneven(
    ledger: Ledger,
    request: Mapping[str, Json],
    batches: Sequence[Sequence[int]],
    groups: Sequence[Group],
    even: int,
) -> None:
    count = len(ledger.draft["ranks"])
    slowest = max(group.seconds(max(row)) for group, row in zip(groups, batches, strict=True))
    level = max(group.seconds(even) for group in groups)
    rejected: list[dict[str, Json]] = []
    if level == float("inf"):
        rejected = [{"option": even, "why": "the even split, which does not fit every rank's memory"}]
    elif level > slowest:
        rejected = [{"option": even, "why": "the even split", "costs_seconds": level - slowest}]
    inputs = [f"/ranks/{place}/rates/products" for place in range(count)]
    inputs += [f"/ranks/{place}/memory/limit" for place in range(count)]
    for place in range(count):
        for position, batch in enumerate(sorted(set(batches[place]), reverse=True)):
            target = place if position == 0 else _part(ledger, place, batches[place], batch)
            time = groups[place].seconds(batch)
            why = f"the split whose slowest rank is fastest ({slowest:.4g} s); {batch} take this one {time:.4g} s"
            where, asked = f"/ranks/{target}/batch", request["batch"]
            ledger.decide(where, asked, batch, why, outcome="default", inputs=inputs, rejected=rejected)
        _keep(ledger, place, batches[place])


def _part(ledger: Ledger, place: int, batches: Sequence[int], batch: int) -> int:
    """A new entry at the end for the members of ``place`` that have ``batch``; its own pointers lead to itself."""
    target, entry = len(ledger.draft["ranks"]), copy.deepcopy(ledger.draft["ranks"][place])
    chosen = [position for position, found in enumerate(batches) if found == batch]
    for key in ("members", "devices"):
        entry[key] = [entry[key][position] for position in chosen]
    ledger.draft["ranks"].append(_redirect(entry, f"/ranks/{place}/", f"/ranks/{target}/"))
    return target


def _keep(ledger: Ledger, place: int, batches: Sequence[int]) -> None:
    entry = ledger.draft["ranks"][place]
    for key in ("members", "devices"):
        entry[key] = [item for item, found in zip(entry[key], batches, strict=True) if found == max(batches)]


def _redirect(item: Json, old: str, new: str) -> Json:
    if isinstance(item, dict):
        return {key: _redirect(value, old, new) for key, value in item.items()}
    if isinstance(item, list):
        return [_redirect(value, old, new) for value in item]
    return new + item[len(old) :] if isinstance(item, str) and item.startswith(old) else item


def _weights(ledger: Ledger) -> None:
    """Tokens of each rank, of the fleet, and each rank's weight in the loss: t_r / sum of t."""
    entries = ledger.draft["ranks"]
    sizes = [len(entry["members"]) for entry in entries]
    for place in range(len(entries)):
        inputs = [f"/ranks/{place}/batch", f"/ranks/{place}/seq"]
        ledger.compute(
            f"/ranks/{place}/tokens", "tokens", lambda b, t: b * t, inputs, "batch x length, one byte a token"
        )

    def total(*values: float) -> float:
        return sum(size * value for size, value in zip(sizes, values, strict=True))

    batches = [f"/ranks/{place}/batch" for place in range(len(entries))]
    tokens = [f"/ranks/{place}/tokens" for place in range(len(entries))]
    ledger.compute("/step/global_batch", "sequences", total, batches, "all ranks' batches")
    ledger.compute("/step/global_tokens", "tokens", total, tokens, "all ranks' tokens")
    for place in range(len(entries)):
        inputs = [f"/ranks/{place}/tokens", "/step/global_tokens"]
        ledger.compute(f"/ranks/{place}/token_weight", "", lambda t, all_t: t / all_t, inputs, "t_r / sum of t")
