"""Every decision of a plan has an effect: two values are planned, and the run is seen to differ."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import plans
import ranks
from executor.fingerprints import fingerprint
from executor.loop import Progress, train
from executor.run import Places, execute
from schemas.document import is_decision, resolve, walk
from test_executor_scaling import WHOLE, training

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes and of runs for all

CASES = json.loads((Path(__file__).parent / "cases" / "decisions.json").read_text())

# The keys of experts, of their balance and of the table, each with another value than in a small model that has all.
OF_PARTS = {"mixer": "conv", "experts": 3, "topk": 1, "expert_ffn": 16, "moe_capacity": 0.5, "moe_lb_coef": 0.05,
            "engram_rows": 120, "engram_heads": 1, "engram_dim": 4}  # fmt: skip

# Those that another workload, and so another account, belongs to; and those that only a run with a NaN, in fp16 or on a
# card can show.
ELSEWHERE = {
    "/workload/opt": "below",
    "/workload/config/layers": "below",
    "/workload/config/width": "below",
    "/workload/config/heads": "below",
    "/workload/config/ffn": "below",
    "/workload/config/conv": "below",
    **{f"/workload/config/{key}": "below" for key in OF_PARTS},
    "/exchange/shard": "test_executor_sharded.py",
    "/workload/config/allocator": "test_executor_allocator.py",
    "/workload/config/nonfinite": "test_executor_gates.py",
    "/workload/config/adamw": "test_executor_optimizers.py",
    "/workload/config/loss_scale": "test_executor_scaling.py",
    "/workload/config/loss_scale_growth": "test_executor_scaling.py",
    "/workload/config/keep_model": "test_executor_checkpoint.py",
    "/workload/config/checkpoint_every": "test_executor_resume.py",
    "/workload/config/keep_checkpoints": "test_executor_resume.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


@cache
def made(folder: Path, size: int) -> dict[str, Any]:
    return plans.plan(plans.corpus(folder), size, steps=6, batch=3)


@cache
def plain(folder: Path, size: int) -> Any:
    return seen_of(made(folder, size), folder, size)


def seen_of(plan: dict[str, Any], folder: Path, size: int) -> dict[str, Any]:
    """What can be seen of a run of ``plan``, by the names that the cases use."""
    if size > 1:
        first = ranks.run(plan, plans.corpus(folder), folder / "run")[0]
        if first["entry"] is None or first["entry"]["outcome"] == "failed":  # a CUDA build has NCCL, and no card here
            return {"refusal": first["reason"].split(":")[0]}
        return _seen(first["entry"]) | {"refusal": None}
    done = execute(plan, Places(None, folder / "run", (plans.corpus(folder),)))
    assert done.entry is not None
    return _seen(done.entry) | {"threads": torch.get_num_threads()}


def _seen(entry: dict[str, Any]) -> dict[str, Any]:
    assert entry["outcome"] == "finished", entry["reason"]
    names = {
        "dtype": "/ranks/0/dtype @0",
        "kernel": "/ranks/0/kernels/kda @0",
        "backward_peak": "/ranks/0/memory/backward_peak @0",
        "momentum": "/ranks/0/memory/muon_momentum @0",
        "payload": "/exchange/payload",
        "buckets": "/exchange/buckets",
    }
    found = {name: entry["measured"].get(label, {}).get("value") for name, label in names.items()}
    return found | {
        "weights": entry["fingerprint"],
        "steps": entry["steps"],
        "evaluations": len(entry["evaluations"]),
        "bits": entry["bits_per_byte"],
        "samples": entry["measured"]["/step/seconds"]["samples"],
        "compared": entry["fingerprints_compared"],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["decision"])
def test_a_decision_is_seen_in_the_run(folder: Path, case: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    size = case.get("ranks", 1)
    before = plain(folder, size)
    capfd.readouterr()
    if case["seen"] == "lines":
        seen_of(made(folder, size), folder, size)
        before = {"lines": capfd.readouterr().err.count("\n")}
    after = seen_of(_other(made(folder, size), case), folder, size)
    after["lines"] = capfd.readouterr().err.count("\n")
    assert before[case["seen"]] != after[case["seen"]]


def _other(plan: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    other = case["other"]
    if other == "all 1":
        other = [1] * len(resolve(plan, case["decision"])["chosen"])
    more = {pointer: resolve(plan, pointer)["value"] // 2 for pointer in case.get("with", {})}
    return plans.with_values(plan, {case["decision"]: other, **more})


@pytest.mark.parametrize(
    ("key", "other"), [("layers", 1), ("width", 48), ("heads", 1), ("ffn", 32), ("conv", 2), ("opt", "adamw")]
)
def test_another_workload_is_another_plan_and_another_run(folder: Path, key: str, other: Any) -> None:
    changed = {"opt": other} if key == "opt" else {"settings": {key: other}}
    plan = plans.plan(plans.corpus(folder), 1, steps=6, batch=3, **changed)
    assert plan["workload"]["digest"] != made(folder, 1)["workload"]["digest"]
    assert seen_of(plan, folder, 1)["weights"] != plain(folder, 1)["weights"]


@pytest.mark.parametrize(("key", "other"), OF_PARTS.items())
def test_a_key_of_experts_or_of_the_table_is_seen_in_the_run(key: str, other: Any) -> None:
    runs = []
    for model in (WHOLE, WHOLE | {key: other}):
        parts, work, data = training("cpu", model=model)
        train(parts, work, data, Progress())
        runs.append(fingerprint(parts.model))
    assert runs[0] != runs[1]


def test_every_decision_of_a_plan_is_shown_to_matter(folder: Path) -> None:
    known = {case["decision"] for case in CASES} | set(ELSEWHERE)
    for size in (1, 2):
        found = {pointer for pointer, item in walk(made(folder, size)) if is_decision(item)}
        assert found <= known
