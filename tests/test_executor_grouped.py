"""The grouped product's choices against a float64 loop over groups written here.

The Triton kernels run here in Triton's interpreter, which knows fp32 and fp16 (its bf16 is wrong), in a process of
their own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.count import Tally
from executor.kernels import grouped
from executor.kernels.registry import TRITON_LAUNCH, calls
from executor.phantom import phantoms
from tests.devices import assert_near

CASES = json.loads((Path(__file__).parent / "cases" / "grouped.json").read_text())["cases"]
NAMES = ("y", "dx", "dw")
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ON_CPU = {"grouped_loop": (F64, F32, F16, BF16), "grouped_torch": (F32, F16, BF16), "grouped_triton": (F32, F16)}
ON_CUDA = {"grouped_loop": (F64, F32, F16, BF16), "grouped_torch": (BF16,), "grouped_triton": (F16, BF16)}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

RUNS = [
    *(pytest.param("cpu", c, d) for c, ds in ON_CPU.items() if c != "grouped_triton" or INTERPRETED for d in ds),
    *(pytest.param("cuda", c, d, marks=pytest.mark.gpu) for c, dtypes in ON_CUDA.items() for d in dtypes),
]
runs = pytest.mark.parametrize(("device", "choice", "dtype"), RUNS, ids=str)


def made(sizes: list[int], past: int, inner: int, columns: int) -> list[Tensor]:
    """x, w, ends, and a gradient of the output, in float64; ``past`` rows follow the last group."""
    rows = sum(sizes) + past
    x = torch.randn(rows, inner, dtype=F64)
    w = torch.randn(len(sizes), inner, columns, dtype=F64) * inner**-0.5
    return [x, w, torch.tensor(sizes).cumsum(0).int(), torch.randn(rows, columns, dtype=F64)]


def by_groups(x: Tensor, w: Tensor, ends: Tensor, grad: Tensor) -> list[Tensor]:
    """y, dX and dW of each group, one group at a time."""
    y, dx, dw = grad.new_zeros(grad.shape), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for group, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], grad[rows] @ w[group].T, x[rows].T @ grad[rows]
        start = end
    return [y, dx, dw]


def with_gradients(choice: str, x: Tensor, w: Tensor, ends: Tensor, grad: Tensor, full: bool = False) -> list[Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = grouped.choices()[choice](x, w, ends, full=full)
    return [y, *torch.autograd.grad(y, (x, w), grad)]


def rounded(inputs: list[Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Inputs in ``dtype`` on ``device``; the ends stay int32."""
    return [part.to(device, dtype if part.is_floating_point() else part.dtype) for part in inputs]


@runs
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_both_gradients_equal_the_loop(
    device: str, choice: str, dtype: torch.dtype, case: dict[str, object], poisoned: None
) -> None:
    inputs = rounded(made(**case), dtype, device)  # type: ignore[arg-type]
    wanted = by_groups(*(part.double() if part.is_floating_point() else part for part in inputs))
    found = with_gradients(choice, *inputs, full=not case["past"])
    assert all(part.dtype == dtype and part.is_contiguous() for part in found)
    assert_near(found, wanted, dtype, NAMES)


@runs
def test_rows_past_the_last_end_and_empty_groups_give_exactly_zero(
    device: str, choice: str, dtype: torch.dtype, poisoned: None
) -> None:
    x, w, ends, grad = rounded(made([0, 9, 0], 40, 24, 16), dtype, device)
    x[9:], grad[9:] = float("inf"), float("nan")  # nobody's rows: nothing may read them
    y, dx, dw = with_gradients(choice, x, w, ends, grad)
    assert not y[9:].any() and not dx[9:].any()
    assert not dw[0].any() and not dw[2].any()
    assert all(part.isfinite().all() for part in (y, dx, dw))


@runs
def test_any_strides_are_read_as_what_they_are(device: str, choice: str, dtype: torch.dtype) -> None:
    x, w, ends, grad = rounded(made([5, 30], 0, 24, 16), dtype, device)
    wanted = with_gradients(choice, x, w, ends, grad)
    turned = x.T.contiguous().T, w.mT.contiguous().mT, ends, grad.T.contiguous().T
    assert_near(with_gradients(choice, *turned), wanted, dtype, NAMES)


@pytest.mark.parametrize("choice", ["grouped_loop", "grouped_torch"])
def test_the_dtype_of_the_arguments_is_the_dtype_of_the_arithmetic_under_autocast_too(choice: str) -> None:
    inputs = rounded(made([5, 30], 0, 24, 16), F32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(choice, *inputs)
    assert_near(found, by_groups(*(part.double() if part.is_floating_point() else part for part in inputs)), F32, NAMES)


def test_the_interpreted_triton_kernels_pass_the_tests_of_this_file() -> None:
    done = subprocess.run(
        [sys.executable, *["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu-grouped_triton"], __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    expected = len(ON_CPU["grouped_triton"]) * (len(CASES) + 2)
    assert done.returncode == 0 and f"{expected} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def test_each_choice_is_counted_and_stands_in_the_order_of_the_rows() -> None:
    x, w, ends, _ = rounded(made([3, 4], 0, 8, 8), F32, "cpu")
    before = calls.copy()
    grouped.choices()["grouped_loop"](x, w, ends)
    assert calls - before == {("grouped", "grouped_loop"): 1}
    assert list(grouped.choices()) == [row["name"] for row in grouped.ROWS]


@pytest.mark.parametrize("choice", [row["name"] for row in grouped.ROWS])
def test_every_choice_costs_the_same_without_a_group_size_being_known(choice: str) -> None:
    with phantoms(), torch.device("cpu"):
        x, w = torch.zeros(35, 24, requires_grad=True), torch.zeros(2, 24, 16, requires_grad=True)
        ends = torch.zeros(2, dtype=torch.int32)
        with Tally([x, w, ends]) as tally:
            y = grouped.choices()[choice](x, w, ends)
            assert (tally.flops, tally.launches, tally.bytes) == (
                2 * 35 * 24 * 16,
                TRITON_LAUNCH,
                4 * (35 * 40 + 2 * 24 * 16 + 2),
            )
            dx, dw = torch.autograd.grad(y, (x, w), torch.zeros_like(y))
    assert tally.flops == 3 * 2 * 35 * 24 * 16
    assert (y.shape, dx.shape, dw.shape) == ((35, 16), x.shape, w.shape)


def test_the_operators_keep_torchs_rules_for_operators() -> None:
    x, w, ends, grad = rounded(made([3, 4], 1, 8, 8), F32, "cpu")
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (x.requires_grad_(), w.requires_grad_(), ends, "grouped_loop", False)
    torch.library.opcheck(grouped._product, args, test_utils=rules)
    torch.library.opcheck(grouped._weights, (x.detach(), grad, ends, "grouped_loop"), test_utils=rules)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(7, 9)}, r"a grouped product takes x \[N, K\], .* found \[7, 9\] torch.float32"),
        ({"w": torch.zeros(2, 8, 8).bfloat16()}, "of one dtype"),
        ({"ends": torch.tensor([3, 5, 7], dtype=torch.int32)}, r"ends \[E\]; found"),
        ({"ends": torch.tensor([3, 7])}, "must be contiguous int32; found torch.int64"),
    ],
)
def test_arguments_that_do_not_agree_are_an_error(change: dict[str, Tensor], words: str) -> None:
    right = {"x": torch.zeros(7, 8), "w": torch.zeros(2, 8, 8), "ends": torch.tensor([3, 7], dtype=torch.int32)}
    with pytest.raises(ValueError, match=words):
        grouped.choices()["grouped_loop"](**{**right, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["grouped_triton", "grouped_torch"])
def test_no_group_size_is_read_by_the_host(choice: str) -> None:
    inputs = rounded(made([5, 0, 300], 0, 64, 48), BF16, "cuda")
    with_gradients(choice, *inputs)  # compiled before
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(choice, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["grouped_triton", "grouped_torch"])
def test_a_captured_graph_follows_ends_that_change(choice: str) -> None:
    x, w, ends, grad = rounded(made([30, 20, 14], 0, 64, 48), BF16, "cuda")
    run = grouped.choices()[choice]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x, w, ends)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, w, ends)
    ends.copy_(torch.tensor([1, 1, 64], dtype=torch.int32))
    graph.replay()
    assert_near([y], by_groups(x.double(), w.double(), ends, grad.double())[:1], BF16, ["y"])
