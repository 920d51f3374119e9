"""The numeric gates of a fleet: several ranks must do what one process does, and each gate must catch its fault."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import faults
import plans
import ranks
from executor import build, loop, smoke
from executor.data import open_corpus
from executor.fingerprints import LANES, fingerprint, lanes, owner
from executor.gates import compare
from executor.slices import data_slice, work_slice
from test_executor_scaling import WHOLE, training

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes and of runs for all

STEPS = 20
EVERY = 10  # steps between comparisons of the ranks' weights, where a plan does not say
BUCKET_BYTES = 64 * 1024  # several buckets even in so small a model
LOSS_BOUND = 1e-3
ONE_STEP_BOUND = 1e-6
GRADIENT_BOUND = 2e-5
SHAPES = {"unequal": ((4, 32), (2, 32)), "lengths": ((2, 48), (3, 16))}  # (sequences, length) of each rank
MIXTURE = {"experts": 6, "topk": 2, "expert_ffn": 24, "moe_lb_coef": 0.01, "engram_rows": 60, "engram_heads": 1,
           "engram_dim": 4}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@cache
def fleet_plan(folder: Path, kind: str) -> dict[str, Any]:
    """Two ranks: "equal", 3 and 3 sequences; "unchecked", that without fingerprints; "unequal", 4 and 2, and
    "lengths", 2 of 48 and 3 of 16, both without clipping; "unlike", 3 and 3 with bf16 Newton-Schulz; "mixture", 3 and 3
    of a model with balanced experts and a table, and "mixture unchecked"."""
    data = plans.corpus(folder)
    settings: dict[str, Any] = {"unlike": {"ns_dtype": "bf16"}}.get(kind, {})
    if kind.startswith("mixture"):
        settings = dict(MIXTURE)
    if kind.endswith("unchecked"):
        settings["fingerprint_every"] = 0
    sizes: dict[str, Any] = {"batch": 3}
    if kind in SHAPES:
        sizes = {"batch": None, "seq": None, "capacity": [list(shape) for shape in SHAPES[kind]]}
        settings = {"clip": 0}
    made = plans.plan(data, 2, settings, steps=STEPS, **sizes)
    return plans.with_values(made, {"/exchange/bucket_bytes": BUCKET_BYTES})


@cache
def alone(folder: Path, kind: str) -> Any:
    """The same work in one process, with the summed batch."""
    settings = {"unequal": {"clip": 0}, "mixture": MIXTURE}.get(kind, {})
    made = plans.plan(plans.corpus(folder), 1, settings, steps=STEPS, batch=6)
    return ranks.run(made, plans.corpus(folder), folder / "alone", on=(0,))[0]


@cache
def together(folder: Path, kind: str, fault: str | None = None, on: tuple[int, int] = (0, 1)) -> Any:
    """Both ranks' results; of kind "unlike", rank 1 computes with other kernels."""
    unlike = 1 if kind == "unlike" and on == (0, 1) else None
    where = {"on": on, "fault": fault, "plain_products_on": unlike}
    return ranks.run(fleet_plan(folder, kind), plans.corpus(folder), folder / "together", **where)


def losses_gate(results: Any, one: Any) -> float:
    """The largest difference of the losses over all steps."""
    assert len(results[0]["losses"]) == STEPS, results[0]["reason"]
    worst, _ = compare.losses_apart(results[0]["losses"], one["losses"])
    assert worst <= LOSS_BOUND
    return worst


def one_step_gate(results: Any, one: Any) -> float:
    """The largest relative difference of the weights after one step."""
    worst, _ = compare.weights_apart(results[0]["weights"], one["weights"], one["gradients"])
    assert worst <= ONE_STEP_BOUND
    return worst


def identity_gate(results: Any) -> int:
    """How many steps left equal weights on both ranks, as the ranks found themselves and as seen from outside."""
    assert results[0]["outcome"] == "finished", results[0]["reason"]
    assert results[0]["entry"]["fingerprints_compared"] == STEPS // EVERY
    assert not compare.steps_apart([result["fingerprints"] for result in results])
    return len(set(results[0]["fingerprints"]))


def gradient_gate(results: Any, folder: Path, kind: str = "unequal") -> float:
    """The first reduced gradient against sum(t_r g_r) / sum(t_r), that is (4 g0 + 2 g1) / 6 of kind "unequal",
    accumulated by hand from the windows of each rank in one process."""
    expected = compare.gradient_by_hand(fleet_plan(folder, kind), [plans.corpus(folder)])
    worst = max(compare.furthest(result["gradients"], expected)[0] for result in results)
    assert worst <= GRADIENT_BOUND
    return worst


def balance_gate(results: Any, one: Any) -> int:
    """The experts' balances after each step, on both ranks bit for bit those of one process; how many there were."""
    assert len(results[0]["buffers"]) == len(one["buffers"]) == STEPS, results[0]["reason"]
    assert not any(compare.balances_apart(result["buffers"], one["buffers"]) for result in results)
    names = compare.balances(one["buffers"][0])
    return len({one["buffers"][step][name].tobytes() for step in range(STEPS) for name in names})


def test_two_ranks_have_the_losses_of_one_process(folder: Path) -> None:
    assert losses_gate(together(folder, "equal"), alone(folder, "equal")) <= LOSS_BOUND
    assert losses_gate(together(folder, "unequal"), alone(folder, "unequal")) <= LOSS_BOUND


def test_two_ranks_have_the_weights_of_one_process_after_a_step(folder: Path) -> None:
    assert one_step_gate(together(folder, "equal"), alone(folder, "equal")) <= ONE_STEP_BOUND
    assert one_step_gate(together(folder, "unequal"), alone(folder, "unequal")) <= ONE_STEP_BOUND


def test_unequal_batches_give_the_gradient_of_the_mean_over_all_tokens(folder: Path) -> None:
    assert gradient_gate(together(folder, "unequal"), folder) <= GRADIENT_BOUND


def test_unequal_lengths_give_the_gradient_of_the_mean_over_all_tokens(folder: Path) -> None:
    assert gradient_gate(together(folder, "lengths"), folder, "lengths") <= GRADIENT_BOUND


def test_both_ranks_hold_the_same_weights_after_every_step(folder: Path) -> None:
    assert identity_gate(together(folder, "equal")) == STEPS


def test_experts_their_balance_and_a_table_train_on_two_ranks_as_in_one_process(folder: Path) -> None:
    results, one = together(folder, "mixture"), alone(folder, "mixture")
    assert losses_gate(results, one) <= LOSS_BOUND
    assert one_step_gate(results, one) <= ONE_STEP_BOUND
    assert identity_gate(results) == STEPS
    assert balance_gate(results, one) > STEPS


def test_a_rank_with_other_products_holds_the_same_weights(folder: Path) -> None:
    assert identity_gate(together(folder, "unlike")) == STEPS


def test_a_rank_with_the_plainest_kernels_holds_the_same_weights(folder: Path) -> None:
    assert identity_gate(together(folder, "unlike", on=(0, 2))) == STEPS


def test_unlike_kernels_do_round_otherwise(folder: Path) -> None:
    """Else the two tests above would show nothing."""
    made = plans.plan(plans.corpus(folder), 1, {"ns_dtype": "bf16"}, steps=2, batch=3)
    same, again = (ranks.run(made, plans.corpus(folder), folder / "o", on=(0,))[0] for _ in range(2))
    products = ranks.run(made, plans.corpus(folder), folder / "o", on=(0,), plain_products_on=0)[0]
    plainest = ranks.run(made, plans.corpus(folder), folder / "o", on=(2,))[0]
    assert same["fingerprints"] == again["fingerprints"]
    assert same["fingerprints"] != products["fingerprints"]
    assert same["fingerprints"] != plainest["fingerprints"]


@pytest.mark.parametrize("case", faults.cases(), ids=lambda case: case["name"])
def test_a_gate_turns_red_with_its_fault(folder: Path, case: dict[str, Any]) -> None:
    kind = case["run"]
    results = together(folder, kind, case["name"])
    gates = {
        "losses": lambda: losses_gate(results, alone(folder, kind)),
        "one step": lambda: one_step_gate(results, alone(folder, kind)),
        "gradient": lambda: gradient_gate(results, folder),
        "identity": lambda: identity_gate(results),
        "balance": lambda: balance_gate(results, alone(folder, kind.split()[0])),
    }
    with pytest.raises(AssertionError):
        gates[case["gate"]]()


@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_a_rank_that_is_not_finite_is_answered_by_all_at_once(folder: Path, answer: str) -> None:
    made = plans.plan(plans.corpus(folder), 2, {"nonfinite": answer}, steps=6)
    results = ranks.run(made, plans.corpus(folder), folder / answer, poison=(1, 3))
    words = "rank 1: loss is not finite"
    entry = results[0]["entry"]
    if answer == "stop":
        assert [result["reason"] for result in results] == [f"{words} at step 4"] * 2
        assert (entry["outcome"], entry["steps"], entry["skipped_steps"]) == ("failed", 3, 0)
        return
    assert [result["outcome"] for result in results] == ["finished"] * 2
    assert (entry["steps"], entry["skipped_steps"]) == (6, 1)
    for result in results:
        assert result["fingerprints"][3] == result["fingerprints"][2] != result["fingerprints"][4]
    assert words in (folder / answer / "metrics.jsonl").read_text()


def test_bytes_reduced_other_than_planned_end_the_run(folder: Path) -> None:
    made = plans.with_values(fleet_plan(folder, "equal"), {"/exchange/payload": 1000})
    results = ranks.run(made, plans.corpus(folder), folder / "bytes")
    assert [result["outcome"] for result in results] == ["failed"] * 2
    assert "bytes in fp32; the plan says 1000 bytes in fp32" in results[0]["reason"]
    assert results[0]["entry"]["steps"] == 0


def test_the_fingerprint_is_of_the_weights_and_of_the_buffers_that_a_checkpoint_keeps() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    for name, changes in (("scratch", False), ("kept", True), ("weight", True)):
        first, (folded, _) = fingerprint(model), lanes(model)
        getattr(model, name).data[0] += 1
        assert (fingerprint(model) != first) == changes
        found, sizes = lanes(model)
        assert (not torch.equal(found, folded)) == changes
        if changes:
            assert owner(sizes, int((found != folded).nonzero()[0])) == name


def test_the_lanes_of_a_model_are_the_sums_of_its_numbers_bits_and_show_any_bit() -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in (3, LANES, 5 * LANES + 7)])
    (found, _), large = lanes(model), model[2].detach()
    bits = large[: 5 * LANES].numpy().view(np.int32).reshape(5, LANES).astype(np.int64)
    whole = [model[0].detach(), model[1].detach(), large[5 * LANES :]]
    wanted = [
        *(item.numpy().tobytes() for item in whole[:2]),
        bits.sum(0).tobytes(),
        whole[2].numpy().tobytes(),
    ]
    assert found.numpy().tobytes() == b"".join(wanted)
    for parameter in model:
        for place in (0, len(parameter) // 2, len(parameter) - 1):
            raw = parameter.data.view(torch.int32)
            raw[place] ^= 1  # the last bit of one number
            assert not torch.equal(lanes(model)[0], found)
            raw[place] ^= 1
    assert torch.equal(lanes(model)[0], found)


@pytest.mark.parametrize(("first", "hint"), [("1.running_mean", True), ("0.weight", False)])
def test_what_differs_between_ranks_is_named_and_a_buffer_is_told_as_one(first: str, hint: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    parts: Any = SimpleNamespace(model=model, fleet=SimpleNamespace(unlike=lambda _: ([1], first)))
    wanted = f"^rank 1: weights differ from rank 0's after step 3, first {first}"
    with pytest.raises(loop.RunFailed, match=wanted) as told:
        loop._compare(parts, 2, loop.Progress())
    assert ("BatchNorm" in str(told.value)) is hint


def test_the_smoke_launch_leaves_buffers_as_they_were(folder: Path) -> None:
    model, batch = training("cpu", model=WHOLE)[0].model, torch.zeros(2, 8, dtype=torch.int64)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    smoke.build_buckets(model, model, batch, batch, "fp32")
    assert smoke.launch(0, model, batch, batch, "fp32")["error"] is None
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model(batch, batch)
    assert not all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_one_rank_plan_is_the_plain_loop_byte_for_byte(folder: Path) -> None:
    """The loop below knows the model, the optimizers and the windows, and nothing of loop, fleet and measuring."""
    from executor.optim.adamw import AdamW
    from executor.optim.muon import Muon
    from executor.optim.routing import split
    from executor.run import Places, execute

    data, batch, seq = plans.corpus(folder), 4, 32
    made = plans.plan(data, 1, steps=STEPS, batch=batch)
    done = execute(made, Places(None, folder / "plain", (data,)))
    work = work_slice(made)
    config = work.config

    _, model = build.model(work, {"kda": "chunk_torch"})
    reader = build.reader([open_corpus(data)], data_slice(made, 0))
    routed = split(model, "muon")
    muon = Muon(routed.muon, [0] * len(routed.muon), 0)
    adamw = AdamW(routed.adamw)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model(*reader.batch(step, batch, 0, batch, seq)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step < config["warmup"]:
            factor = (step + 1) / config["warmup"]
        else:
            factor = 1.0 - 0.9 * ((step - config["warmup"]) / (STEPS - 1 - config["warmup"]))
        muon.apply(muon.updates(), 0.02 * factor)
        adamw.step(0.003 * factor)
    assert done.entry is not None
    assert done.entry["fingerprint"] == fingerprint(model)
