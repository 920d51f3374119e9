"""Kimi Delta Attention by flash-linear-attention's Triton kernels, as one opaque operator forward and one backward.

Legend: B batch, T length, H heads, K key channels, V value channels, C tokens a chunk.

The kernels are called directly, each by its own function and with FLA's backend dispatch off, so that no library picks
another at call time; each is launched again as it was at first (``executor.kernels.relaunch``). L2 norm, sigmoid and
the decay's softplus run inside them. What is kept for backward is what FLA keeps when it recomputes within a layer: the
inputs, the normalised q and k, and two [B, T, H, C] matrices of a chunk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from executor.kernels import relaunch, tuned
from executor.kernels.registry import TRITON_LAUNCH, cost

CHUNK = 64


@cache
def _fla(heads: int, channels: int) -> SimpleNamespace:
    """FLA's functions, imported at the first call: it takes seconds, and reads its settings then.

    Raises RuntimeError where fla was imported before with its backend dispatch on.
    """
    if "fla" in sys.modules and os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1":
        raise RuntimeError("fla was imported with its backend dispatch on; set FLA_DISABLE_BACKEND_DISPATCH=1 before")
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    if "fla" not in sys.modules:
        os.environ.update(tuned.settings(heads, channels))
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from fla.ops.common.gate import fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    relaunch.replace("fla")
    return SimpleNamespace(
        forward=chunk_kda_fwd, backward=chunk_kda_bwd, norm=l2norm_fwd, norm_backward=l2norm_bwd,
        sigmoid=fused_beta_sigmoid_fwd, sigmoid_backward=fused_beta_sigmoid_bwd,
    )  # fmt: skip


@torch.library.custom_op("dormouse::kda_chunk", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> (o, normalised q and k, their 1/norms, sigmoid(beta), and a chunk's two matrices). All inputs contiguous."""
    fla = _fla(q.shape[2], q.shape[3])
    (q, q_scale), (k, k_scale), strength = fla.norm(q), fla.norm(k), fla.sigmoid(beta)
    out, _, _, attend, solved, *_ = fla.forward(
        q=q, k=k, v=v, g=decay, beta=strength, scale=q.shape[-1] ** -0.5, initial_state=None, output_final_state=False,
        use_gate_in_kernel=True, A_log=rate, dt_bias=bias, chunk_size=CHUNK,
    )  # fmt: skip
    return out.type_as(v), q, k, q_scale, k_scale, strength, attend, solved


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
    chunk = q.new_empty(*q.shape[:-1], CHUNK)
    return (
        torch.empty_like(v), torch.empty_like(q), torch.empty_like(k), rows, torch.empty_like(rows),
        torch.empty_like(rows), chunk, torch.empty_like(chunk),
    )  # fmt: skip


@torch.library.custom_op("dormouse::kda_chunk_backward", mutates_args=())
def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor,
    q_scale: Tensor, k_scale: Tensor, strength: Tensor, attend: Tensor, solved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of q, k, v, decay, beta, rate and bias; ``q`` and ``k`` are the normalised ones."""
    fla = _fla(q.shape[2], q.shape[3])
    dq, dk, dv, d_strength, d_decay, _, d_rate, d_bias = fla.backward(
        q=q, k=k, v=v, beta=strength, Aqk=attend, Akk=solved, scale=q.shape[-1] ** -0.5, initial_state=None,
        do=gradient.contiguous(), dht=None, g=None, g_org=decay, use_gate_in_kernel=True, A_log=rate, dt_bias=bias,
        chunk_size=CHUNK,
    )  # fmt: skip
    return (
        fla.norm_backward(q, q_scale, dq).to(q.dtype), fla.norm_backward(k, k_scale, dk).to(k.dtype), dv.to(v.dtype),
        d_decay.to(decay.dtype), fla.sigmoid_backward(beta, d_strength).to(beta.dtype), d_rate, d_bias,
    )  # fmt: skip


@_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor,
    q_scale: Tensor, k_scale: Tensor, strength: Tensor, attend: Tensor, solved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, decay, beta, rate, bias = map(torch.empty_like, (q, k, v, decay, beta, rate, bias))
    return q, k, v, decay, beta, rate, bias


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, _, v, decay, beta, rate, bias = inputs
    _, q, k, q_scale, k_scale, strength, attend, solved = output
    ctx.set_materialize_grads(False)  # only o has a gradient: zeros for the others would be seven launches
    ctx.save_for_backward(q, k, v, decay, beta, rate, bias, q_scale, k_scale, strength, attend, solved)


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.dormouse.kda_chunk_backward(gradient, *ctx.saved_tensors)
    return found


_forward.register_autograd(_gradients, setup_context=_keep)


class _Sizes:
    """Elements of what the kernels make of their arguments."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        batch, length, heads, keys = q.shape
        self.rows, self.keys, self.values = batch * length * heads, q.numel(), v.numel()
        self.chunk = self.rows * CHUNK
        self.states = batch * -(-length // CHUNK) * heads * keys * v.shape[-1]


def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, out: Any) -> int:
    """Products of a chunk: q k^T, k k^T and W by the keys, U and P V by the values; the state read, erased and written.

    (Yang et al., arXiv 2406.06484, section 3.3.) The small triangular solve is left out.
    """
    size = _Sizes(q, v)
    return 2 * (CHUNK * (3 * size.keys + 2 * size.values) + 3 * CHUNK * size.states)


def _flops_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, out: Any) -> int:
    """W, U and the states once more, then two products for each of the forward's."""
    size = _Sizes(q, v)
    return 2 * _flops(q, k, v, out=out) + 2 * (CHUNK * (size.keys + size.values) + 2 * CHUNK * size.states)


def _temporary(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, out: Any) -> int:
    """Running decays in fp32; W, U, decayed keys, states and new values in the dtype of q."""
    size = _Sizes(q, v)
    return 4 * size.keys + 2 * (2 * size.keys + 2 * size.values + size.states)


def _temporary_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, out: Sequence[Tensor]) -> int:
    """At its most, beside the gradients that it gives: running decays in fp32; W, U, decayed q and k, states and their
    gradient, new values; and in fp32 the gradients of q, k and decay twice, of both matrices, and of beta, once for
    every 32 channels besides."""
    size = _Sizes(q, v)
    alive = 4 * size.keys + 2 * (3 * size.keys + 3 * size.values + 2 * size.states)
    alive += 24 * size.keys + 8 * size.chunk + (8 + 4 * -(-q.shape[-1] // 32)) * size.rows
    return alive - sum(item.numel() * item.element_size() for item in out)


# Kernels as a profile of FLA 0.6.0 on an H200 shows them.
cost("dormouse::kda_chunk", _flops, 11 * TRITON_LAUNCH, _temporary)
cost("dormouse::kda_chunk_backward", _flops_backward, 16 * TRITON_LAUNCH, _temporary_backward)


def chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """q, k, decay [B, T, H, K], v [B, T, H, V] in one 16-bit dtype, beta [B, T, H], rate [H] and bias [H K] fp32
    -> o [B, T, H, V]. See ``executor.kernels.kda`` for what it computes."""
    contiguous = (item.contiguous() for item in (q, k, v, decay, beta))
    out: Tensor = torch.ops.dormouse.kda_chunk(*contiguous, rate, bias)[0]
    return out
