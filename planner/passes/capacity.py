"""Third pass: who does how much. Each rank's batch and length, and its weight in the loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from planner.passes.layout import device_pointer, per_rank
from planner.passes.ledger import Ledger
from planner.passes.ranks import set_limit, world_size
from planner.passes.search import Division, Search
from schemas.form import Json


def capacity(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the split of the global batch (batch x world size, or the sum of declared batches)."""
    ledger = Ledger(draft)
    for place in range(len(ledger.draft["ranks"])):
        set_limit(ledger, request, place)
    _batches(ledger, request, account)
    _weights(ledger)
    return ledger.draft


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
    search = Search(ledger.draft, request, account)
    if search.blind and _alike(ledger):
        _even(ledger, request, even, "all ranks are alike")
        return
    if search.blind:
        _even(ledger, request, even, "a rank's rates are unknown, so the split is even", outcome="fallback")
        return
    division = search.divide(even * world)
    if division is None:  # the draft keeps the even split, and the refusal names the memory that cannot hold it
        _even(ledger, request, even, "no split of the global batch fits every rank's memory")
        return
    _uneven(ledger, request, search, division, even)


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


def _uneven(ledger: Ledger, request: Mapping[str, Json], search: Search, division: Division, even: int) -> None:
    count, batches, curves = len(ledger.draft["ranks"]), division.batches, division.curves
    slowest = max(curve(max(row)) for curve, row in zip(curves, batches, strict=True))
    how = "the split whose slowest rank is fastest"
    how += " under the fewest mechanisms in order" if search.in_order and not search.off else ""
    rejected = _rejected(search, batches, even)
    inputs = [f"/ranks/{place}/rates/products" for place in range(count)]
    inputs += [f"/ranks/{place}/memory/limit" for place in range(count)]
    for place in range(count):
        for position, batch in enumerate(sorted(set(batches[place]), reverse=True)):
            target = place if position == 0 else _part(ledger, place, batches[place], batch)
            why = f"{how} ({slowest:.4g} s); {batch} take this one {curves[place](batch):.4g} s"
            where, asked = f"/ranks/{target}/batch", request["batch"]
            ledger.decide(where, asked, batch, why, outcome="default", inputs=inputs, rejected=rejected)
        _keep(ledger, place, batches[place])


def _rejected(search: Search, batches: Sequence[Sequence[int]], even: int) -> list[dict[str, Json]]:
    """The even split, where it is another one and no faster."""
    level, chosen = search.choose([even] * len(batches)), search.choose([max(row) for row in batches])
    if level is None or chosen is None or not search.all_hold(level):
        return [{"option": even, "why": "the even split, which does not fit every rank's memory"}]
    costs = search.step_seconds(level) - search.step_seconds(chosen)
    return [{"option": even, "why": "the even split", "costs_seconds": costs}] if costs > 0 else []


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
