"""A small plan made by hand, and runs for it: what show, diff and the command line are tested with."""

from __future__ import annotations

import copy
from typing import Any

from planner.request import PLAIN
from schemas.document import decision, reading, unknown
from schemas.seal import append_run, seal

NODE = "node-0123abcd"


def _assumed(value: float, unit: str, **more: Any) -> dict[str, Any]:
    return reading(value, unit, "assumed", "made by hand", **more)


def _computed(value: float, unit: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return reading(value, unit, "computed", "made by hand", inputs=inputs, **more)


def request(**asked: Any) -> dict[str, Any]:
    """A request with everything null but ``asked``."""
    source = {"name": "stdlib", "weight": 1, "length": None, "sha256": None}
    body: dict[str, Any] = {"devices": "cpu:2", "set": {}, "data": [source], "benchmark": False, "calibrate": []}
    return {**body, **dict.fromkeys(PLAIN), **asked}


def body(*, rate: float = 50e9, batch: int = 4, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    """The unsealed body of a plan of two alike CPU ranks; its step follows from ``rate`` and ``batch``."""
    device = {
        "ids": ["cpu-0", "cpu-1"],
        "node": NODE,
        "kind": "cpu",
        "name": reading("Handmade [red]CPU", "", "probed", "made by hand"),
        "rate_fp32": _assumed(rate, "FLOP/s"),
        "clock": unknown("Hz", "made by hand"),
        "cores": reading(2, "", "probed", "made by hand"),
    }
    rate_at, batch_at, compute_at = "/fleet/devices/cpu-0/rate_fp32", "/ranks/0/batch", "/ranks/0/step/compute"
    seconds = batch * 1e9 / rate
    rank = {
        "members": [0, 1],
        "devices": ["cpu-0", "cpu-1"],
        "threads": decision(None, 1, "default", "one of two cores"),
        "capability": {
            rung: reading(rung != "fp16", "", "probed", "made by hand") for rung in ("bf16", "fp16", "fp32")
        },
        "dtype": decision(None, "fp32", "default", "a CPU", rejected=[{"option": "bf16", "why": "slower here"}]),
        "kernels": {"kda": decision("auto", "chunk_torch", "fallback", "no Triton on a CPU")},
        "batch": decision(batch, batch, "granted", "asked", inputs=["/request/batch"]),
        "seq": decision(None, 128, "default", "the workload's"),
        "mechanisms": decision(None, ["recompute"], "granted", "fits", rejected=_REJECTED),
        "tokens": _computed(batch * 128, "tokens", batch_at),
        "token_weight": _computed(0.5, "", batch_at),
        "demand": {"flops": _computed(batch * 1e9, "FLOP", batch_at)},
        "memory": _memory(batch),
        "step": {
            "compute": _computed(seconds, "s", rate_at, batch_at, low=seconds / 2, high=seconds * 2, measurable=True),
            "exchange": _assumed(0.004, "s", measurable=True),
            "optimizer": _assumed(0.01, "s"),
            "total": _computed(seconds + 0.014, "s", compute_at, low=seconds, high=3 * seconds, measurable=True),
            "tokens_per_second": _computed(batch * 128 / seconds, "tokens/s", compute_at),
        },
    }
    return {
        "format": "dormouse.plan",
        "format_version": 1,
        "request": asked or request(batch=batch),
        "toolchain": {"torch": reading("2.13.0+cpu", "", "probed", "made by hand")},
        "fleet": {"nodes": {NODE: {"cores": reading(2, "", "probed", "made by hand")}}, "devices": {"cpu-0": device}},
        "workload": _workload(),
        "ranks": [rank],
        "exchange": {
            "backend": decision(None, "gloo", "default", "CPUs"),
            "reduce_dtype": decision(None, "fp32", "default", "of all ranks"),
            "owners": decision(None, [0, 1, 0], "default", "x"),
        },
        "fit": {
            "mechanisms": decision(None, [], "default", "off"),
            "allocator_overhead": _assumed(1.1, ""),
            "process_bytes": _assumed(2e8, "B"),
        },
        "step": {
            "global_batch": _computed(2 * batch, "sequences", batch_at),
            "global_tokens": _computed(2 * batch * 128, "tokens", batch_at),
            "seconds": _computed(
                seconds + 0.014, "s", "/ranks/0/step/total", low=seconds, high=3 * seconds, measurable=True
            ),
            "tokens_per_second": _computed(1000.0, "tokens/s", "/ranks/0/step/total"),
            "regime": _computed("compute-bound", "", "/ranks/0/step/total"),
            "verdict": _computed("two ranks are faster than one", "", "/ranks/0/step/total"),
        },
    }


_REJECTED = [{"option": "muon_state_bf16", "why": "inexact", "saves_bytes": 2**20, "costs_seconds": 0.001}]


def _memory(batch: int) -> dict[str, Any]:
    names = ("masters", "gradients", "muon_momentum", "adamw_state", "buckets", "update", "backward_peak")
    names += ("optimizer_peak", "limit")
    parts = {name: _assumed(3 * 2**20, "B") for name in names}
    parts["activations"] = _computed(batch * 2**20, "B", "/ranks/0/batch")
    parts["peak"] = _computed(2**30, "B", "/ranks/0/memory/activations", low=2**29, high=2**31, measurable=True)
    return parts


def _workload() -> dict[str, Any]:
    bound = unknown("B", "bound at the run")
    return {
        "model": "tiny",
        "digest": "ab" * 32,
        "opt": decision(None, "muon", "default", "unless asked otherwise"),
        "steps": decision(None, 60, "default", "the workload's"),
        "seed": decision(None, 0, "default", "unless asked otherwise"),
        "config": {"layers": decision(None, 4, "default", "preset")},
        "parameters": {"total": reading(900000, "", "computed", "counted")},
        "data": {"sources": [{"name": "stdlib", "weight": 1, "length": bound, "sha256": dict(bound, unit="")}]},
    }


def plan(**changes: Any) -> dict[str, Any]:
    return seal(body(**changes))


def run(
    plan: dict[str, Any], measured: dict[str, Any], absent: dict[str, str] | None = None, **line_has: Any
) -> dict[str, Any]:
    """``plan`` with one more run, whose ``measured`` gives a value for each label (pointer, and " @rank"); each of its
    lines holds ``line_has`` too."""
    from schemas.document import resolve

    lines = {}
    for label, value in measured.items():
        item = resolve(plan, label.split(" @")[0])
        line = {"predicted": item.get("value", item.get("chosen")), "value": value, "unit": item.get("unit", "")}
        line |= {end: item[end] for end in ("low", "high") if end in item}
        lines[label] = {**line, "statistic": "median", "samples": 10, "instrument": "perf_counter", **line_has}
    entry = {
        "id": f"r{len(plan['runs'])}",
        "start": "2026-01-01T00:00:00Z",
        "end": "2026-01-01T00:01:00Z",
        "outcome": "finished",
        "reason": None,
        "steps": 60,
        "final_loss": 2.5,
        "toolchain": {"torch": "2.13.0+cpu"},
        "source": "cd" * 32,
        "data": [],
        "conditions": {},
        "measured": lines,
        "absent": absent or {},
    }
    return append_run(copy.deepcopy(plan), entry)
