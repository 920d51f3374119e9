"""A step that is launched without being read, and fp16 with its loss scale: alone and in a fleet of unlike dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plans
import ranks
from devices import DEVICES, relative
from executor import build, loop
from executor.clock import Clock
from executor.data import Corpus, Reader
from executor.fingerprints import fingerprint
from executor.fleet import Alone
from executor.loop import Progress, RunFailed, Training, train
from executor.meter import Meter
from executor.models.presets import TINY
from executor.optim.adamw_8bit import AdamW8bit
from executor.optim.scaler import Scaler
from executor.optim.tables import HostTables, Tables
from executor.peaks import probe
from executor.reporter import Mute
from executor.slices import DataSlice, RankSlice, Source, WorkSlice, exchange_slice
from executor.training import starting_line
from executor.workloads import RUNTIME, configure, values
from planner.door import BadWorkload

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes and of runs for all

BATCH, SEQ = 2, 32
WHOLE = {"layers": 2, "width": 32, "heads": 2, "ffn": 64, "experts": 4, "topk": 2, "expert_ffn": 32,
         "moe_capacity": 1.25, "moe_lb_coef": 0.01, "engram_rows": 100, "engram_heads": 2, "engram_dim": 8}  # fmt: skip
DENSE = {"layers": 2, "width": 32, "heads": 2, "ffn": 64}
ALONE = {"rank": 0, "size": 1, "entry": 0, "device": "", "threads": None, "kernels": {}, "allocator": "none"}


class Told(Mute):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reasons: list[str] = []

    def say(self, text: str) -> None:
        self.reasons.append(text)

    def step(self, step: int, steps: int, loss: float, factor: float, seconds: float, tokens: int) -> None:
        self.losses.append(loss)

    def skipped(self, step: int, reason: str) -> None:
        self.reasons.append(reason)


def training(
    device: str,
    dtype: str = "fp32",
    steps: int = 3,
    model: dict[str, Any] | None = None,
    mechanisms: tuple[str, ...] = (),
    **config: Any,
) -> tuple[Training, WorkSlice, DataSlice]:
    """One rank's parts, as a run makes them, without a plan."""
    chosen = {key.name: key.default for key in (*TINY.keys, *RUNTIME)} | (model or DENSE)
    chosen |= {"ns_dtype": "fp32", "adamw": "ieee", "eval_windows": 2, **config}
    kernels = {"kda": "chunk_torch", "grouped": "grouped_loop" if device == "cpu" else "grouped_triton"}
    work = WorkSlice("tiny", "muon", steps, 1, chosen)
    torch.manual_seed(1)
    rank = RankSlice(**ALONE, kind=device, dtype=dtype, mechanisms=mechanisms, loss_scaling=dtype == "fp16")
    placed = build.settle(TINY.build(chosen, kernels), rank)
    optimizers = build.optimizers(placed, work, rank, ())
    corpus = Corpus("text", np.random.default_rng(0).integers(97, 123, 20000, dtype=np.uint8))
    source = Source("text", 1, 20000, None)
    data = DataSlice((source,), 1, SEQ, BATCH, BATCH * SEQ, 0, BATCH, SEQ)
    watch = probe(device, 1, lambda: 0)
    meter = Meter(Clock(device), watch, 0, lambda: None)
    reader = Reader([(corpus, 1)], 1, SEQ)
    fleet = Alone()
    parts = Training(placed, fleet.prepare(placed, optimizers), optimizers, fleet, reader, meter, Told(), dtype,
                     build.device_of(device))  # fmt: skip
    return parts, work, data


class Unread(TorchDispatchMode):
    """Refuses what would hold a card up: the value of a tensor on the host, or a shape made of values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in REFUSED, func
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten
REFUSED = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2, aten.is_nonzero)


@contextmanager
def unread(device: str) -> Iterator[None]:
    if device == "cpu":
        with Unread():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adamw", ["ieee", "fused"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_host_reads_nothing_of_a_step(device: str, adamw: str, dtype: str) -> None:
    """With experts, their balance, and a table. What a step does once (caches, compilation) is in the first."""
    parts, work, data = training(device, dtype, model=WHOLE, adamw=adamw)
    parts.meter.begin(0)
    before = [float(loop.launch(parts, work, data, 0, 1.0)[-3])]
    with unread(device):
        parts.meter.begin(1)
        told = loop.launch(parts, work, data, 1, 1.0)
    assert told.device.type == device and math.isfinite(float(told[-3]))
    assert float(told[-3]) != before[0]


@pytest.mark.gpu
def test_a_card_is_not_held_up_by_grouped_products_of_tokens_without_slots() -> None:
    parts, work, data = training("cuda", "bf16", model=WHOLE | {"moe_capacity": 0.0}, adamw="fused")
    parts.meter.begin(0)
    loop.launch(parts, work, data, 0, 1.0)
    with unread("cuda"):
        told = loop.launch(parts, work, data, 1, 1.0)
    assert math.isfinite(float(told[-3]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_table_in_host_memory_trains_as_on_the_device(device: str, dtype: str) -> None:
    """Clipped by the norm of all gradients, the table's included, and brought ahead of each step."""
    runs = []
    for mechanisms in ((), ("engram_ram",)):
        parts, work, data = training(device, dtype, 6, WHOLE, mechanisms, clip=0.1)
        train(parts, work, data, Progress())
        runs.append((parts, parts.reporter.losses))  # type: ignore[attr-defined]
    (on_device, losses), (on_host, others) = runs
    assert isinstance(on_device.optimizers.tables, Tables) and isinstance(on_host.optimizers.tables, HostTables)
    loss_bound, bound = (1e-5, 1e-5) if device == "cpu" else (2e-3, 1e-2)  # a card adds up gradients in any order
    assert max(abs(a - b) for a, b in zip(losses, others, strict=True)) < loss_bound
    (table,), state = on_host.optimizers.tables.tables, on_host.optimizers.tables.state_dict()
    assert relative(table.weight, on_device.optimizers.tables.parameters[0]) < bound
    assert relative(*(of["powers"] for of in (state, on_device.optimizers.tables.state_dict()))) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_8_bit_moments_train_and_count_the_steps_that_were_kept(device: str) -> None:
    parts, work, data = training(device, "fp16", 6, mechanisms=("optim_8bit",), loss_scale=2.0**18)
    progress = Progress()
    train(parts, work, data, progress)
    assert isinstance(parts.optimizers.adamw, AdamW8bit)
    assert parts.optimizers.adamw.steps == 6 - progress.skipped
    assert any(t.dtype == torch.uint8 for t in parts.optimizers.state()["adamw_state"])


def test_what_refuses_a_read_does() -> None:
    with pytest.raises(AssertionError), Unread():
        float(torch.ones(()) * 2)


def test_a_scale_is_halved_by_an_overflow_and_doubled_after_enough_steps_without() -> None:
    scaler, seen = Scaler(8.0, 3, torch.device("cpu")), []
    for overflowed in (True, False, False, True, False, False, False, False):
        scaler.update(torch.tensor(overflowed))
        seen.append(float(scaler.scale))
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4]
    other = Scaler(1.0, 3, torch.device("cpu"))
    other.load_state_dict(scaler.state_dict())
    for _ in range(2):
        scaler.update(torch.tensor(False))
        other.update(torch.tensor(False))
    assert float(other.scale) == float(scaler.scale) == 8


def test_a_scale_that_is_no_power_of_two_is_refused() -> None:
    assert values(configure(TINY, {"loss_scale": "1024"}))["loss_scale"] == 1024
    with pytest.raises(BadWorkload, match="loss_scale=1000: must be a power of two"):
        configure(TINY, {"loss_scale": "1000"})


@pytest.mark.parametrize("device", DEVICES)
def test_scaling_changes_no_bit_of_an_fp32_run(device: str) -> None:
    """A power of two, and no gradient near the ends of the range: scaled, reduced, unscaled and clipped alike."""
    plain, work, data = training(device)
    train(plain, work, data, Progress())
    scaled, work, data = training(device)
    scaled.optimizers.scaler = Scaler(1024.0, 2, scaled.device)
    progress = Progress()
    train(scaled, work, data, progress)
    assert progress.loss_scale == 2048
    for (name, p), (_, q) in zip(plain.model.named_parameters(), scaled.model.named_parameters(), strict=True):
        assert relative(q, p) < (1e-6 if device == "cpu" else 1e-4), name


@pytest.mark.parametrize("device", DEVICES)
def test_an_fp16_run_follows_the_fp32_one(device: str) -> None:
    exact, work, data = training(device, steps=8)
    train(exact, work, data, Progress())
    half, work, data = training(device, "fp16", steps=8, loss_scale=1024.0, loss_scale_growth=4)
    progress = Progress()
    train(half, work, data, progress)
    assert (progress.skipped, progress.overflows, progress.loss_scale) == (0, 0, 4096)
    worst = max(abs(a - b) for a, b in zip(exact.reporter.losses, half.reporter.losses, strict=True))  # type: ignore[attr-defined]
    assert 0 < worst < 5e-3, worst


@pytest.mark.parametrize("device", DEVICES)
def test_small_gradients_reach_the_weights_only_by_the_scale(device: str) -> None:
    layer = nn.Linear(8, 8, bias=False).to(device)
    x = torch.full((4, 8), 0.01, device=device)

    def gradient(scale: float) -> Tensor:
        layer.weight.grad = None
        with torch.autocast(device, torch.float16):
            loss = (layer(layer(x)).float() * 1e-8).sum()
        torch.autograd.backward(loss * scale)
        assert layer.weight.grad is not None
        return layer.weight.grad / scale

    exact = torch.autograd.grad((layer(layer(x)) * 1e-8).sum(), layer.weight)[0]
    assert not gradient(1.0).any()
    assert relative(gradient(65536.0), exact) < 1e-2


@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_an_overflow_changes_the_scale_alone_and_ends_no_run(answer: str) -> None:
    parts, work, data = training("cpu", "fp16", steps=12, loss_scale=2.0**21, nonfinite=answer)
    progress, seen = Progress(), []
    train(parts, work, data, progress, lambda step, loss, model: seen.append(fingerprint(model)))
    assert (progress.steps, progress.skipped) == (12, progress.overflows)
    assert 0 < progress.overflows < 12
    assert len(set(seen)) == 1 + 12 - progress.overflows
    assert progress.loss_scale == 2.0 ** (21 - progress.overflows)
    first, *reasons, last = parts.reporter.reasons  # type: ignore[attr-defined]
    assert first == f"a rank computes in fp16: losses are scaled, at first by {2.0**21:g}"
    assert last == f"the loss scale is {progress.loss_scale:g}; {progress.overflows} steps overflowed"
    assert reasons[0] == f"the gradient overflows at a loss scale of {2.0**21:g}, which is now {2.0**20:g}"
    assert len(reasons) == progress.overflows
    assert progress.final_loss is not None and math.isfinite(progress.final_loss)


class Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("inf")


def test_a_run_that_kept_no_step_says_so() -> None:
    parts, work, data = training("cpu", "fp16", steps=2, loss_scale=2.0**20, nonfinite="skip")
    model = parts.model
    parts.forward = lambda *batch: model(*batch) + Overflowing.apply(model.embedding.weight.sum())  # type: ignore[operator, union-attr]
    train(parts, work, data, Progress())
    *_, kept, _ = parts.reporter.reasons  # type: ignore[attr-defined]
    assert kept == "none of the 2 steps was kept: the model is as it was at first"


def test_a_gradient_that_overflows_at_any_scale_ends_the_run() -> None:
    parts, work, data = training("cpu", "fp16", steps=12, loss_scale=4.0, nonfinite="skip")
    model, progress = parts.model, Progress()
    before = fingerprint(model)
    parts.forward = lambda *batch: model(*batch) + Overflowing.apply(model.embedding.weight.sum())  # type: ignore[operator, union-attr]
    with pytest.raises(RunFailed, match=r"overflows fp16 even with no loss scale \(--dtype fp32 .*\) at step 3"):
        train(parts, work, data, progress)
    assert (progress.steps, progress.overflows, fingerprint(model)) == (2, 2, before)


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    parts, work, data = training("cpu", "fp16", steps=4)
    model = parts.model
    parts.forward = lambda *batch: model(*batch) * float("nan")
    with pytest.raises(RunFailed, match="rank 0: loss is not finite at step 1"):
        train(parts, work, data, Progress())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaling")


def unlike(folder: Path, dtypes: tuple[str, str], **settings: Any) -> Any:
    """Both ranks' results of a plan whose ranks were asked to compute in ``dtypes``."""
    made = unlike_plan(folder, dtypes, **settings)
    return ranks.run(made, plans.corpus(folder), folder / "-".join(dtypes))


def unlike_plan(folder: Path, dtypes: tuple[str, str], **settings: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"steps": 12, "batch": 3, "capacity": "equal", "dtype": list(dtypes)}
    return plans.plan(plans.corpus(folder), 2, settings, **asked)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    return unlike(folder, ("fp32", "fp32"))


def test_ranks_of_fp16_and_fp32_train_as_one(folder: Path, exact: Any) -> None:
    mixed = unlike(folder, ("fp16", "fp32"))
    assert [result["outcome"] for result in mixed] == ["finished"] * 2, mixed[0]["reason"]
    assert mixed[0]["fingerprints"] == mixed[1]["fingerprints"]
    assert mixed[0]["entry"]["measured"]["/ranks/0/dtype @0"]["value"] == "fp16"
    worst = float(np.abs(np.subtract(mixed[0]["losses"], exact[0]["losses"])).max())
    assert 0 < worst < 5e-3


@pytest.mark.parametrize(("rungs", "bound"), [(("bf16", "fp32"), 2e-2), (("bf16", "fp16"), 3e-2)])
def test_mixed_rungs_that_were_asked_for_are_counted_told_and_train_as_one(
    rungs: tuple[str, str], bound: float, folder: Path, exact: Any
) -> None:
    made = unlike_plan(folder, rungs, **({"loss_scale": 1024} if "fp16" in rungs else {}))
    assert made["counts"]["dtype"] == {rung: int(rung in rungs) for rung in ("bf16", "fp16", "fp32")}
    assert made["exchange"]["reduce_dtype"]["chosen"] == "fp32"  # loses neither
    assert made["exchange"]["reduce_dtype"]["outcome"] == "fallback" and made["counts"]["fallbacks"] >= 1
    mixed = ranks.run(made, plans.corpus(folder), folder / "-".join(rungs))
    assert [result["outcome"] for result in mixed] == ["finished"] * 2, mixed[0]["reason"]
    assert mixed[0]["fingerprints"] == mixed[1]["fingerprints"] and len(mixed[0]["fingerprints"]) == 12
    measured = mixed[0]["entry"]["measured"]
    ran = [measured[f"/ranks/{place}/dtype @{place}"]["value"] for place in (0, 1)]
    assert (*ran, measured["/exchange/reduce_dtype"]["value"]) == (*rungs, "fp32")
    assert 0 < float(np.abs(np.subtract(mixed[0]["losses"], exact[0]["losses"])).max()) < bound
    (name,) = {device["name"]["value"] for device in made["fleet"]["devices"].values()}
    rows = [{"device": {"name": name}}, {"device": {}}]
    told = starting_line(made, rows, exchange_slice(made).reduce_dtype)
    assert told.startswith(f"starting: rank 0 in {rungs[0]} on {name}; rank 1 in {rungs[1]} on a device that tells no")
    assert told.endswith("; gradients are reduced in fp32")


def test_an_overflow_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    results = unlike(folder, ("fp32", "fp16"), loss_scale=2.0**21)
    assert [result["outcome"] for result in results] == ["finished"] * 2, results[0]["reason"]
    assert results[0]["fingerprints"] == results[1]["fingerprints"]
    skipped = results[0]["entry"]["skipped_steps"]
    assert 0 < skipped < 12 and len(set(results[0]["fingerprints"])) <= 1 + 12 - skipped
