"""The two torch forms of Kimi Delta Attention against a float64 recurrence written here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import kda
from executor.kernels.registry import calls, lookup

CASES = json.loads((Path(__file__).parent / "cases" / "kda.json").read_text())["cases"]
CHOICES = [row["name"] for row in kda.ROWS]
NAMES = ("q", "k", "v", "g", "beta")
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh buffers hold NaN, so that reading one before writing it shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def made(length: int, decay: float, heads: int = 2, keys: int = 8, values: int = 12) -> list[Tensor]:
    """q, k, v, g, beta in float64."""
    torch.manual_seed(length)
    q, k = (F.normalize(torch.randn(2, length, heads, keys, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(2, length, heads, values, dtype=torch.float64)
    g = -decay * torch.rand(2, length, heads, keys, dtype=torch.float64)
    return [q, k, v, g, torch.rand(2, length, heads, dtype=torch.float64)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = (I - beta k k^T) Diag(exp g) S + beta k v^T ; o_t = S^T q / sqrt(K), one sequence and head at a time."""
    out = torch.empty_like(v)
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            state = q.new_zeros(q.shape[-1], v.shape[-1])
            tokens = []
            for t in range(q.shape[1]):
                key, strength = k[b, t, h], beta[b, t, h]
                erase = torch.eye(len(key), dtype=q.dtype) - strength * torch.outer(key, key)
                state = erase @ torch.diag(g[b, t, h].exp()) @ state + strength * torch.outer(key, v[b, t, h])
                tokens.append(state.T @ q[b, t, h] / len(key) ** 0.5)
            rows.append(torch.stack(tokens))
    return torch.stack(rows).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2).reshape(out.shape)


def with_gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradient of each input under a fixed random weighting of the output."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_output_and_every_gradient_equal_the_recurrence(
    choice: str, dtype: torch.dtype, case: dict[str, Any], poisoned: None
) -> None:
    inputs = made(**case)
    exact = with_gradients(recurrence, inputs)
    found = with_gradients(lookup("kda", choice), [x.to(dtype) for x in inputs])
    scale = max(float(x.norm()) for x in exact[1:])
    for name, f, e in zip(("out", *NAMES), found, exact, strict=True):
        assert f.isfinite().all(), name
        # A gradient that is nearly nothing (g at length 1, or where all is forgotten) is held to the others' size.
        error = float((f.double() - e).norm() / max(float(e.norm()), 1e-3 * scale))
        assert error < BOUND[dtype], f"{name}: {error}"


@pytest.mark.parametrize("choice", CHOICES)
def test_the_bound_catches_a_wrong_scale_a_lost_decay_and_a_shifted_token(choice: str) -> None:
    q, k, v, g, beta = made(length=40, decay=0.5)
    exact = recurrence(q, k, v, g, beta)
    run = lookup("kda", choice)
    assert relative(run(q, k, v, g, beta), exact) < BOUND[torch.float64]
    for faulty in ((q * 1.0001, k, v, g, beta), (q, k, v, g * 0.999, beta), (q, k, v.roll(1, 1), g, beta)):
        assert relative(run(*faulty), exact) > 1e-5


@pytest.mark.parametrize("choice", CHOICES)
def test_no_token_sees_a_later_one(choice: str) -> None:
    inputs = made(length=40, decay=0.5)
    run = lookup("kda", choice)
    before = run(*inputs)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, 25:] = x[:, 25:] * 0.5
    assert torch.equal(run(*changed)[:, :25], before[:, :25])


@pytest.mark.parametrize("choice", CHOICES)
def test_sixteen_bit_inputs_give_sixteen_bit_output_computed_in_fp32(choice: str) -> None:
    inputs = [x.bfloat16() for x in made(length=20, decay=0.5)]
    out = lookup("kda", choice)(*inputs)
    assert out.dtype == torch.bfloat16
    assert relative(out, recurrence(*(x.double() for x in inputs))) < 4e-3  # one rounding to bf16


def test_each_call_is_counted_under_its_choice_and_an_unknown_choice_is_an_error() -> None:
    inputs = made(length=3, decay=0.5)
    before = calls.copy()
    kda.chunk_torch(*inputs)
    lookup("kda", "recurrent_torch")(*inputs)
    assert calls - before == {("kda", "chunk_torch"): 1, ("kda", "recurrent_torch"): 1}
    with pytest.raises(KeyError, match="no choice 'fast'; known: chunk_torch, recurrent_torch"):
        lookup("kda", "fast")
