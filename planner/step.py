"""Last pass: the time of one step by part, what binds it, and what the split and the fleet gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner import constants
from planner.cost import Rank, seconds
from planner.ledger import Ledger
from planner.ranks import kind_of, rank_facts, world_size
from schemas.document import reading, resolve, unknown
from schemas.form import Json

_RATES = ("products", "bandwidth", "launch")


def step(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Predict every rank's step by part, the fleet's step, its regime and its gain."""
    ledger = Ledger(draft)
    places = range(len(ledger.draft["ranks"]))
    for place in places:
        _work(ledger, account, place)
        _compute(ledger, place)
    fleet = world_size(draft) > 1
    if fleet:
        for place in places:
            _exchange(ledger, place)
    for place in places:
        _total(ledger, place)
    _fleet(ledger)
    if fleet:
        _gains(ledger, request, account)
    _regime(ledger, account)
    _verdict(ledger)
    return ledger.draft


def _work(ledger: Ledger, account: Mapping[str, Json], place: int) -> None:
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    rank = rank_facts(ledger.draft, account, place)
    mechanisms = [*ledger.value("/fit/mechanisms"), *entry["mechanisms"]["chosen"]]
    inputs = ["/workload/digest", f"{base}/batch", f"{base}/seq", f"{base}/dtype", f"{base}/mechanisms"]
    units = {"flops": "FLOP", "bytes": "B", "launches": ""}
    for key, value in rank.work(entry["batch"]["chosen"], entry["seq"]["chosen"], mechanisms).items():
        why = f"{key} of forward and backward, counted on the meta build"
        ledger.put(f"{base}/work/{key}", reading(float(value), units[key], "computed", why, inputs=inputs))
    source = "/exchange/owners" if "owners" in ledger.draft["exchange"] else "/workload/digest"
    for key, value in rank.update_work().items():
        why = f"{key} of the optimizer's step: owned matrices and AdamW"
        item = reading(float(value), units[key], "computed", why, inputs=[source])
        ledger.put(f"{base}/work/optimizer_{key}", item)


def _compute(ledger: Ledger, place: int) -> None:
    base, kind = f"/ranks/{place}", kind_of(ledger.draft, ledger.draft["ranks"][place])
    how = "launches x launch + " if kind == "cpu" else "the longer of launches x launch and "

    def time(flops: float, moved: float, launches: float, *rates: float) -> float:
        return seconds(kind, flops, moved, launches, rates)

    rates = [f"{base}/rates/{name}" for name in _RATES]
    for part, prefix in (("compute", ""), ("optimizer", "optimizer_")):
        inputs = [f"{base}/work/{prefix}{name}" for name in ("flops", "bytes", "launches")] + rates
        why = f"{how}FLOP / products + bytes / bandwidth"
        ledger.compute(f"{base}/step/{part}", "s", time, inputs, why, measurable=True)


def _exchange(ledger: Ledger, place: int) -> None:
    """The exposed part of the all-reduce: the wait for the slowest rank, and what backward does not hide."""
    base, count = f"/ranks/{place}", len(ledger.draft["ranks"])
    computes = [f"/ranks/{other}/step/compute" for other in range(count)]

    def exposed(own: float, total: float, buckets: float, *all_computes: float) -> float:
        hidden = (buckets - 1) / buckets * min(total, constants.BACKWARD_SHARE * own)
        return max(all_computes) - own + total - hidden

    ledger.compute(
        f"{base}/step/exchange",
        "s",
        exposed,
        [f"{base}/step/compute", "/exchange/seconds", "/exchange/buckets", *computes],
        "wait for the slowest rank + all-reduce - what all buckets but the last hide behind backward (2/3 of compute)",
        measurable=True,
    )
    if "owners_seconds" in ledger.draft["exchange"]:
        why = "every owner's updates reach every rank"
        ledger.compute(f"{base}/step/owners", "s", float, ["/exchange/owners_seconds"], why, measurable=True)


def _total(ledger: Ledger, place: int) -> None:
    base = f"/ranks/{place}"
    parts = [f"{base}/step/{name}" for name in ledger.draft["ranks"][place]["step"]]
    ledger.compute(f"{base}/step/total", "s", lambda *values: sum(values), parts, "all parts", measurable=True)
    sources = [f"{base}/tokens", f"{base}/step/total"]
    why = "the rank's tokens / total"
    pointer = f"{base}/step/tokens_per_second"
    ledger.compute(pointer, "tokens/s", lambda n, s: n / s, sources, why, measurable=True)


def _fleet(ledger: Ledger) -> None:
    totals = [f"/ranks/{place}/step/total" for place in range(len(ledger.draft["ranks"]))]
    why = "the slowest rank's total"
    ledger.compute("/step/seconds", "s", lambda *values: max(values), totals, why, measurable=True)
    sources, why = ["/step/global_tokens", "/step/seconds"], "all ranks' tokens / step"
    pointer = "/step/tokens_per_second"
    ledger.compute(pointer, "tokens/s", lambda n, s: n / s, sources, why, measurable=True)


def _gains(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """The step of an even split of the same global batch, and of the best card with all of it alone."""
    entries = ledger.draft["ranks"]
    ranks = [rank_facts(ledger.draft, account, place) for place in range(len(entries))]
    rates = [f"/ranks/{place}/rates/products" for place in range(len(entries))]
    if any(rank.rates is None for rank in ranks):
        for name in ("even", "best"):
            ledger.put(f"/step/gain_over_{name}", unknown("", "a rank's rates are unknown", inputs=rates))
        return
    total, world = ledger.value("/step/global_batch"), world_size(ledger.draft)
    computes = [entry["step"]["compute"]["value"] for entry in entries]

    def part(place: int, samples: float) -> float:
        """Seconds of entry ``place`` with ``samples`` sequences, a fraction taken between its neighbours."""
        low, length = max(1, int(samples)), entries[place]["seq"]["chosen"]
        at, after = (ranks[place].compute_seconds(b, length) for b in (low, low + 1))
        return at + (after - at) * (samples - low)

    even_compute = max(part(place, total / world) for place in range(len(entries)))
    inputs = ["/step/seconds", "/step/global_batch", *rates]
    shared = ledger.value("/step/seconds")
    even = None if shared is None else shared - max(computes) + even_compute
    alone = min(part(place, total) + _alone_optimizer(ranks[place]) for place in range(len(entries)))
    _gain(ledger, "even", "even_seconds", even, inputs, "the same global batch split evenly")
    _gain(ledger, "best", "best_alone_seconds", alone, inputs, "the best card alone with the whole global batch")


def _alone_optimizer(rank: Rank) -> float:
    assert rank.rates is not None
    work = dataclasses.replace(rank, owned=tuple(range(len(rank.account["matrices"]))), world=1).update_work()
    return seconds(rank.kind, work["flops"], work["bytes"], work["launches"], rank.rates)


def _gain(ledger: Ledger, name: str, pointer: str, value: float | None, inputs: list[str], why: str) -> None:
    if value is None:
        ledger.put(f"/step/gain_over_{name}", unknown("", f"the step is unknown ({why})", inputs=inputs))
        return
    ledger.put(f"/step/{pointer}", reading(float(value), "s", "computed", f"step time of {why}", inputs=inputs))
    sources = [f"/step/{pointer}", "/step/seconds"]
    ledger.compute(f"/step/gain_over_{name}", "", lambda other, this: other / this, sources, f"against {why}")


def _regime(ledger: Ledger, account: Mapping[str, Json]) -> None:
    """What the step's time is mostly made of, on the slowest rank."""
    parts = _parts_of_slowest(ledger)
    if parts is None:
        ledger.put("/step/regime", unknown("", "the step's time is unknown", inputs=["/step/seconds"]))
        return
    total = sum(parts.values())
    name = max(parts, key=lambda key: parts[key])
    shares = ", ".join(f"{key} {value / total:.0%}" for key, value in parts.items())
    ledger.put("/step/regime", reading(f"{name}-bound", "", "computed", shares, inputs=["/step/seconds"]))


def _parts_of_slowest(ledger: Ledger) -> dict[str, float] | None:
    if ledger.value("/step/seconds") is None:
        return None
    entries = ledger.draft["ranks"]
    place = max(range(len(entries)), key=lambda place: entries[place]["step"]["compute"]["value"])

    def value(pointer: str) -> float:
        return float(resolve(entries[place], pointer)["value"])

    products, bandwidth, launch = (value(f"/rates/{name}") for name in _RATES)
    parts = {
        "launch": launch * value("/work/launches"),
        "product": value("/work/flops") / products,
        "memory": value("/work/bytes") / bandwidth,
        "optimizer": value("/step/optimizer"),
    }
    if "exchange" in entries[place]["step"]:
        parts["exchange"] = value("/step/exchange") + (
            value("/step/owners") if "owners" in entries[place]["step"] else 0
        )
    return parts


def _verdict(ledger: Ledger) -> None:
    gain = ledger.draft["step"].get("gain_over_best")
    if gain is None:
        text, inputs = "one rank: nothing to gain from a split", ["/step/global_batch"]
    elif gain["value"] is None:
        ledger.put("/step/verdict", unknown("", "the gain is unknown", inputs=["/step/gain_over_best"]))
        return
    else:
        inputs = ["/step/gain_over_best", "/step/gain_over_even"]
        even = ledger.value("/step/gain_over_even")
        more = "faster" if gain["value"] >= 1 else "SLOWER"
        text = f"{gain['value']:.3g}x the best card alone ({more} than one card), {even:.3g}x an even split"
    ledger.put("/step/verdict", reading(text, "", "computed", "from the predicted step times", inputs=inputs))
