"""Recorded worlds to plan in: records and accounts under tests/cases, and the request that nobody asked anything in."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from planner.passes.compile import compile_plan
from planner.request import PLAIN
from schemas.document import reading
from schemas.seal import append_run, seal
from schemas.store import load

CASES = Path(__file__).parent / "cases"


def cases(name: str) -> list[dict[str, Any]]:
    """The rows of tests/cases/``name``."""
    rows: list[dict[str, Any]] = json.loads((CASES / name).read_text(encoding="utf-8"))
    return rows


@cache
def _recorded(kind: str, name: str) -> dict[str, Any]:
    return load(CASES / f"{kind}s" / f"{name}.json", f"dormouse.{kind}")


def record(name: str = "cpu-2") -> dict[str, Any]:
    """A recorded probe, to be changed at will."""
    return copy.deepcopy(_recorded("record", name))


def account(name: str = "tiny") -> dict[str, Any]:
    """A recorded account, to be changed at will."""
    return copy.deepcopy(_recorded("account", name))


def request(**asked: Any) -> dict[str, Any]:
    """The request with nothing asked but ``asked``."""
    nothing = dict.fromkeys(PLAIN)
    stdlib = {"name": "stdlib", "weight": 1, "length": None, "sha256": None}
    return {"devices": "auto", "set": {}, "data": [stdlib], "benchmark": False, "calibrate": [], **nothing, **asked}


def compiled(**asked: Any) -> dict[str, Any]:
    """A plan of the recorded two CPU ranks and the recorded account of tiny."""
    return compile_plan(request(**asked), record(), account())


def fleet(*speeds: float, free: int | None = 10**12, sm: str = "8.6") -> dict[str, Any]:
    """The record of one made-up card a speed, in FLOP/s of its products, with nothing else that takes time."""
    devices, found = {}, record()
    for node in found["nodes"].values():
        node["platform"] = reading("linux", "", "declared", "made up")
    for place, speed in enumerate(speeds):
        devices[f"GPU-{place}"] = {
            "ids": [f"GPU-{place}"],
            "node": next(iter(found["nodes"])),
            "kind": "cuda",
            "name": reading(f"Card {place}", "", "declared", "made up"),
            "sm": reading(sm, "", "declared", "made up"),
            "memory_total": reading(10**12, "B", "declared", "made up"),
            "memory_free": reading(free, "B", "declared", "made up")
            if free is not None
            else reading(None, "B", "unknown", "the driver does not say"),
            "pcie_generation_max": reading(5, "", "declared", "made up"),
            "pcie_width_max": reading(16, "", "declared", "made up"),
            "pcie_width_current": reading(16, "", "declared", "made up"),
            "pcie_generation_current": reading(1, "", "declared", "made up: idle"),
            "mig": reading("off", "", "declared", "made up"),
            "compute_mode": reading("default", "", "declared", "made up"),
            "rate_bf16": reading(speed, "FLOP/s", "benchmarked", "made up"),
            "rate_fp16": reading(speed, "FLOP/s", "benchmarked", "made up"),
            "rate_fp32": reading(speed / 2, "FLOP/s", "benchmarked", "made up"),
            "bandwidth": reading(1e15, "B/s", "benchmarked", "made up"),
            "operator_seconds": reading(1e-12, "s", "benchmarked", "made up"),
        }
    build = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "triton": "3.6.0", "fla-core": "0.6.0"}
    build |= {"bitsandbytes": "0.50.2"}
    installed = {name: reading(version, "", "declared", "made up") for name, version in build.items()}
    return seal({**found, "toolchain": found["toolchain"] | installed, "devices": devices})


def machine(row: dict[str, Any]) -> dict[str, Any]:
    """A record of one made-up card for each compute capability of ``row``, changed as it says."""
    found = fleet(*[1e12] * len(row["sm"]), free=row.get("free", 10**12))
    for device, sm in zip(found["devices"].values(), row["sm"], strict=True):
        device["sm"] = reading(sm, "", "declared", "made up")
        device |= {key: reading(value, "", "declared", "made up") for key, value in row.get("device", {}).items()}
    for package, value in row.get("toolchain", {}).items():
        found["toolchain"][package] = reading(value, "", "declared", "made up")
    for node in found["nodes"].values():
        node |= {key: reading(value, "", "declared", "made up") for key, value in row.get("node", {}).items()}
    return seal(found)


def run_of(plan: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run that measured everything exactly as predicted."""
    measured = {}
    for pointer in ("/ranks/0/step/compute @0", "/ranks/0/step/compute @1", "/step/seconds"):
        place: Any = plan
        for key in pointer.split(" @")[0].split("/")[1:]:
            place = place[int(key)] if isinstance(place, list) else place[key]
        ends = {end: place[end] for end in ("low", "high")}
        line = {"predicted": place["value"], "value": place["value"], "unit": "s", **ends}
        measured[pointer] = {**line, "statistic": "median", "samples": 18, "instrument": "perf_counter"}
    return {
        "id": "run-1",
        "start": "2026-01-01T00:00:00Z",
        "end": "2026-01-01T00:01:00Z",
        "outcome": "finished",
        "reason": None,
        "steps": 20,
        "final_loss": 2.5,
        "toolchain": {"torch": "2.13.0"},
        "source": "0" * 64,
        "data": [],
        "conditions": {"clocks": {"value": None, "reason": "not read on a CPU"}},
        "measured": measured,
        "absent": {},
        **changes,
    }


def recorded_plan(*runs: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """A compiled plan with ``runs`` chained on."""
    plan = compiled(**asked)
    for run in runs:
        plan = append_run(plan, run)
    return plan


def cluster(nodes: int, cards: int = 8) -> dict[str, Any]:
    """The record of so many alike nodes of so many alike cards, told apart one by one, as probing each would."""
    one = fleet(1e14)
    device, node = one["devices"]["GPU-0"], next(iter(one["nodes"].values()))
    node |= {"network_rate": reading(5e10, "B/s", "declared", "made up")}
    node |= {"network_latency": reading(1e-5, "s", "declared", "made up")}
    names = [f"node-{place:08x}" for place in range(nodes)]
    devices = {}
    for place, name in enumerate(names):
        for card in range(cards):
            identity = f"GPU-{place:08x}-0000-4000-8000-{card:012x}"
            devices[identity] = {**device, "ids": [identity], "node": name, "order": [place * cards + card]}
    return seal({**one, "nodes": {name: dict(node) for name in names}, "devices": devices})
