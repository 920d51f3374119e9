"""Kernels launched again: by the compiled kernel that Triton itself chose for such arguments, with these arguments."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from executor.kernels import grouped_triton, relaunch
from executor.kernels.relaunch import Relaunched


@triton.jit
def _jitted(x, y, n, scale, HAS_Y: tl.constexpr, BLOCK: tl.constexpr, FLAG: tl.constexpr = 7):  # type: ignore
    pass


class Compiled:
    """What stands for a compiled kernel: it notes how it is launched."""

    packed_metadata = b""

    def __init__(self, launched: list[Any]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launched.append((grid, args))


class Asked:
    """Triton in place of a card: each launch that it is asked for by name, and each direct one of what it compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_name: list[dict[str, Any]] = []
        self.direct: list[Any] = []

        def run(jitted: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
            self.by_name.append({**dict(zip(jitted.arg_names, args, strict=False)), **kwargs})
            return Compiled(self.direct)

        monkeypatch.setattr(JITFunction, "run", run)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def tuned(*configs: triton.Config) -> Any:
    """The kernel with autotuning within heuristics, as FLA's are."""
    tuner = triton.autotune(configs=list(configs), key=["n"])(_jitted)
    return triton.heuristics({"HAS_Y": lambda args: args["y"] is not None})(tuner)


def grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]), 2 if meta["HAS_Y"] else 1)


def test_what_was_launched_once_is_launched_again_with_all_that_tuning_and_heuristics_gave(asked: Asked) -> None:
    kernel = Relaunched(tuned(triton.Config({"BLOCK": 64}, num_warps=2)))
    first, second = torch.zeros(8), torch.ones(8)
    kernel[grid](first, None, n=100, scale=0.5)
    kernel[grid](second, None, n=100, scale=0.5)
    assert len(asked.by_name) == 1
    assert asked.by_name[0]["x"] is first and asked.by_name[0]["num_warps"] == 2
    ((size, args),) = asked.direct
    assert size == (2, 1, 1)
    assert args[0] is second and args[1:] == (None, 100, 0.5, False, 64, 7)


def test_options_of_launching_are_no_arguments(asked: Asked) -> None:
    kernel = Relaunched(_jitted)
    for _ in range(2):
        kernel[(3,)](torch.zeros(8), None, 5, 1.0, HAS_Y=False, BLOCK=16, num_warps=4)
    ((size, args),) = asked.direct
    assert size == (3, 1, 1) and args[1:] == (None, 5, 1.0, False, 16, 7)
    kernel[(3,)](torch.zeros(8), None, 5, 1.0, HAS_Y=False, BLOCK=16, num_warps=8)
    assert len(asked.by_name) == 2  # another kernel


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(9)[1:]},  # 4 bytes off
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"y": torch.zeros(8)},
        {"n": 32},
        {"n": True},  # equal to 1, and of another type
        {"scale": 1},
        {"BLOCK": 32},
    ],
)
def test_triton_is_asked_anew_where_it_might_choose_another_kernel(asked: Asked, other: dict[str, Any]) -> None:
    kernel = Relaunched(_jitted)
    usual = {"x": torch.zeros(8), "y": None, "n": 1, "scale": 1.0, "HAS_Y": False, "BLOCK": 16}
    kernel[(1,)](**usual)
    kernel[(1,)](**{**usual, **other})
    assert len(asked.by_name) == 2 and not asked.direct
    kernel[(1,)](**usual)
    kernel[(1,)](**{**usual, **other})
    assert len(asked.by_name) == 2 and len(asked.direct) == 2


def test_a_launch_that_has_something_done_before_it_is_tritons_each_time(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    kernel = Relaunched(tuned(triton.Config({"BLOCK": 64}, pre_hook=done.append)))
    monkeypatch.setattr(_jitted, "pre_run_hooks", [])
    for _ in range(3):
        kernel[grid](torch.zeros(8), None, n=100, scale=0.5)
    assert len(asked.by_name) == len(done) == 3 and not asked.direct
    monkeypatch.setattr(_jitted, "pre_run_hooks", [print])
    hooked = Relaunched(_jitted)
    for _ in range(2):
        hooked[(1,)](torch.zeros(8), None, 5, 1.0, HAS_Y=False, BLOCK=16)
    assert len(asked.by_name) == 5 and not asked.direct


def test_no_tensor_is_kept_alive_and_no_more_than_so_many_sets_are_remembered(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch, "MOST", 2)
    kernel, gone = Relaunched(_jitted), []
    for n in (1, 2, 3, 3):
        x = torch.zeros(8)
        gone.append(weakref.ref(x))
        kernel[(1,)](x, None, n, 1.0, HAS_Y=False, BLOCK=16)
    asked.by_name.clear()
    del x
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    kernel[(1,)](torch.zeros(8), None, 3, 1.0, HAS_Y=False, BLOCK=16)
    kernel[(1,)](torch.zeros(8), None, 2, 1.0, HAS_Y=False, BLOCK=16)
    assert len(asked.by_name) == 1 and len(asked.direct) == 1


def test_all_else_is_asked_of_the_kernel_itself() -> None:
    kernel = tuned(triton.Config({"BLOCK": 64}))
    assert Relaunched(kernel).fn is kernel.fn and Relaunched(kernel).arg_names == kernel.arg_names
    with pytest.raises(AttributeError):
        _ = Relaunched(kernel).nothing_of_the_kind


def test_a_first_launch_that_fails_leaves_the_kernel_as_it_was(asked: Asked) -> None:
    def fails(_: Any) -> Any:
        raise ValueError("no such grid")

    kernel = Relaunched(tuned(triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})))
    with pytest.raises((ValueError, RuntimeError)):  # tuning looks for a card
        kernel[fails](torch.zeros(8), None, n=100, scale=0.5)
    assert "run" not in vars(_jitted)


def test_tuned_kernels_of_a_package_are_replaced_wherever_they_are_named_and_jitted_ones_stay() -> None:
    one, other = ModuleType("some_kernels"), ModuleType("some_kernels.inner")
    kernel = tuned(triton.Config({"BLOCK": 64}))
    one.kernel, other.kernel, other.jitted = kernel, kernel, _jitted  # type: ignore[attr-defined]
    sys.modules.update({"some_kernels": one, "some_kernels.inner": other})
    try:
        assert relaunch.replace("some_kernels") == 1
        assert isinstance(one.kernel, Relaunched) and one.kernel is other.kernel  # type: ignore[attr-defined]
        assert other.jitted is _jitted  # type: ignore[attr-defined]
        assert relaunch.replace("some_kernels") == 0
    finally:
        del sys.modules["some_kernels"], sys.modules["some_kernels.inner"]


def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every launch is Triton's."""
    monkeypatch.setattr(Relaunched, "__getitem__", Relaunched.by_name)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
def test_a_product_launched_again_has_the_bits_of_one_that_triton_launched(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    made = torch.Generator("cuda").manual_seed(0)
    ends = torch.tensor([40, 40, 100], dtype=torch.int32, device="cuda")

    def drawn(*size: int) -> Tensor:
        flat = torch.randn(torch.Size(size).numel() + offset, device="cuda", generator=made).bfloat16()
        return flat[offset:].view(size)

    sets = [(drawn(100, 64), drawn(3, 64, 96)) for _ in range(3)]
    found = [grouped_triton.product(x, w, ends) for x, w in sets]
    by_name(monkeypatch)
    for (x, w), ours in zip(sets, found, strict=True):
        assert torch.equal(ours, grouped_triton.product(x, w, ends))


@pytest.mark.gpu
def test_kimi_delta_attention_launched_again_has_the_bits_of_one_that_triton_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from executor.kernels.kda_fla import chunk

    made = torch.Generator("cuda").manual_seed(0)
    wide = (2, 200, 12, 64)

    def ran(arguments: list[Tensor]) -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in arguments]
        out = chunk(*leaves)
        torch.autograd.backward(out.float().square().mean())
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device="cuda", generator=made).to(dtype)

    sets = [
        [*(drawn(*wide) for _ in range(4)), drawn(*wide[:3]), *(drawn(n, dtype=torch.float32) for n in (12, 768))]
        for _ in range(3)
    ]
    found = [ran(arguments) for arguments in sets]
    by_name(monkeypatch)
    for arguments, ours in zip(sets, found, strict=True):
        theirs = ran(arguments)
        assert len(ours) == len(theirs) == 8
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
