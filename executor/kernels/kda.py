"""Kimi Delta Attention: what each choice of the kernel computes, and its two forms in plain torch.

Legend: B batch, T length, H heads, K key channels, V value channels, N chunks, C tokens a chunk.

A choice takes what the layer's maps give: q and k before their norm, the decay and the writing strength before their
activations. With rate [H] and bias [H K], all in fp32 inside:
    q, k <- q, k / |q|, |k|        g = -exp(rate) softplus(decay + bias)        beta <- sigmoid(beta)

The recurrence (Kimi Linear, arXiv 2510.26692, eq. 1), state S [K, V], decay g <= 0 per channel, writing strength beta:
    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t / sqrt(K)

The chunked form, with G the inclusive running sum of g inside a chunk and S0 the state before it. Writing S_t as the
decayed S0 plus rank-one terms k_j u_j^T, the delta rule gives a unit lower triangular system for the rows of U:
    (I + A) U = beta V - beta (k exp G) S0        A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd), j < i
    o_i = ((q_i exp G_i)^T S0 + sum_{j<=i} P_ij u_j) / sqrt(K)         P_ij = sum_d q_id k_jd exp(G_id - G_jd)
    S'  = Diag(exp G_C) S0 + sum_j (k_j exp(G_C - G_j)) u_j^T
Every exponent is a sum of later decays, so never positive: no overflow however strong the decay. The system is solved,
not inverted by powers of A.
Eliminating U makes the chain over chunks one product each: S' = (Diag(exp G_C) - Kd^T W) S0 + Kd^T Y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import kda_fla, tuned
from executor.kernels.registry import register
from planner.door import KernelRow

CHUNK = 16
NORM_EPS = 1e-6  # beneath the square root, as in FLA

ROWS: tuple[KernelRow, ...] = (
    {
        "name": "chunk_fla",
        "devices": ["cuda"],
        "min_sm": "8.0",
        "dtypes": ["bf16", "fp16"],
        "toolchain": ["triton", "fla-core"],
        "most": {"head": 256},
        "why": "FLA's fused Triton kernels, chunks of 64; below sm_80 Triton's products use no tensor cores",
        "tuned": [index for _, index in tuned.kept()],
    },
    {
        "name": "chunk_torch",
        "devices": ["cpu", "cuda"],
        "min_sm": None,
        "dtypes": ["fp32", "bf16", "fp16"],
        "toolchain": [],
        "why": "chunks of 16 as batched products, in fp32 inside; runs wherever torch does",
    },
    {
        "name": "recurrent_torch",
        "devices": ["cpu", "cuda"],
        "min_sm": None,
        "dtypes": ["fp32", "bf16", "fp16"],
        "toolchain": [],
        "why": "the token loop, in fp32 inside; plain and slow, an alternative to check against",
    },
)


def _working(*tensors: Tensor) -> list[Tensor]:
    """All in one working dtype: at least fp32 (16-bit inputs are widened, float64 stays)."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def activated(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The recurrence's q, k, v, g and beta, all in the working dtype. Shapes as in chunk_torch."""
    q, k, v, decay, beta = _working(q, k, v, decay, beta)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    g = F.softplus(decay + bias.view(decay.shape[-2:])) * -rate.exp().unsqueeze(-1)
    return q, k, v, g, beta.sigmoid()


register("kda", "chunk_fla")(kda_fla.chunk)


@register("kda", "chunk_torch")
def chunk_torch(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """q, k, decay [B, T, H, K], v [B, T, H, V], beta [B, T, H], rate [H], bias [H K] -> o [B, T, H, V], dtype of v."""
    return by_chunks(*activated(q, k, v, decay, beta, rate, bias)).to(v.dtype)


@register("kda", "recurrent_torch")
def recurrent_torch(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """Shapes as in chunk_torch."""
    return by_tokens(*activated(q, k, v, decay, beta, rate, bias)).to(v.dtype)


def _chunks(x: Tensor, pad: int) -> Tensor:
    """[B, T, H, X] -> [B*H, N, C, X], zeros added at the end."""
    if pad:
        x = F.pad(x, (0, 0, 0, 0, 0, pad))
    batch, length, heads, width = x.shape
    return x.transpose(1, 2).reshape(batch * heads, length // CHUNK, CHUNK, width)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] in one dtype, fp32 or wider -> o [B, T, H, V].

    Any length: the last chunk is filled with tokens that neither decay (g = 0) nor write (beta = 0).
    """
    batch, length, heads, keys = q.shape
    values = v.shape[-1]
    pad = -length % CHUNK
    q, k, v, g, b = (_chunks(x, pad) for x in (q, k, v, g, beta.unsqueeze(-1)))
    number = q.shape[1]

    total = g.cumsum(-2)  # G [BH, N, C, K]
    keys_decayed = _pairwise(k, g)  # k_j exp(G_i - G_j) for j <= i, else 0: [BH, N, C(i), C(j), K]
    left = torch.stack((k * b, q * keys**-0.5), -2)  # [BH, N, C, 2, K]
    system, attend = (left @ keys_decayed.mT).unbind(-2)  # beta_i A-row and P-row, both lower triangular with diagonal
    grown = total.exp()
    known = torch.cat((v, k * grown), -1) * b  # right-hand sides beta V and beta (k exp G)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    fresh, erase = torch.split(solved, [values, keys], -1)  # Y [.., C, V], W [.., C, K]
    states = _states(keys_decayed[..., -1, :, :], total, fresh, erase)  # S0 of each chunk [BH, N, K, V]
    u = fresh - erase @ states
    out: Tensor = (q * grown * keys**-0.5) @ states + attend @ u
    out = out.reshape(batch, heads, number * CHUNK, values).transpose(1, 2)
    return out[:, :length]


def _pairwise(k: Tensor, g: Tensor) -> Tensor:
    """k_j exp(G_i - G_j) where j <= i and 0 elsewhere, as [.., C(i), C(j), K]; no positive exponent reaches exp.

    G_i - G_j is summed from j + 1 on: under strong decay the difference of two long sums would have lost its digits.
    """
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device)
    now_or_later, later = ones.triu().unsqueeze(-1), ones.triu(1).unsqueeze(-1)  # [C(i), C(j), 1]
    exponent = g.unsqueeze(-2).masked_fill(now_or_later, 0.0).cumsum(-3)
    return exponent.masked_fill(later, float("-inf")).exp() * k.unsqueeze(-3)


def _states(late: Tensor, total: Tensor, fresh: Tensor, erase: Tensor) -> Tensor:
    """The state before each chunk, [BH, N, K, V]: one product a chunk, the only sequential part.

    ``late`` is k_j exp(G_C - G_j), [.., C, K].
    """
    late = late.mT
    carry = torch.diag_embed(total[..., -1, :].exp()) - late @ erase  # [.., K, K]
    write = late @ fresh  # [.., K, V]
    state = torch.zeros_like(write[:, 0])
    states = [state]
    for step, added in list(zip(carry.unbind(1), write.unbind(1), strict=True))[:-1]:
        state = torch.baddbmm(added, step, state)
        states.append(state)
    return torch.stack(states, 1)


def by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence token by token. Shapes and dtype as in by_chunks."""
    batch, length, heads, keys = q.shape
    q, k, v, g, b = (x.transpose(1, 2) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [B, H, T, X]
    q, decay, k_in = q * keys**-0.5, g.exp().unsqueeze(-1), k * b
    state = torch.zeros(batch, heads, keys, v.shape[-1], dtype=v.dtype, device=v.device)
    outs = []
    for t in range(length):
        state = state * decay[:, :, t]
        error = v[:, :, t] - (k[:, :, t].unsqueeze(-2) @ state).squeeze(-2)  # [B, H, V]
        state = state + k_in[:, :, t].unsqueeze(-1) * error.unsqueeze(-2)
        outs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 1)
