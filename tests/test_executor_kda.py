"""Kimi Delta Attention in all its forms against a float64 recurrence written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import kda
from executor.kernels.registry import calls, lookup
from tests.devices import BOUNDS, DEVICES, relative

CASES = json.loads((Path(__file__).parent / "cases" / "kda.json").read_text())["cases"]
FORMS = (kda.by_chunks, kda.by_tokens)
NAMES = ("q", "k", "v", "g", "beta")
LAYER_NAMES = ("q", "k", "v", "decay", "beta", "rate", "bias")


def made(length: int, decay: float, heads: int = 2, keys: int = 8, values: int = 12) -> list[Tensor]:
    """q, k, v, g, beta in float64."""
    torch.manual_seed(length)
    q, k = (F.normalize(torch.randn(2, length, heads, keys, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(2, length, heads, values, dtype=torch.float64)
    g = -decay * torch.rand(2, length, heads, keys, dtype=torch.float64)
    return [q, k, v, g, torch.rand(2, length, heads, dtype=torch.float64)]


def made_layer(length: int, decay: float, heads: int, channels: int, dtype: torch.dtype) -> list[Tensor]:
    """What the layer's maps give, rounded to ``dtype``, and its two parameters, to fp32 at least; all in float64.

    A channel's decay is on average -``decay`` a token.
    """
    torch.manual_seed(length)
    wide = [torch.randn(2, length, heads, channels, dtype=torch.float64) for _ in range(4)]
    rounded = [x.to(dtype).double() for x in (*wide, torch.randn(2, length, heads, dtype=torch.float64))]
    rate = torch.full((heads,), decay, dtype=torch.float64).log() + 0.1 * torch.randn(heads, dtype=torch.float64)
    parameters = (rate, torch.randn(heads * channels, dtype=torch.float64))
    return [*rounded, *(x.to(_parameter(dtype)).double() for x in parameters)]


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
    return [out.detach(), *torch.autograd.grad((out * weight.to(out.device)).sum(), inputs)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_output_and_every_gradient_equal_the_recurrence(
    device: str, form: Any, dtype: torch.dtype, case: dict[str, Any], poisoned: None
) -> None:
    inputs = made(**case)
    exact = with_gradients(recurrence, inputs)
    found = with_gradients(form, [x.to(device, dtype) for x in inputs])
    scale = max(float(x.norm()) for x in exact[1:])
    for name, f, e in zip(("out", *NAMES), found, exact, strict=True):
        # A gradient that is nearly nothing (g at length 1, or where all is forgotten) is held to the others' size.
        error = relative(f, e) * float(e.norm()) / max(float(e.norm()), 1e-3 * scale)
        assert error < BOUNDS[dtype], f"{name}: {error}"


def by_recurrence(*inputs: Tensor) -> Tensor:
    """The layer's recurrence in float64, activations written out again."""
    q, k, v, decay, beta, rate, bias = inputs
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = -rate.exp()[:, None] * torch.log1p(torch.exp(decay + bias.view(decay.shape[-2:])))
    return recurrence(q, k, v, g, 1 / (1 + torch.exp(-beta)))


CHOSEN = [
    *(("cpu", choice, dtype) for choice in ("chunk_torch", "recurrent_torch") for dtype in BOUNDS),
    *(("cuda", "chunk_torch", dtype) for dtype in BOUNDS),
    *(("cuda", "chunk_fla", dtype) for dtype in (torch.float16, torch.bfloat16)),
]


@pytest.mark.parametrize(("length", "decay"), [(64, 0.01), (50, 1.0), (130, 0.3), (33, 30.0)])
@pytest.mark.parametrize(
    ("device", "choice", "dtype"),
    [pytest.param(*row, marks=pytest.mark.gpu) if row[0] == "cuda" else row for row in CHOSEN],
    ids=str,
)
def test_every_choice_of_the_kernel_equals_the_recurrence_of_its_layer(
    device: str, choice: str, dtype: torch.dtype, length: int, decay: float, poisoned: None
) -> None:
    inputs = made_layer(length, decay, heads=2, channels=64 if choice == "chunk_fla" else 16, dtype=dtype)
    exact, terms = with_gradients(by_recurrence, inputs), _terms(inputs)
    given = [x.to(device, dtype) for x in inputs[:5]] + [x.to(device, _parameter(dtype)) for x in inputs[5:]]
    found = with_gradients(lookup("kda", choice), given)
    assert found[0].dtype == dtype
    scale = max(float(x.norm()) for x in exact[1:6])
    for name, f, e in zip(("out", *LAYER_NAMES), found, exact, strict=True):
        # Gradients of rate and bias are sums over tokens that nearly cancel: an error is held to the sum of sizes.
        size = float(terms[name].norm()) if name in terms else max(float(e.norm()), 1e-3 * scale)
        error = relative(f, e) * float(e.norm()) / size
        assert error < BOUNDS[dtype], f"{name}: {error}"


def _parameter(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _terms(inputs: list[Tensor]) -> dict[str, Tensor]:
    """Sums over tokens (and channels) of the sizes of what the gradients of rate and bias are sums of."""
    q, k, v, decay, beta, rate, bias = inputs
    each = rate.repeat(*decay.shape[:2], 1).unsqueeze(-1).repeat(1, 1, 1, decay.shape[-1]).requires_grad_()
    moved = decay.clone().requires_grad_()
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = -each.exp() * F.softplus(moved + bias.view(decay.shape[-2:]))
    out = recurrence(q, k, v, g, beta.sigmoid())
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    of_rate, of_bias = torch.autograd.grad((out * weight).sum(), (each, moved))
    return {"rate": of_rate.abs().sum((0, 1, 3)), "bias": of_bias.abs().sum((0, 1)).flatten()}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_bound_catches_a_wrong_scale_a_lost_decay_and_a_shifted_token(form: Any) -> None:
    q, k, v, g, beta = made(length=40, decay=0.5)
    exact = recurrence(q, k, v, g, beta)
    assert relative(form(q, k, v, g, beta), exact) < BOUNDS[torch.float64]
    for faulty in ((q * 1.0001, k, v, g, beta), (q, k, v, g * 0.999, beta), (q, k, v.roll(1, 1), g, beta)):
        assert relative(form(*faulty), exact) > 1e-5


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_no_token_sees_a_later_one(form: Any) -> None:
    inputs = made(length=40, decay=0.5)
    before = form(*inputs)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, 25:] = x[:, 25:] * 0.5
    assert torch.equal(form(*changed)[:, :25], before[:, :25])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_gradients_are_those_of_finite_differences_in_float64(form: Any) -> None:
    inputs = [x[:1].requires_grad_() for x in made(length=18, decay=0.5, heads=1, keys=3, values=2)]
    assert torch.autograd.gradcheck(form, inputs)


def test_each_call_is_counted_under_its_choice_and_an_unknown_choice_is_an_error() -> None:
    inputs = made_layer(3, 0.5, 2, 8, torch.float64)
    before = calls.copy()
    kda.chunk_torch(*inputs)
    lookup("kda", "recurrent_torch")(*inputs)
    assert calls - before == {("kda", "chunk_torch"): 1, ("kda", "recurrent_torch"): 1}
    with pytest.raises(KeyError, match="no choice 'fast'; known: chunk_fla, chunk_torch, recurrent_torch"):
        lookup("kda", "fast")
