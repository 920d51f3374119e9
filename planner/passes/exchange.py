"""Second pass: the exchange of gradients and of owners' updates. Owners, bytes, buckets, the link, seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.passes.buckets import bucket_bytes
from planner.passes.calibrated import calibrated_time
from planner.passes.calibration import calibrate_link
from planner.passes.cost import DTYPE_BYTES
from planner.passes.ledger import Ledger
from planner.passes.link import ring_volume
from planner.passes.moves import moves_of
from planner.passes.paths import link_inputs, put_link, rings
from planner.passes.ranks import matrix_flops, most_owned, world_size
from planner.passes.sharding import WIDTH, is_sharded, shards_of
from planner.passes.split import assign_owners
from schemas.form import Json


def exchange(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the owners and the buckets, and predict what the exchange moves and takes. One rank exchanges nothing."""
    ledger = Ledger(draft)
    world = world_size(draft)
    if world == 1:
        return ledger.draft
    put_link(ledger)
    if is_sharded(draft):
        _sharded(ledger, account)
        _alone(ledger, world)
        return ledger.draft
    _payload(ledger, world, account)
    calibrate_link(ledger, request, account)
    calibrated_time(
        ledger,
        "/exchange/seconds",
        "/exchange/calibration/all_reduce",
        lambda payload, buckets, *link: rings(ledger.draft, *link).all_reduce(payload, buckets),
        ["/exchange/payload", "/exchange/buckets"],
        link_inputs(ledger.draft),
        ("ring all-reduce: 2(P-1) steps of latency a bucket, and the volume over the link", None),
        measurable=True,
    )
    _alone(ledger, world)
    if account["matrices"]:
        _owners(ledger, account)
        _sending(ledger, account)
    return ledger.draft


def _alone(ledger: Ledger, world: int) -> None:
    """One bucket with nothing beside it: what a run tries before its first step."""
    sources = ["/exchange/payload", "/exchange/buckets", *link_inputs(ledger.draft)]

    def seconds(payload: float, buckets: float, *link: float) -> float:
        ring = dataclasses.replace(rings(ledger.draft, *link), bucket_seconds=0.0)
        return ring.all_reduce(payload / buckets, 1)

    why = "the all-reduce of one bucket with nothing beside it, tried before the first step"
    ledger.compute("/exchange/alone_seconds", "s", seconds, sources, why, measurable=True)
    sources, why = (
        ["/exchange/payload", "/exchange/buckets", "/exchange/alone_seconds"],
        "a bucket's volume / that time",
    )

    def rate(payload: float, buckets: float, alone: float) -> float:
        return ring_volume(payload / buckets, world) / alone

    ledger.compute("/exchange/bus_rate", "B/s", rate, sources, why, measurable=True)


def _payload(ledger: Ledger, world: int, account: Mapping[str, Json]) -> None:
    width = DTYPE_BYTES[ledger.value("/exchange/reduce_dtype")]
    sources = ["/workload/parameters/total", "/exchange/reduce_dtype"]
    why = f"gradients at {width} B an element"
    ledger.compute("/exchange/payload", "B", lambda n, _: n * width, sources, why, measurable=True)
    payload = ledger.value("/exchange/payload")
    bucket, why, slower = bucket_bytes(ledger.value("/exchange/path"), payload)
    sources = ["/exchange/payload", "/exchange/path"]
    ledger.decide("/exchange/bucket_bytes", None, bucket, why, inputs=sources, rejected=slower)
    # DDP fills buckets by the gradients' own bytes, fp32, whatever they are reduced in.
    gradients = ["/workload/parameters/total", "/exchange/bucket_bytes"]
    why = "fp32 gradient bytes / bucket bytes, rounded up: at least so many, since a tensor is never cut"
    ledger.compute("/exchange/buckets", "", lambda n, size: -(-4 * n // size), gradients, why)
    table = width * account["parameters"]["tables"] // max(1, account["tensors"]["tables"])
    why = f"a bucket, or a table's gradient ({table} B), which is whole only when backward ends and is never cut"
    sources = ["/exchange/payload", "/exchange/buckets", "/workload/digest"]
    ledger.compute("/exchange/last_bucket", "B", lambda all_of, n, _: max(-(-all_of // n), table), sources, why)
    why = f"2(P-1)/P payloads a rank, P = {world}"
    ledger.compute("/exchange/volume", "B", lambda n: round(ring_volume(n, world)), ["/exchange/payload"], why)


def _sharded(ledger: Ledger, account: Mapping[str, Json]) -> None:
    """What FSDP2 gathers and sums, and the time of it."""
    shards = shards_of(ledger.draft, account)
    assert shards is not None
    source, width = ["/workload/digest", "/exchange/shard"], DTYPE_BYTES[ledger.value("/exchange/reduce_dtype")]
    ahead, again = shards.gathers()
    for name, found, why in (("forward", ahead, "every unit"), ("backward", again, "every unit but the root")):
        told = f"{why} made whole in {name}, {WIDTH} B an element, rows padded to a multiple of the ranks"
        ledger.compute(f"/exchange/{name}_bytes", "B", lambda *_, found=found: sum(found), source, told)
        ledger.compute(f"/exchange/{name}_count", "", lambda *_, found=found: len(found), source, "gathers of units")
    parts = ["/exchange/forward_bytes", "/exchange/backward_bytes"]
    ledger.compute("/exchange/gathered", "B", lambda *v: sum(v), parts, "gathered in a step", measurable=True)
    sums, sources = shards.scatters(width), [*source, "/exchange/reduce_dtype"]
    why = f"gradients at {width} B an element, rows padded, into a reduce-scatter for each unit"
    ledger.compute("/exchange/payload", "B", lambda *_: sum(sums), sources, why, measurable=True)
    ledger.compute("/exchange/buckets", "", lambda *_: len(sums), source, "units with gradients")
    why = f"(P-1)/P of what is gathered and of what is summed a rank, P = {shards.world}"
    moved = ["/exchange/gathered", "/exchange/payload"]
    ledger.compute("/exchange/volume", "B", lambda *v: round(ring_volume(sum(v), shards.world) / 2), moved, why)
    inputs = [*moved, "/exchange/forward_count", "/exchange/backward_count", "/exchange/buckets"]
    moves, link = moves_of(ledger.draft), link_inputs(ledger.draft)
    for name, seconds, what in (
        ("forward_seconds", moves.forward, "the gathers of forward"),
        ("seconds", moves.seconds, "gathers and reduce-scatters"),
    ):
        needs = ["/exchange/forward_bytes", "/exchange/forward_count"] if name == "forward_seconds" else inputs

        def taken(*values: Any, seconds: Any = seconds, skip: int = len(needs)) -> float:
            return float(seconds(rings(ledger.draft, *values[skip:])))

        why = f"{what}: P-1 steps of latency each, and the volume over the link"
        ledger.compute(f"/exchange/{name}", "s", taken, [*needs, *link], why, measurable=name == "seconds")


def _sending(ledger: Ledger, account: Mapping[str, Json]) -> None:
    width = DTYPE_BYTES[ledger.value("/workload/config/ns_dtype")]
    most = most_owned(ledger.draft, account)
    inputs = ["/exchange/owners", "/workload/config/ns_dtype"]
    why = f"updates of the largest owner at {width} B an element: every rank sends that much, padded"
    ledger.compute("/exchange/owners_payload", "B", lambda *_: most * width, inputs, why, measurable=True)
    ledger.compute(
        "/exchange/owners_seconds",
        "s",
        lambda share, *link: rings(ledger.draft, *link).all_gather(share),
        ["/exchange/owners_payload", *link_inputs(ledger.draft)],
        "ring all-gather: P-1 steps of one rank's share",
    )


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
