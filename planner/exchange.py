"""Fourth pass: the exchange of gradients and of owners' updates. Bytes, buckets, the link, seconds."""

from __future__ import annotations

from collections.abc import Mapping

from planner import constants
from planner.calibrated import calibrated_time
from planner.calibration import calibrate_link
from planner.cost import DTYPE_BYTES
from planner.ledger import Ledger
from planner.link import all_gather_seconds, all_reduce_seconds, lane_rate, ring_volume
from planner.ranks import most_owned, world_size
from schemas.document import unknown
from schemas.form import Json


def exchange(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide the buckets, and predict what the exchange moves and takes. One rank exchanges nothing."""
    ledger = Ledger(draft)
    world = world_size(draft)
    if world == 1:
        return ledger.draft
    _link(ledger)
    _payload(ledger, world)
    calibrate_link(ledger, request, world)
    link = ["/exchange/latency", "/exchange/rate"]
    calibrated_time(
        ledger,
        "/exchange/seconds",
        "/exchange/calibration/all_reduce",
        lambda payload, buckets, latency, rate: all_reduce_seconds(payload, world, rate, latency, buckets),
        ["/exchange/payload", "/exchange/buckets"],
        link,
        ("ring all-reduce: 2(P-1) steps of latency a bucket, and the volume over the link", None),
        measurable=True,
    )
    if "owners" in ledger.draft["exchange"]:
        _owners(ledger, account, world, link)
    return ledger.draft


def _payload(ledger: Ledger, world: int) -> None:
    width = DTYPE_BYTES[ledger.value("/exchange/reduce_dtype")]
    sources = ["/workload/parameters/total", "/exchange/reduce_dtype"]
    why = f"gradients at {width} B an element"
    ledger.compute("/exchange/payload", "B", lambda n, _: n * width, sources, why, measurable=True)
    payload = ledger.value("/exchange/payload")
    smallest, largest = constants.SMALLEST_BUCKET_BYTES, constants.LARGEST_BUCKET_BYTES
    bucket = min(max(payload // constants.BUCKETS_WANTED, smallest), largest)
    why = f"payload / {constants.BUCKETS_WANTED}, within {smallest} and {largest} B"
    ledger.decide("/exchange/bucket_bytes", None, bucket, why, inputs=["/exchange/payload"])
    # DDP fills buckets by the gradients' own bytes, fp32, whatever they are reduced in.
    gradients = ["/workload/parameters/total", "/exchange/bucket_bytes"]
    why = "fp32 gradient bytes / bucket bytes, rounded up: at least so many, since a tensor is never cut"
    ledger.compute("/exchange/buckets", "", lambda n, size: -(-4 * n // size), gradients, why)
    why = f"2(P-1)/P payloads a rank, P = {world}"
    ledger.compute("/exchange/volume", "B", lambda n: round(ring_volume(n, world)), ["/exchange/payload"], why)


def _link(ledger: Ledger) -> None:
    """The rate and latency of the slowest link of the fleet."""
    devices = ledger.draft["fleet"]["devices"]
    if all(device["kind"] == "cpu" for device in devices.values()):
        _loopback(ledger)
        return
    ledger.put("/exchange/latency", constants.PCIE_LATENCY.reading())
    ledger.put("/exchange/pcie_efficiency", constants.PCIE_EFFICIENCY.reading())
    sources = ["/exchange/pcie_efficiency"]
    for key in devices:
        sources += [f"/fleet/devices/{key}/pcie_generation_max", f"/fleet/devices/{key}/pcie_width_current"]

    def slowest(efficiency: float, *links: float) -> float:
        return efficiency * min(lane_rate(int(g)) * w for g, w in zip(links[::2], links[1::2], strict=True))

    why = "slowest card's link: lanes x lane rate x efficiency (maximum generation, since idle lowers the current one)"
    ledger.compute("/exchange/rate", "B/s", slowest, sources, why)


def _loopback(ledger: Ledger) -> None:
    nodes = ledger.draft["fleet"]["nodes"]
    for name, assumed in (("rate", constants.LOOPBACK_RATE), ("latency", constants.LOOPBACK_LATENCY)):
        pointer, sources = f"/exchange/{name}", [f"/fleet/nodes/{node}/loopback_{name}" for node in nodes]
        timed = [nodes[node].get(f"loopback_{name}", {}).get("value") is not None for node in nodes]
        if len(nodes) > 1:
            ledger.put(pointer, unknown(assumed.unit, "the network between nodes is not probed"))
        elif all(timed):
            ledger.compute(pointer, assumed.unit, float, sources, "gloo between processes of this machine, timed")
        else:
            ledger.put(pointer, assumed.reading())


def _owners(ledger: Ledger, account: Mapping[str, Json], world: int, link: list[str]) -> None:
    width = DTYPE_BYTES[ledger.value("/workload/config/ns_dtype")]
    most = most_owned(ledger.draft, account)
    inputs = ["/exchange/owners", "/workload/config/ns_dtype"]
    why = f"updates of the largest owner at {width} B an element: every rank sends that much, padded"
    ledger.compute("/exchange/owners_payload", "B", lambda *_: most * width, inputs, why, measurable=True)
    calibrated_time(
        ledger,
        "/exchange/owners_seconds",
        "/exchange/calibration/owners",
        lambda payload, latency, rate: all_gather_seconds(payload, world, rate, latency),
        ["/exchange/owners_payload"],
        link,
        ("ring all-gather: P-1 steps of one rank's share", None),
    )
