"""The grouped product: rows sorted by group, each group times a matrix of its own. The work of a mixture of experts.

Legend: N rows, E groups, K channels in, M channels out.

    grouped(x [N, K], w [E, K, M], ends [E] int32) -> [N, M]       y[r] = x[r] w[e] where ends[e-1] <= r < ends[e]

``ends`` are inclusive running sums of the groups' sizes and stay on the device; rows from the last end on give 0. With
dY the gradient of the output, dX is the grouped product of dY and w transposed, and dW[e] = X_e^T dY_e over the rows of
a group: 0 for an empty one. Sums run in fp32 (in float64 for float64).

All choices stand behind one operator, so that the account needs no group's size. It is opaque to autocast: the dtype of
the arguments is the dtype of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import tuned
from executor.kernels.registry import TRITON_LAUNCH, cost, lookup, register
from planner.door import KernelRow

ROWS: tuple[KernelRow, ...] = (
    {
        "name": "grouped_triton",
        "devices": ["cuda"],
        "min_sm": "8.0",
        "dtypes": ["bf16", "fp16"],
        "toolchain": ["triton"],
        "counts_as": "grouped_loop",
        "why": "one launch of our own Triton kernel; group sizes stay on the card",
        "timed": tuned.timings("grouped_triton"),
    },
    {
        "name": "grouped_torch",
        "devices": ["cuda"],
        "min_sm": "9.0",
        "dtypes": ["bf16"],
        "toolchain": [],
        "counts_as": "grouped_loop",
        "why": "torch's grouped_mm; on sm_9x and sm_10x group sizes stay on the card, on others torch reads them back",
        "timed": tuned.timings("grouped_torch"),
    },
    {
        "name": "grouped_loop",
        "devices": ["cpu", "cuda"],
        "min_sm": None,
        "dtypes": ["fp32", "bf16", "fp16"],
        "toolchain": [],
        "why": "one product a group; runs wherever torch does, and on a card waits for it to read the group sizes",
    },
)
ALIGNED = 8  # torch's grouped product needs strides in multiples of 16 bytes


def choices() -> dict[str, Callable[..., Tensor]]:
    """The counted function of every choice by name, in order of preference."""
    return {row["name"]: lookup("grouped", row["name"]) for row in ROWS}


@torch.library.custom_op("dormouse::grouped", mutates_args=())
def _product(x: Tensor, w: Tensor, ends: Tensor, choice: str, full: bool) -> Tensor:
    if choice == "grouped_triton":
        from executor.kernels import grouped_triton as triton_kernels

        return triton_kernels.product(x, w, ends)
    return _product_torch(x, w, ends, full) if choice == "grouped_torch" else _product_loop(x, w, ends)


@torch.library.custom_op("dormouse::grouped_weights", mutates_args=())
def _weights(x: Tensor, grad: Tensor, ends: Tensor, choice: str) -> Tensor:
    """x [N, K], grad [N, M] -> X_e^T dY_e of each group, [E, K, M]."""
    if choice == "grouped_triton":
        from executor.kernels import grouped_triton as triton_kernels

        return triton_kernels.weights(x, grad, ends)
    return (_weights_torch if choice == "grouped_torch" else _weights_loop)(x, grad, ends)


@_product.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, choice: str, full: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_weights.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor, choice: str) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str, bool], output: Tensor) -> None:
    *tensors, ctx.choice, ctx.full = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, ends = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    dx = _product(grad, w.mT, ends, ctx.choice, ctx.full) if wants_x else None
    dw = _weights(x, grad, ends, ctx.choice) if wants_w else None
    return dx, dw, None, None, None


_product.register_autograd(_backward, setup_context=_keep)
cost("dormouse::grouped", lambda x, w, *_, out: 2 * x.shape[0] * w.shape[1] * w.shape[2], launches=TRITON_LAUNCH)
cost(
    "dormouse::grouped_weights",
    lambda x, grad, *_, out: 2 * x.shape[0] * x.shape[1] * grad.shape[1],
    launches=TRITON_LAUNCH,
)


def _entered(choice: str) -> Callable[..., Tensor]:
    """One choice of the kernel, entered in the registry."""

    def grouped(x: Tensor, w: Tensor, ends: Tensor, full: bool = False) -> Tensor:
        """x [N, K], w [E, K, M], ends [E] int32 -> [N, M] in their dtype. Raises ValueError where these do not agree.

        ``full``: the caller vouches that the last end is N. Else grouped_torch needs a further pass over its output to
        zero the rows past the last end.
        """
        if x.ndim != 2 or w.ndim != 3 or w.shape[:2] != (ends.numel(), x.shape[1]) or x.dtype != w.dtype:
            found = ", ".join(f"{list(part.shape)} {part.dtype}" for part in (x, w, ends))
            raise ValueError(f"a grouped product takes x [N, K], w [E, K, M] of one dtype and ends [E]; found {found}")
        if ends.dtype != torch.int32 or not ends.is_contiguous():
            raise ValueError(f"the ends of groups must be contiguous int32; found {ends.dtype}")
        return _product(x, w, ends, choice, full)  # type: ignore[no-any-return]

    return register("grouped", choice)(grouped)


grouped_triton, grouped_torch, grouped_loop = (_entered(row["name"]) for row in ROWS)


def _product_loop(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[group], out=out[start:end])
        start = end
    return out


def _weights_loop(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].mT, grad[start:end], out=out[group])
        start = end
    return out


def _aligned(x: Tensor, dims: int) -> Tensor:
    """x with its last ``dims`` dimensions filled with zeros to multiples of ALIGNED; x itself where they are such."""
    pad = [amount for size in x.shape[: -dims - 1 : -1] for amount in (0, -size % ALIGNED)]
    return F.pad(x, pad) if any(pad) else x


def _product_torch(x: Tensor, w: Tensor, ends: Tensor, full: bool) -> Tensor:
    out = F.grouped_mm(_aligned(x.contiguous(), 1), _aligned(w, 2), offs=ends)
    if not full:  # torch leaves these rows as it found them
        past = torch.arange(x.shape[0], device=x.device) >= ends[-1]
        out.masked_fill_(past.unsqueeze(1), 0)
    return out[:, : w.shape[2]].contiguous()


def _weights_torch(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = F.grouped_mm(_aligned(x.contiguous(), 1).mT, _aligned(grad.contiguous(), 1), offs=ends)
    return out[:, : x.shape[1], : grad.shape[1]].contiguous()
