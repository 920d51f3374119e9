"""What all optimizers keep: a step that is dropped changes nothing, whatever its gradients hold; and the variants of
AdamW against those of torch and bitsandbytes. AdamW's own arithmetic is in test_executor_adamw.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from devices import BOUNDS, DEVICES, relative
from executor.mechanisms import optim_8bit
from executor.optim.adamw_8bit import AdamW8bit, moment_bytes
from executor.optim.adamw_fused import FusedAdamW
from executor.optim.muon import Muon
from executor.optim.routing import Routed, split
from executor.optim.tables import Tables
from executor.optim.variants import ADAMW

SHAPES = ((96, 80), (300,), (4, 48, 32), (3, 5), (70000,))
Named = list[tuple[str, nn.Parameter]]
Step = Callable[[float, Tensor | None], None]


def parameters(device: str, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Named:
    generator = torch.Generator().manual_seed(1)
    return [(f"p{i}", nn.Parameter(torch.randn(s, generator=generator).to(device))) for i, s in enumerate(shapes)]


def set_gradients(named: Named, step: int, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        if value is not None:
            p.grad.view(-1)[::3] = value


def keep(device: str, value: bool) -> Tensor:
    return torch.tensor(value, device=device)


def optimizer_of(kind: str, device: str) -> tuple[Named, Step, Callable[[], dict[str, Any]]]:
    """Parameters, one whole step of ``kind`` on them, and its state."""
    if kind == "tables":
        named = parameters(device, ((50, 8), (20, 4)))
        tables = Tables(named)
        return named, tables.step, tables.state_dict
    if kind.startswith("muon"):
        named = parameters(device, ((24, 16), (24, 16), (16, 24), (3, 24, 16)))
        state = torch.bfloat16 if kind.endswith("bf16") else torch.float32
        muon = Muon(named, [0] * len(named), 0, weight_decay=0.1, state_dtype=state)
        return named, lambda lr, kept: muon.apply(muon.updates(kept), lr, kept), muon.state_dict
    named = parameters(device)
    adamw = ADAMW[kind](named, weight_decay=0.1)

    def step(lr: float, kept: Tensor | None) -> None:
        adamw.step(lr, kept)
        if isinstance(adamw, AdamW8bit):
            adamw.settle(kept is None or bool(kept))

    return named, step, adamw.state_dict


def bits(items: Any) -> list[bytes]:
    """The bytes of every tensor of a state, and its numbers."""
    if isinstance(items, Tensor):
        return [items.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()]
    if isinstance(items, dict | list | tuple):
        parts = items.values() if isinstance(items, dict) else items
        return [part for item in parts for part in bits(item)]
    return [repr(items).encode()]


KINDS = ["ieee", "fused", "8bit", "muon", "muon-bf16", "tables"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_step_changes_no_weight_no_moment_and_no_counter(kind: str, value: float | None, device: str) -> None:
    named, step, state = optimizer_of(kind, device)
    for before_any in (True, False):  # the first step divides by what is 0 before it
        before = copy.deepcopy((bits([p for _, p in named]), bits(state())))
        set_gradients(named, 7, value)
        step(0.01, keep(device, False))
        assert (bits([p for _, p in named]), bits(state())) == before
        if before_any:
            set_gradients(named, 0)
            step(0.01, keep(device, True))
            assert bits([p for _, p in named]) != before[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_round_a_dropped_one_are_those_of_a_run_without_it(kind: str, device: str) -> None:
    (a, one, _), (b, other, _) = optimizer_of(kind, device), optimizer_of(kind, device)
    for i in range(4):
        if i == 2:
            set_gradients(b, 50, float("nan"))
            other(0.01, keep(device, False))
        for named, step, kept in ((a, one, None), (b, other, keep(device, True))):
            set_gradients(named, i)
            step(0.01, kept)
    assert bits([p for _, p in a]) == bits([p for _, p in b])


def torchs(named: Named, **options: Any) -> torch.optim.AdamW:
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["ieee", "fused"])
def test_adamw_equals_torchs_own(kind: str, device: str) -> None:
    named, reference = parameters(device), parameters(device)
    own, theirs = ADAMW[kind](named, weight_decay=0.1), torchs(reference)
    for i in range(10):
        for each in (named, reference):
            set_gradients(each, i)
        own.step(0.01)
        theirs.step()
    for (_, p), (_, r), (_, start) in zip(named, reference, parameters(device), strict=True):
        assert relative(p - start, r - start) < BOUNDS[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_the_fused_variant_has_the_bits_of_torchs_fused_optimizer(device: str) -> None:
    named, reference = parameters(device), parameters(device)
    own, theirs = FusedAdamW(named, weight_decay=0.1), torchs(reference, fused=True)
    for i in range(3):
        for each in (named, reference):
            set_gradients(each, i)
        own.step(0.01, keep(device, True))
        theirs.step()
    assert bits([p for _, p in named]) == bits([p for _, p in reference])


@pytest.mark.parametrize("device", DEVICES)
def test_the_8_bit_variant_is_that_of_bitsandbytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.optim import AdamW8bit as Theirs

    for name in ("CHUNK_BYTES", "CPU_CHUNK_BYTES"):  # slices of 1024 elements: blocks of 256
        monkeypatch.setattr(f"executor.optim.adamw_8bit.{name}", 4 * 1024)
    named, reference = parameters(device), parameters(device)
    own, theirs = AdamW8bit(named), Theirs([p for _, p in reference], lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for i in range(6):
        for each in (named, reference):
            set_gradients(each, i)
        own.step(0.01, keep(device, True))
        own.settle(True)
        theirs.step()
    for (name, p), (_, r), (_, start) in zip(named, reference, parameters(device), strict=True):
        if name in ("p0", "p2"):  # large, and decayed in both
            assert torch.equal(p, r)
            assert theirs.state[r]["state1"].dtype == torch.uint8
        elif p.ndim > 1:  # small: on a card theirs decays after the update, which differs by lr wd of it
            assert relative(p - start, r - start) < 5e-4


@pytest.mark.parametrize("device", DEVICES)
def test_8_bit_moments_take_the_bytes_told_and_err_as_told(device: str) -> None:
    shapes = ((256, 128), (3, 64, 48), (100,))
    exact, rounded = parameters(device, shapes), parameters(device, shapes)
    a, b = ADAMW["ieee"](exact), AdamW8bit(rounded)
    generator = torch.Generator().manual_seed(3)
    constant = [torch.randn(p.shape, generator=generator) for _, p in exact]
    for _ in range(50):
        for (_, p), (_, q), mean in zip(exact, rounded, constant, strict=True):
            p.grad = (mean + 2 * torch.randn(p.shape, generator=generator)).to(device)
            q.grad = p.grad.clone()
        a.step(0.003)
        b.step(0.003)
        b.settle(True)
    errors = [
        relative(q - start, p - start)
        for (_, p), (_, q), (_, start) in zip(exact, rounded, parameters(device, shapes), strict=True)
    ]
    assert optim_8bit.ERROR / 1.3 < max(errors) < optim_8bit.ERROR * 1.3, errors
    told = sum(moment_bytes(p) for _, p in exact)
    assert b.state_bytes() == {"adamw_state": told} == {"adamw_state": optim_8bit.state_bytes(Routed([], exact, []))}
    assert told < 0.26 * a.state_bytes()["adamw_state"]


@pytest.mark.parametrize("kind", ["ieee", "fused", "8bit"])
def test_a_saved_state_goes_on_exactly(kind: str) -> None:
    straight, first = parameters("cpu"), parameters("cpu")
    a, b = ADAMW[kind](straight), ADAMW[kind](first)
    c = ADAMW[kind](first)
    for i in range(4):
        if i == 2:
            c.load_state_dict(b.state_dict())
        for named, optimizer in ((straight, a), (first, b if i < 2 else c)):
            set_gradients(named, i)
            optimizer.step(0.01)
            if isinstance(optimizer, AdamW8bit):
                optimizer.settle(True)
    assert bits([p for _, p in straight]) == bits([p for _, p in first])


@pytest.mark.parametrize("kind", ["ieee", "fused", "8bit"])
def test_a_missing_gradient_is_named_before_anything_moves(kind: str) -> None:
    named = parameters("cpu")
    set_gradients(named, 0)
    named[0][1].grad = None
    before = bits([p for _, p in named])
    with pytest.raises(RuntimeError, match="no gradient for p0"):
        ADAMW[kind](named).step(0.01)
    assert bits([p for _, p in named]) == before


@pytest.mark.parametrize("kind", ["ieee", "fused", "8bit"])
def test_a_route_without_parameters_steps(kind: str) -> None:
    optimizer = ADAMW[kind]([])
    optimizer.step(0.01, torch.tensor(True))
    assert optimizer.state_bytes() == {"adamw_state": 0}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.table = nn.Parameter(torch.zeros(10, 4))
        self.table.lazy_rows = True  # type: ignore[attr-defined]
        self.head = nn.Linear(8, 4)


@pytest.mark.parametrize(("opt", "muon"), [("muon", ["blocks.0.weight"]), ("adamw", [])])
def test_a_table_has_its_own_route_under_every_optimizer(opt: str, muon: list[str]) -> None:
    routed = split(Model(), opt)
    assert [name for name, _ in routed.tables] == ["table"]
    assert [name for name, _ in routed.muon] == muon
    assert {name for name, _ in routed.adamw} | set(muon) == {
        "blocks.0.weight", "blocks.0.bias", "head.weight", "head.bias"
    }  # fmt: skip


def test_an_optimizer_that_no_one_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="known: muon, adamw"):
        split(Model(), "sgd")


def test_a_cpu_step_in_8_bits_takes_no_more_memory_than_what_is_counted_for_it() -> None:
    parameter = torch.nn.Parameter(torch.randn(1024, 1024, device="cpu"))
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW8bit([("large", parameter)])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        optimizer.step(1e-3, torch.ones((), dtype=torch.bool))
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    alive = list(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert max(alive) < 6 * parameter.numel()  # a copy of the parameter and of its codes, before the step
