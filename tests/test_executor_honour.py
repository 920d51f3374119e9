"""A plan is honoured exactly or refused: what a rank finds here, judged against what was planned."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import following
import plans
from executor import build, honour, smoke
from executor.conditions import of_ranks, seen
from executor.run import Outcome, Places, execute
from executor.slices import data_slice, exchange_slice, rank_slice, work_slice
from planner.refusals.rules import Refused


def run(plan: dict[str, Any], folder: Path) -> Outcome:
    return execute(plan, Places(None, folder / "run", (plans.corpus(folder),)))


def codes(plan: dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(Refused) as caught:
        run(plan, folder)
    return [refusal.code for refusal in caught.value.refusals]


@pytest.mark.parametrize(
    ("pointer", "value", "code"),
    [
        ("/fleet/devices/cpu-0/vector_bits", 64, "device-changed"),
        ("/fleet/devices/cpu-0/name", "Another CPU", "device-changed"),
        ("/fleet/devices/cpu-0/cores", 100000, "device-changed"),
        ("/ranks/0/memory/peak", 2**52, "memory-taken"),
        ("/toolchain/torch", "1.0.0", "toolchain-changed"),
        ("/workload/data/sources/0/sha256", "0" * 64, "data-changed"),
        ("/workload/config/width", 48, "workload-changed"),
    ],
)
def test_what_changed_since_planning_is_refused(tmp_path: Path, pointer: str, value: Any, code: str) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    assert codes(plans.with_values(made, {pointer: value}), tmp_path) == [code]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("width", "wide", "the plan holds width='wide', which is no int to run with"),
        ("width", 4, "width=4: must be within 8 and 65536"),
        ("layers", 2.5, "the plan holds layers=2.5, which is no int to run with"),
        ("clip", True, "the plan holds clip=True, which is no float to run with"),
        ("ns_dtype", "auto", "the plan holds ns_dtype='auto', which is no choice to run with"),
        ("mixer", ["kda"], "the plan holds mixer=['kda'], which is no choice to run with"),
        ("ns_steps", None, "the plan's model tiny asks for the key ns_steps, which the plan does not hold"),
    ],
)
def test_a_configuration_that_no_planner_gives_builds_nothing(tmp_path: Path, key: str, value: Any, says: str) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    made = plans.with_values(made, {f"/workload/config/{key}": value})
    if value is None:
        del made["workload"]["config"][key]
    with pytest.raises(honour.BadRank) as caught:
        run(made, tmp_path)
    assert says in str(caught.value)


def test_every_reason_is_told_at_once(tmp_path: Path) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    several = {"/toolchain/torch": "1.0.0", "/workload/data/sources/0/sha256": "0" * 64}
    assert codes(plans.with_values(made, several), tmp_path) == ["toolchain-changed", "data-changed"]


def test_products_in_another_dtype_than_planned_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2, dtype="bf16")
    monkeypatch.setattr(smoke, "compute_in", lambda dtype, kind: nullcontext())
    assert codes(made, tmp_path) == ["dtype-differs"]


def test_another_kernel_than_planned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    original = build.model
    monkeypatch.setattr(build, "model", lambda work, kernels: original(work, {"kda": "recurrent_torch"}))
    assert codes(made, tmp_path) == ["kernel-differs"]


def test_a_first_step_that_is_not_finite_is_refused_and_names_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    original = build.model

    def poisoned(*parts: Any) -> Any:
        workload, model = original(*parts)
        with torch.no_grad():
            model.head.weight[0, 0] = float("nan")
        return workload, model

    monkeypatch.setattr(build, "model", poisoned)
    with pytest.raises(Refused, match="smoke-failed") as caught:
        run(made, tmp_path)
    assert "not finite: loss" in caught.value.text()


def test_a_kernel_that_raises_is_refused_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    original = build.model

    def broken(*parts: Any) -> Any:
        workload, model = original(*parts)
        model.head.weight = torch.nn.Parameter(torch.zeros(256, 8))
        return workload, model

    monkeypatch.setattr(build, "model", broken)
    monkeypatch.setattr(honour, "workload_facts", lambda *parts: made["workload"]["digest"])
    with pytest.raises(Refused) as caught:
        run(made, tmp_path)
    assert "RuntimeError: mat1 and mat2" in caught.value.text()


def test_a_model_that_is_not_here_is_a_fault_of_the_user(tmp_path: Path) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    made["workload"]["model"] = "nowhere:Model"
    with pytest.raises(honour.BadRank, match="cannot import 'nowhere'"):
        run(made, tmp_path)


def test_the_smoke_launch_leaves_no_trace(tmp_path: Path) -> None:
    made = plans.plan(plans.corpus(tmp_path), 1, steps=2)
    work, rank = work_slice(made), rank_slice(made, 0)
    _, model = build.model(work, dict(rank.kernels))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    row = smoke.launch(0, model, tokens, tokens, "fp32")
    assert (row["error"], row["nonfinite"], row["unused"]) == (None, [], [])
    assert (row["dtype"], row["kernels"]) == ("fp32", {"kda": "chunk_torch"})
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None and not parameter.grad.any()


def test_of_buffers_that_moved_those_are_told_that_a_checkpoint_keeps() -> None:
    class Following(following.Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 32, dtype=torch.int64), persistent=False)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.last.copy_(inputs)
            return super().forward(inputs, targets)

    model, tokens = Following(), torch.arange(64).view(2, 32)
    row = smoke.launch(0, model, tokens, tokens, "fp32")
    assert row["moved"].keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert not model.last.any() and model.norm.num_batches_tracked == 0


def test_slots_of_a_step_go_to_one_rank_each(tmp_path: Path) -> None:
    made = plans.plan(plans.corpus(tmp_path), 3, steps=2, batch=None, seq=None, capacity=[[4, 32], [1, 48], [2, 32]])
    parts = [data_slice(made, rank) for rank in range(3)]
    slots = [slot for part in parts for slot in range(part.offset, part.offset + part.batch)]
    assert slots == list(range(7)) and {part.global_batch for part in parts} == {7}
    assert {part.stride for part in parts} == {48}
    assert sum(part.token_weight for part in parts) == pytest.approx(1.0)
    assert [part.tokens for part in parts] == [128, 48, 64]


def test_owners_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    made = plans.plan(plans.corpus(tmp_path), 2, steps=2)
    work, rank, owners = work_slice(made), rank_slice(made, 0), exchange_slice(made).owners
    _, model = build.model(work, dict(rank.kernels))
    assert build.optimizers(model, work, rank, owners).muon is not None
    with pytest.raises(build.BadWorkload, match=f"names {len(owners) - 1} owners; the model has {len(owners)}"):
        build.optimizers(model, work, rank, owners[1:])


def test_conditions_of_a_cpu_are_unknown_with_a_reason() -> None:
    found = seen("cpu", "cpu-0")
    assert set(found) == {"clocks", "temperature", "throttling"}
    assert all(item["value"] is None and item["reason"] for item in found.values())


def test_conditions_of_a_card_are_asked_one_by_one() -> None:
    class Cards:
        NVMLError = type("NVMLError", (Exception,), {})
        NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

        def nvmlDeviceGetTemperature(self, *_: Any) -> int:
            raise self.NVMLError("Not Supported")

        def __getattr__(self, name: str) -> Any:
            return {
                "nvmlDeviceGetClockInfo": lambda *_: 1410,
                "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 4,
            }.get(name, lambda *_: None)

    found = seen("cuda", "GPU-1", Cards())
    assert found["clocks"] == {"value": "1410 MHz", "reason": None}
    assert found["temperature"] == {"value": None, "reason": "NVML: Not Supported"}
    assert found["throttling"] == {"value": "0x4", "reason": None}


def test_conditions_of_every_card_are_told_and_those_of_a_run_that_ended_early_are_not_known() -> None:
    rows = [{"clocks": {"value": f"{clock} MHz", "reason": None}} for clock in (1980, 1410)]
    found = of_ranks({0: rows[0], 1: rows[1], 2: seen("cpu", "cpu-0")})
    assert {name: item["value"] for name, item in found.items() if item["value"]} == {
        "clocks": "1980 MHz", "clocks @1": "1410 MHz",
    }  # fmt: skip
    early = of_ranks({0: {}, 1: {}})
    assert set(early) == {"clocks", "temperature", "throttling"}
    assert {item["reason"] for item in early.values()} == {"the run did not come to its middle"}
