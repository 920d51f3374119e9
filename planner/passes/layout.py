"""The draft that passes start from: what was asked, what is there, what the work is; nothing decided but the plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.passes.ledger import Ledger
from planner.passes.likeness import grouped, in_order, levelled
from schemas.document import reading, unknown
from schemas.form import Json


def lay_out(request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json]) -> dict[str, Json]:
    """The draft of a plan: identity, request, toolchain, fleet, workload, and ranks grouped by likeness."""
    ledger = Ledger({"format": "dormouse.plan", "format_version": 1, "request": dict(request)})
    ledger.put("/toolchain", record["toolchain"])
    nodes, devices = grouped(levelled(record["nodes"]), levelled(record["devices"]))
    fleet = {"nodes": nodes, "devices": devices} | ({"links": record["links"]} if "links" in record else {})
    ledger.put("/fleet", _moved(fleet))
    ledger.put("/workload", {"model": account["made_from"]["model"], "digest": account["digest"]})
    _workload(ledger, request, account)
    ledger.put("/ranks", _ranks(request, devices))
    return ledger.draft


def _workload(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    ledger.decide(
        "/workload/opt",
        request["opt"],
        account["made_from"]["opt"],
        "Muon for the matrices, AdamW for the rest" if account["made_from"]["opt"] == "muon" else "AdamW for all",
    )
    steps = account["defaults"]["steps"]
    ledger.decide("/workload/steps", request["steps"], request["steps"] or steps, f"{steps} unless asked otherwise")
    ledger.decide("/workload/seed", request["seed"], request["seed"] or 0, "of initialisation and of the data's order")
    ledger.put("/workload/config", {})
    for key, row in account["config"].items():
        ledger.decide(f"/workload/config/{key}", row["asked"], row["chosen"], row["why"])
    routes = [route for route in ("muon", "adamw", "tables") if route != "tables" or account["parameters"][route]]
    for route in routes:
        why = f"elements that the runtime routes to {route}, counted on the meta build"
        item = reading(account["parameters"][route], "elements", "computed", why, inputs=["/workload/digest"])
        ledger.put(f"/workload/parameters/{route}", item)
    inputs = [f"/workload/parameters/{route}" for route in routes]
    ledger.compute("/workload/parameters/total", "elements", lambda *all_: sum(all_), inputs, "all routes")
    ledger.put("/workload/data", {"sources": [_source(row) for row in request["data"]]})


def _source(row: Mapping[str, Json]) -> dict[str, Json]:
    bound = "differs by Python: bound when the run starts, and recorded there"
    known = row["sha256"] is not None
    return {
        "name": row["name"],
        "weight": row["weight"],
        "length": reading(row["length"], "B", "probed", "size of the file") if known else unknown("B", bound),
        "sha256": reading(row["sha256"], "", "probed", "of the file's bytes") if known else unknown("", bound),
    }


def per_rank(asked: Any, rank: int) -> Any:
    """What an option that takes one value, or one a rank, says of ``rank``; None when nothing was asked."""
    if not isinstance(asked, list):
        return asked
    return asked[rank] if len(asked) > 1 else asked[0]


def _moved(item: Json) -> Json:
    """A part of the record as it stands in a plan: pointers into the record lead below /fleet there."""
    if isinstance(item, dict):
        return {key: _moved(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_moved(value) for value in item]
    parts = ("/nodes/", "/devices/", "/links/")
    return f"/fleet{item}" if isinstance(item, str) and item.startswith(parts) else item


def _ranks(request: Mapping[str, Json], devices: Mapping[str, Json]) -> list[dict[str, Json]]:
    """One entry for all ranks that are alike in device and in what was asked of them, in order of their first rank."""
    entries: dict[str, dict[str, Json]] = {}
    order = in_order(devices)
    for rank, (key, identity) in enumerate(order):
        asked = [per_rank(request[option], rank) for option in ("dtype", "capacity", "fit")]
        entry = entries.setdefault(repr((key, asked)), {"members": [], "devices": []})
        entry["members"].append(rank)
        entry["devices"].append(identity)
    return list(entries.values())


def device_pointer(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> str:
    """The pointer of the device entry that ``entry``'s ranks run on."""
    for key, device in draft["fleet"]["devices"].items():
        if entry["devices"][0] in device["ids"]:
            return f"/fleet/devices/{key.replace('~', '~0').replace('/', '~1')}"
    raise KeyError(entry["devices"][0])
