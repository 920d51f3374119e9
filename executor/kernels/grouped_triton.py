"""The grouped product in Triton: one launch for all groups, and no group's size leaves the card.

Legend: N rows, E groups, K channels in, M channels out; a tile is ROWS rows of one group.

The grid depends on N and E alone: E groups and the rows past the last end cut into tiles of b rows give at most
ceil(N / b) + E tiles. Each program finds its tile's group from the ends; those past the last tile have nothing to do.
Blocks come from a fixed set by shape, never from tuning; strides that are no multiple of 16 bytes are right, and slow.
Products accumulate in fp32, for fp32 arguments (in Triton's interpreter) without TF32. No atomics: equal arguments
give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.relaunch import relaunched

BAND = 8  # tiles that go through all columns together, so that their rows and weights stay in the cache


class Blocks(NamedTuple):
    """Block sizes over rows, the reduced dimension and columns; warps and pipeline stages."""

    rows: int
    inner: int
    columns: int
    warps: int
    stages: int


def product_blocks(rows: int, groups: int, columns: int) -> Blocks:
    """For the products by row: tiles no higher than a mean group needs, since each group's last tile is half empty."""
    mean = triton.cdiv(rows, groups)
    wide = 128 if columns > 64 else 64
    if mean <= 32:
        return Blocks(16, 64, wide, 4, 4)
    if mean <= 128:
        return Blocks(64, 64, wide, 4, 3)
    return Blocks(128, 64, wide, 8 if wide == 128 else 4, 3)


def weights_blocks(channels: int, columns: int) -> Blocks:
    """For the gradient of the weights, where a group's rows are the reduced dimension."""
    high, wide = (128 if size > 64 else 64 for size in (channels, columns))
    return Blocks(high, 64, wide, 8 if high == wide == 128 else 4, 3)


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    ends,
    N,
    K,
    M,
    x_row,
    x_column,
    w_group,
    w_row,
    w_column,
    GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    # Which tile and which columns: BAND tiles go through all columns together.
    across = tl.cdiv(M, COLUMNS)
    tiles = tl.num_programs(0) // across
    first = tl.program_id(0) // (BAND * across) * BAND
    band = min(tiles - first, BAND)
    within = tl.program_id(0) - first * across
    tile, column = first + within % band, within // band

    # Whose tile it is: group GROUPS stands for the rows past the last end.
    index = tl.arange(0, GROUPS_2)
    end = tl.load(ends + index, mask=index < GROUPS, other=N)
    begin = tl.load(ends + index - 1, mask=(index > 0) & (index <= GROUPS), other=0)
    begin = tl.where(index > GROUPS, N, begin)
    cut = tl.cdiv(end - begin, ROWS)
    until = tl.cumsum(cut, 0)
    group = tl.sum((until <= tile).to(tl.int32), 0)
    if group > GROUPS:
        return
    mine = index == group
    start = tl.sum(tl.where(mine, begin + (tile - until + cut) * ROWS, 0), 0)
    stop = tl.sum(tl.where(mine, end, 0), 0)

    rows = start + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    x_at = x + rows[:, None].to(tl.int64) * x_row + inner[None, :] * x_column
    w_at = w + group.to(tl.int64) * w_group + inner[:, None] * w_row + columns[None, :] * w_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    depth = tl.where(group < GROUPS, K, 0)
    for k in range(0, depth, INNER):
        left = tl.load(x_at, mask=(rows[:, None] < stop) & (inner[None, :] < K - k), other=0.0)
        right = tl.load(w_at, mask=(inner[:, None] < K - k) & (columns[None, :] < M), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_at += INNER * x_column
        w_at += INNER * w_row
    y_at = y + rows[:, None].to(tl.int64) * M + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=(rows[:, None] < stop) & (columns[None, :] < M))


@triton.jit  # type: ignore[untyped-decorator]
def _weights_kernel(  # type: ignore[no-untyped-def]
    x,
    grad,
    dw,
    ends,
    K,
    M,
    x_row,
    x_column,
    grad_row,
    grad_column,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(M, COLUMNS)
    group = tl.program_id(0) // (across * tl.cdiv(K, ROWS))
    place = tl.program_id(0) % (across * tl.cdiv(K, ROWS))
    channels = place // across * ROWS + tl.arange(0, ROWS)
    columns = place % across * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)

    inner = start + tl.arange(0, INNER)
    x_at = x + inner[None, :].to(tl.int64) * x_row + channels[:, None] * x_column
    grad_at = grad + inner[:, None].to(tl.int64) * grad_row + columns[None, :] * grad_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(start, stop, INNER):
        inside = tl.arange(0, INNER) < stop - row
        left = tl.load(x_at, mask=inside[None, :] & (channels[:, None] < K), other=0.0)
        right = tl.load(grad_at, mask=inside[:, None] & (columns[None, :] < M), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_at += INNER * x_row
        grad_at += INNER * grad_row
    dw_at = dw + group.to(tl.int64) * K * M + channels[:, None] * M + columns[None, :]
    tl.store(dw_at, total.to(dw.dtype.element_ty), mask=(channels[:, None] < K) & (columns[None, :] < M))


_product, _weights = relaunched(_product_kernel), relaunched(_weights_kernel)


def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x [N, K], w [E, K, M], both of any strides, ends [E] int32 -> [N, M] in the dtype of x."""
    (rows, inner), (groups, _, columns) = x.shape, w.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    blocks = product_blocks(rows, groups, columns)
    grid = ((triton.cdiv(rows, blocks.rows) + groups) * triton.cdiv(columns, blocks.columns),)
    _product[grid](
        *(x, w, out, ends, rows, inner, columns, *x.stride(), *w.stride()),
        GROUPS=groups,
        GROUPS_2=triton.next_power_of_2(groups + 1),
        BAND=BAND,
        **_options(blocks),
    )
    return out


def weights(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """x [N, K], grad [N, M], both of any strides, ends [E] int32 -> X_e^T dY_e, [E, K, M] in the dtype of x."""
    groups, channels, columns = ends.shape[0], x.shape[1], grad.shape[1]
    out = torch.empty(groups, channels, columns, dtype=x.dtype, device=x.device)
    blocks = weights_blocks(channels, columns)
    grid = (groups * triton.cdiv(channels, blocks.rows) * triton.cdiv(columns, blocks.columns),)
    _weights[grid](
        *(x, grad, out, ends, channels, columns, *x.stride(), *grad.stride()),
        **_options(blocks),
    )
    return out


def _options(blocks: Blocks) -> dict[str, Any]:
    return {
        "ROWS": blocks.rows,
        "INNER": blocks.inner,
        "COLUMNS": blocks.columns,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
