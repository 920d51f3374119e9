"""The path that the exchange takes, its rate and its latency: NVLink, peer-to-peer, through host memory, loopback, or a
network between nodes. An order of magnitude lies between them, so no one efficiency serves all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.passes import constants
from planner.passes.ledger import Ledger
from planner.passes.likeness import node_count
from planner.passes.link import Rings, lane_rate
from planner.passes.ranks import world_size
from schemas.document import escape, reading, unknown
from schemas.form import Json

WITHIN = ("/exchange/rate", "/exchange/latency")
BETWEEN = ("/exchange/network_rate", "/exchange/network_latency")


def link_inputs(draft: Mapping[str, Json]) -> list[str]:
    """The pointers that `rings` takes the values of, in its order; a timed curve last, where there is one."""
    bucket = ["/exchange/bucket_seconds"] if "bucket_seconds" in draft["exchange"] else []
    return [*WITHIN, *bucket, *(BETWEEN if node_count(draft) > 1 else ()), *_curve(draft)]


def _curve(draft: Mapping[str, Json]) -> list[str]:
    """The pointer of the timed all-reduces within a node: of the only kind of node there is, else of none."""
    nodes = draft["fleet"]["nodes"]
    timed = [node for node, item in nodes.items() if item.get("allreduce_curve", {}).get("value") is not None]
    return [f"/fleet/nodes/{timed[0]}/allreduce_curve"] if len(nodes) == len(timed) == 1 else []


def rings(draft: Mapping[str, Json], *values: Any) -> Rings:
    """The fleet's rings at ``values`` of `link_inputs`."""
    nodes = node_count(draft)
    at = dict(zip(link_inputs(draft), values, strict=True))
    curve: tuple[tuple[float, float], ...] = ()
    fitted = 0.0
    for pointer in _curve(draft):
        curve = tuple((float(size), float(seconds)) for size, seconds in at[pointer])
        fitted = next(iter(draft["fleet"]["nodes"].values()))["allreduce_rate"]["value"]
    return Rings(
        per_node=-(-world_size(draft) // nodes),
        nodes=nodes,
        rate=at[WITHIN[0]],
        latency=at[WITHIN[1]],
        network_rate=at.get(BETWEEN[0], 0.0),
        network_latency=at.get(BETWEEN[1], 0.0),
        bucket_seconds=at.get("/exchange/bucket_seconds", 0.0),
        curve=curve,
        curve_rate=fitted,
    )


def put_link(ledger: Ledger) -> None:
    """Put path, rate and latency of the exchange within a node, and between nodes where there are several."""
    nodes = ledger.draft["fleet"]["nodes"]
    if all(device["kind"] == "cpu" for device in ledger.draft["fleet"]["devices"].values()):
        loopback = {"rate": constants.LOOPBACK_RATE, "latency": constants.LOOPBACK_LATENCY}
        _from_nodes(ledger, nodes, "loopback", loopback, "gloo between processes of one machine, timed")
        ledger.put("/exchange/path", reading("loopback", "", "computed", "CPU ranks", inputs=["/exchange/backend"]))
    else:
        path = _path(ledger)
        ledger.put("/exchange/bucket_seconds", constants.GPU_BUCKET_SECONDS.reading())
        assumed = {"rate": None, "latency": constants.PATH_LATENCY[path]}
        _from_nodes(ledger, nodes, "allreduce", assumed, "NCCL's all-reduce over these cards, timed")
        if "rate" not in ledger.draft["exchange"]:
            _card_rate(ledger, path)
    if node_count(ledger.draft) > 1:
        _network(ledger, nodes)


def _from_nodes(ledger: Ledger, nodes: Mapping[str, Json], prefix: str, assumed: Mapping[str, Any], timed: str) -> None:
    """Rate and latency as every node timed them, the worst of the nodes; else as assumed (None: left out)."""
    for name, constant in assumed.items():
        key, pointer = f"{prefix}_{name}", f"/exchange/{name}"
        if all(node.get(key, {}).get("value") is not None for node in nodes.values()):
            sources = [f"/fleet/nodes/{node}/{key}" for node in nodes]
            worst = min if name == "rate" else max
            unit = "B/s" if name == "rate" else "s"
            ledger.compute(pointer, unit, lambda *v, worst=worst: worst(v), sources, timed)
        elif constant is not None:
            ledger.put(pointer, constant.reading())


def _path(ledger: Ledger) -> str:
    """The slowest path that the ring must take: it binds the ring."""
    links = ledger.draft["fleet"].get("links", {})
    order = ("staged", "p2p", "nvlink")
    known = [f"/fleet/links/{name}/path" for name in links]
    if known and _every_pair(ledger) and all(ledger.value(source) in order for source in known):
        chosen = min((ledger.value(source) for source in known), key=order.index)
        why, inputs = "the slowest path between any two of these cards", known
    else:
        devices = ledger.draft["fleet"]["devices"]
        direct = [
            f"/fleet/devices/{escape(key)}/peer_to_peer" for key, item in devices.items() if "peer_to_peer" in item
        ]
        able = len(direct) == len(devices) and all(ledger.value(source) for source in direct)
        kinds = {item.get("sm", {}).get("value") for item in devices.values()}
        chosen, inputs = ("p2p" if able and len(kinds) == 1 else "staged"), direct
        why = "cards of one architecture that allow peer-to-peer"
        if chosen == "staged":
            why = "through host memory: the cards are not known to reach each other"
            why += " (of several architectures)" if len(kinds) > 1 else ""
    ledger.put("/exchange/path", reading(chosen, "", "computed", why, inputs=inputs))
    return str(chosen)


def _every_pair(ledger: Ledger) -> bool:
    """Whether the links speak of every two cards of the fleet."""
    ids = [identity for device in ledger.draft["fleet"]["devices"].values() for identity in device["ids"]]
    links = ledger.draft["fleet"]["links"].values()
    pairs = {frozenset(pair) for link in links for pair in link["pairs"]}
    return len(pairs) >= len(ids) * (len(ids) - 1) // 2


def _card_rate(ledger: Ledger, path: str) -> None:
    many = world_size(ledger.draft) > 2 * node_count(ledger.draft) and path != "nvlink"
    efficiency = constants.PATH_EFFICIENCY_OF_MANY if many else constants.PATH_EFFICIENCY
    ledger.put("/exchange/efficiency", efficiency[path].reading())
    devices = ledger.draft["fleet"]["devices"]
    if path == "nvlink":
        _nvlink_rate(ledger, devices)
        return
    sources = ["/exchange/efficiency"]
    for key in devices:
        sources += [
            f"/fleet/devices/{escape(key)}/pcie_generation_max",
            f"/fleet/devices/{escape(key)}/pcie_width_current",
        ]

    def slowest(efficiency: float, *links: float) -> float:
        return efficiency * min(lane_rate(int(g)) * w for g, w in zip(links[::2], links[1::2], strict=True))

    why = "slowest card's lanes x lane rate x efficiency (maximum generation, since idle lowers the current one)"
    ledger.compute("/exchange/rate", "B/s", slowest, sources, why)


def _nvlink_rate(ledger: Ledger, devices: Mapping[str, Json]) -> None:
    """The data sheets' NVLink rate where every card has one, else the links counted times an assumed rate a link."""
    sheets = [f"/fleet/devices/{escape(key)}/nvlink_sheet" for key in devices]
    if all(item.get("nvlink_sheet", {}).get("value") for item in devices.values()):
        why = "the slowest card's NVLink, one way, by its data sheet x efficiency"
        inputs = ["/exchange/efficiency", *sheets]
        ledger.compute("/exchange/rate", "B/s", lambda share, *rates: share * min(rates), inputs, why)
        return
    ledger.put("/exchange/nvlink_rate", constants.NVLINK_BYTES_A_LINK.reading())
    links = ledger.draft["fleet"]["links"]
    counts = [f"/fleet/links/{name}/nvlinks" for name in links if "nvlinks" in links[name]]
    why = "fewest NVLinks between two cards x a link's rate x efficiency"
    inputs = ["/exchange/efficiency", "/exchange/nvlink_rate", *counts]
    ledger.compute("/exchange/rate", "B/s", lambda share, rate, *n: share * rate * min(n, default=1), inputs, why)


def _network(ledger: Ledger, nodes: Mapping[str, Json]) -> None:
    for name, unit in (("network_rate", "B/s"), ("network_latency", "s")):
        sources = [f"/fleet/nodes/{node}/{name}" for node in nodes if name in nodes[node]]
        if len(sources) < len(nodes):
            ledger.put(f"/exchange/{name}", unknown(unit, "the network between nodes is not probed: declare it"))
        else:
            worst = min if name == "network_rate" else max
            why = "the slowest node's network, as declared"
            ledger.compute(f"/exchange/{name}", unit, lambda *v, worst=worst: worst(v), sources, why)
