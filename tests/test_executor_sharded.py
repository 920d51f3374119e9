"""Ranks that share one model under FSDP2: they do what one process does, hold what was planned, refuse what they cannot
have, and go on from a checkpoint to the very bits that a run which was never stopped comes to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import faults
import plans
import ranks
from executor import checkpoint, parts, shards
from executor.clock import Clock
from executor.fingerprints import fingerprint
from executor.gates import compare
from executor.optim.muon import Muon
from executor.workloads import build, resolve
from planner.refusals.of_plans import MUON_MEETS_DTENSOR
from processes import environment

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes and of runs for all

STEPS, STOP = 8, 4
LOSS_BOUND, ONE_STEP_BOUND, GRADIENT_BOUND = 1e-3, 1e-6, 2e-5
# Sizes that neither two nor three ranks divide, experts with a balance, and a table.
WHOLE = {"layers": 2, "width": 34, "experts": 5, "topk": 2, "expert_ffn": 22, "moe_lb_coef": 0.01, "engram_rows": 61,
         "engram_heads": 1, "engram_dim": 4}  # fmt: skip
SHAPES = {2: [[4, 32], [2, 32]], 3: [[3, 32], [1, 48], [2, 16]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@cache
def planned(folder: Path, count: int, shapes: bool = False, **config: Any) -> dict[str, Any]:
    """A plan of ``count`` ranks that share a model, with 3 sequences each or with ``shapes`` of their own."""
    own: dict[str, Any] = {"batch": None, "seq": None, "capacity": SHAPES[count]} if shapes else {"batch": 3}
    sharing = {"shard": "fsdp"} if count > 1 else {}
    made = plans.plan(plans.corpus(folder), count, WHOLE, opt="adamw", steps=STEPS, **sharing, **own)
    return plans.with_values(made, {f"/workload/config/{key}": value for key, value in config.items()})


@cache
def alone(folder: Path, sequences: int, **config: Any) -> Any:
    made = plans.plan(plans.corpus(folder), 1, WHOLE, opt="adamw", steps=STEPS, batch=sequences)
    made = plans.with_values(made, {f"/workload/config/{key}": value for key, value in config.items()})
    return ranks.run(made, plans.corpus(folder), folder / "alone", on=(0,))[0]


@cache
def together(folder: Path, count: int, shapes: bool = False, fault: str | None = None, **config: Any) -> Any:
    """All ranks' results; the third computes with other kernels."""
    plan = planned(folder, count, shapes, **config)
    where = folder / (f"together-{count}" if not (shapes or fault or config) else "other")
    return ranks.run(plan, plans.corpus(folder), where, on=tuple(range(count)), fault=fault)


def losses_gate(results: Any, one: Any) -> None:
    assert len(results[0]["losses"]) == STEPS, results[0]["reason"]
    assert compare.losses_apart(results[0]["losses"], one["losses"])[0] <= LOSS_BOUND


def one_step_gate(results: Any, one: Any) -> None:
    for result in results:
        assert compare.weights_apart(result["weights"], one["weights"], one["gradients"])[0] <= ONE_STEP_BOUND


def gradient_gate(results: Any, folder: Path, count: int) -> None:
    expected = compare.gradient_by_hand(planned(folder, count, True, clip=0.0), [plans.corpus(folder)])
    for result in results:
        assert compare.furthest(result["gradients"], expected)[0] <= GRADIENT_BOUND


def clip_gate(results: Any, one: Any) -> None:
    """AdamW does not see by how much a gradient was clipped, so the clipped gradient itself is compared."""
    for result in results:
        assert compare.furthest(result["gradients"], one["gradients"])[0] <= GRADIENT_BOUND


def identity_gate(results: Any) -> None:
    assert results[0]["outcome"] == "finished", results[0]["reason"]
    assert results[0]["entry"]["fingerprints_compared"] == 1  # after the last
    assert not compare.steps_apart([result["fingerprints"] for result in results])


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_share_a_model_have_losses_weights_and_balances_of_one_process(folder: Path, count: int) -> None:
    results, one = together(folder, count), alone(folder, 3 * count)
    losses_gate(results, one)
    one_step_gate(results, one)
    identity_gate(results)
    assert not any(compare.balances_apart(result["buffers"], one["buffers"]) for result in results)


def test_a_summed_gradient_of_unlike_batches_is_the_mean_over_tokens(folder: Path) -> None:
    results = together(folder, 3, True, clip=0.0)
    gradient_gate(results, folder, 3)
    identity_gate(results)


def test_gradients_are_clipped_by_the_norm_over_all_ranks(folder: Path) -> None:
    clip_gate(together(folder, 2, clip=0.05), alone(folder, 6, clip=0.05))


@pytest.mark.parametrize("case", faults.cases("sharded"), ids=lambda case: case["name"])
def test_a_gate_of_ranks_that_share_a_model_catches_its_fault(folder: Path, case: dict[str, Any]) -> None:
    """Each fault is planted in both ranks, and its gate turns red."""
    with pytest.raises(AssertionError):
        if case["gate"] == "gradient":
            gradient_gate(together(folder, 2, True, case["name"], clip=0.0), folder, 2)
        elif case["gate"] == "losses":
            losses_gate(together(folder, 2, fault=case["name"]), alone(folder, 6))
        elif case["gate"] == "one step":
            one_step_gate(together(folder, 2, fault=case["name"]), alone(folder, 6))
        elif case["gate"] == "clip":
            clip_gate(together(folder, 2, fault=case["name"], clip=0.05), alone(folder, 6, clip=0.05))
        else:
            identity_gate(together(folder, 2, fault=case["name"]))


def test_recomputed_blocks_are_gathered_again_and_change_no_bit(folder: Path) -> None:
    plan = plans.with_values(planned(folder, 2), {"/ranks/0/mechanisms": ["recompute"]})
    results = ranks.run(plan, plans.corpus(folder), folder / "recompute")
    assert results[0]["outcome"] == "finished", results[0]["reason"]
    assert results[0]["fingerprints"] == together(folder, 2)[0]["fingerprints"]


def test_a_run_holds_and_moves_what_was_planned(folder: Path) -> None:
    plan, results = planned(folder, 3), together(folder, 3)
    entry = results[0]["entry"]
    exact = ["/exchange/payload", "/exchange/gathered", "/exchange/buckets"]
    exact += [f"/ranks/0/memory/{part} @0" for part in ("masters", "gradients", "adamw_state", "tables_state")]
    for label in exact:
        line = entry["measured"][label]
        assert line["value"] == line["predicted"], label
    for part in ("gradients", "adamw_state", "tables_state"):  # the last rank may have fewer rows
        line = entry["measured"][f"/ranks/0/memory/{part} @2"]
        assert line["value"] == line["low"] <= line["high"], part
    whole = plan["workload"]["parameters"]["total"]["value"]
    assert 4 * whole / 3 <= entry["measured"]["/ranks/0/memory/masters @0"]["value"] < 4 * whole / 3 * 1.1
    assert plan["exchange"]["shard"]["outcome"] == "granted"


@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_a_loss_that_is_not_finite_on_one_rank_is_answered_by_all(folder: Path, answer: str) -> None:
    plan = planned(folder, 2, nonfinite=answer)
    results = ranks.run(plan, plans.corpus(folder), folder / answer, poison=(1, 3))
    if answer == "stop":
        wanted = ("failed", "rank 1: loss is not finite at step 4", 3)
        assert [(r["outcome"], r["reason"], len(r["losses"])) for r in results] == [wanted, wanted]
        return
    for result in results:
        assert result["outcome"] == "finished", result["reason"]
        moved = [a != b for a, b in zip(result["fingerprints"], result["fingerprints"][1:], strict=False)]
        assert moved == [step != 2 for step in range(STEPS - 1)]


def test_losses_that_overflow_fp16_are_scaled_by_one_scale(folder: Path) -> None:
    """Rank 1 computes in fp16, rank 0 in fp32; the scale that both use overflows at first."""
    plan = planned(folder, 2, True, nonfinite="skip", loss_scale=2.0**24)
    plan = plans.with_values(plan, {"/ranks/1/dtype": "fp16"})
    results = ranks.run(plan, plans.corpus(folder), folder / "fp16")
    identity_gate(results)
    assert 0 < results[0]["entry"]["skipped_steps"] < STEPS


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_were_stopped_go_on_as_if_they_had_not_been(folder: Path, count: int) -> None:
    plan, data, on = planned(folder, count, True, eval_every=3), plans.corpus(folder), tuple(range(count))
    straight = ranks.run(plan, data, folder / f"straight-{count}", on=on)
    run = folder / f"run-{count}"
    first = ranks.run(plan, data, run, on=on, stop=(count - 1, STOP - 2))
    assert [result["outcome"] for result in first] == ["stopped"] * count, first[0]["reason"]
    second = ranks.run(plan, data, run, on=on, resume=True)
    assert [result["outcome"] for result in second] == ["finished"] * count, second[0]["reason"]
    for rank in on:
        for key in ("losses", "fingerprints"):
            assert first[rank][key] + second[rank][key] == straight[rank][key], (rank, key)
    for key in ("evaluations", "fingerprint", "fingerprints_compared"):
        assert second[0]["entry"][key] == straight[0]["entry"][key]
    files = [(folder / where / "final" / checkpoint.MODEL).read_bytes() for where in (f"straight-{count}", run.name)]
    assert hashlib.sha256(files[0]).digest() == hashlib.sha256(files[1]).digest()


def test_a_model_that_ranks_shared_is_left_whole(folder: Path) -> None:
    together(folder, 2)
    facts, tensors = checkpoint.load(folder / "together-2" / "final")
    model = build(resolve(facts["model"]), facts["config"], facts["kernels"], "it").float()
    checkpoint.put(model, tensors, "it")
    assert fingerprint(model) == together(folder, 2)[0]["entry"]["fingerprint"]


def test_a_rank_that_fails_while_ranks_compute_together_lets_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_model.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = plans.plan(plans.corpus(tmp_path), 2, model="failing_model:Model", opt="adamw", shard="fsdp")
    results = ranks.run(plan, plans.corpus(tmp_path), tmp_path / "run", path=str(tmp_path))
    for result in results:
        assert result["outcome"] == "refused" and "rank 1 cannot" in result["reason"], result["reason"]
        assert "rank 0" not in result["reason"]


FAILING = """
import os

from torch import nn


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, inputs, targets):
        x = self.blocks[0](self.embedding(inputs))
        if os.environ.get("RANK") == "1":
            raise RuntimeError("rank 1 cannot")
        logits = self.head(self.blocks[1](x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_what_the_planner_says_of_muon_is_what_torch_says(world: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    fully_shard(model)
    model(torch.randn(3, 8)).sum().backward()
    muon = Muon(list(model.named_parameters()), [0, 0], 0)
    with pytest.raises(RuntimeError) as raised:
        muon.updates()
    assert str(raised.value) == MUON_MEETS_DTENSOR


def test_a_parameter_of_two_units_is_refused_by_its_name(world: dist.ProcessGroup) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    blocks: Any = model["blocks"]
    blocks[1].weight = blocks[0].weight
    with pytest.raises(ValueError, match=r"blocks\.1\.weight is another unit's parameter too"):
        shards.shard(model, world, "cpu", "fp32", shards.Traffic(Clock("cpu")))


def test_rows_and_wholes_are_of_the_same_memory(world: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    before = model[0].weight.detach().clone()
    rows = shards.shard(model, world, "cpu", "fp32", shards.Traffic(Clock("cpu")))
    weight = model.get_parameter("0.weight")
    assert torch.equal(parts.whole(weight), before) and parts.is_part(weight)
    with torch.no_grad():
        rows["0.weight"].add_(1.0)
    assert torch.equal(parts.whole(weight), before + 1.0)
    parts.put(weight, before)
    assert torch.equal(rows["0.weight"], before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_cards_that_share_a_model_pass_the_gate(tmp_path: Path, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command += ["executor.gate", "--device", "cuda", "--shard", "fsdp", "--opt", "adamw", "--dtype", dtype]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_cards_that_share_a_model_hold_and_move_what_was_planned(tmp_path: Path, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    sizes = {"layers": 6, "width": 1024, "heads": 16, "ffn": 4096, "kda": "chunk_torch", "warmup_steps_unmeasured": 2}
    keys = [word for key, size in sizes.items() for word in ("--set", f"{key}={size}")]
    asked = ["--model", "tiny", "--opt", "adamw", "--shard", "fsdp", "--dtype", dtype, "--batch", "4", "--seq", "256"]
    planner = [sys.executable, "-m", "planner", *asked, "--steps", "12", *keys]
    environ = environment()
    plan = tmp_path / "plan.json"
    plan.write_bytes(subprocess.run(planner, cwd=tmp_path, env=environ, capture_output=True, check=True).stdout)
    command = [sys.executable, "-m", "executor", "plan.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(plan.read_bytes())["runs"][-1]["measured"]
    for label in ("/exchange/payload", "/exchange/gathered", "/exchange/buckets", "/ranks/0/memory/masters @1"):
        assert measured[label]["value"] == measured[label]["predicted"], label
    for label in ("backward_peak", "optimizer_peak"):
        line = measured[f"/ranks/0/memory/{label} @0"]
        assert line["value"] == pytest.approx(line["predicted"], rel=0.05), label
