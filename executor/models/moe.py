"""A mixture of experts: each token goes to the k of E feed-forwards (SwiGLU) that its router likes best.

Legend: B batch, T length, D width, H hidden, S = B T tokens, k choices a token, N = S k assignments, E experts, C slots
an expert, R rows: N without slots, E C with them.

The router gives each expert an affinity sigmoid(x . r_e). The k experts with the highest affinity + bias are chosen;
the bias takes part in the choice only. An expert's weight is its affinity over the sum of the chosen ones. With k = 1
it is the affinity itself: divided by itself it would be 1, and the router would never learn.

Balance without a loss of its own (arXiv 2408.15664): after a step, the bias of each expert that got less than the mean
number of assignments rises by ``balance``, and of each that got more it falls.

Dropless (``capacity`` 0), assignments are sorted by expert and a grouped product takes them as they are. With a
capacity, each expert has C = ceil(capacity N / E) slots, filled in the order of tokens; what finds no slot adds 0. So
there an output depends on which tokens are together in a batch.

Shapes depend on B, T and the configuration alone; no count of tokens leaves the device, and nothing is added up by
atomics, so equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.models.cast import compute


def _working(dtype: torch.dtype) -> torch.dtype:
    """What routing and sums run in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class Places(NamedTuple):
    """Where assignments go: a row for each, grouped by expert.

    assignment [R] int64: the assignment of a row, in the order of tokens; slot [N] int64: the row of an assignment;
    ends [E] int32: sums of the experts' assignments, those without a slot included. With a capacity, filled [R, 1] and
    kept [N, 1] bool tell the rows that have an assignment and the assignments that have a row; else all do.
    """

    assignment: Tensor
    slot: Tensor
    ends: Tensor
    filled: Tensor | None = None
    kept: Tensor | None = None


def _take(x: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
    """Rows of x [.., X] by index; 0 where not valid."""
    rows = x.index_select(0, index)
    return rows if valid is None else rows.masked_fill_(~valid, 0)


def _spread(x: Tensor, places: Places, k: int) -> Tensor:
    """x [N / k, X] -> rows [R, X]: a row gets what its assignment belongs to, so each token is copied k times."""
    return _take(x, places.assignment // k, places.filled)


def _collect(rows: Tensor, places: Places, k: int) -> Tensor:
    """Rows [R, X] -> [N / k, X] in the working dtype: sums of the rows of k assignments. The transpose of _spread."""
    taken = _take(rows, places.slot, places.kept)
    return taken.view(-1, k, rows.shape[-1]).sum(1, dtype=_working(rows.dtype))


# A sigmoid can be 0 in fp32, so the sum of all chosen can. Not smaller: its inverse times a gradient must stay finite.
LEAST_SUM = 1e-20

_Apply = Callable[[Tensor, Places, int], Tensor]


class _Spread(torch.autograd.Function):
    """_spread, whose backward is _collect: it gathers, where that of an index would add by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, k: int) -> Tensor:
        ctx.save_for_backward(*places)
        ctx.k = k
        return _spread(x, places, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _collect(grad, Places(*ctx.saved_tensors), ctx.k).to(grad.dtype), None, None


class _Collect(torch.autograd.Function):
    """_collect, whose backward is _spread."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places, k: int) -> Tensor:
        ctx.save_for_backward(*places)
        ctx.k, ctx.dtype = k, rows.dtype
        return _collect(rows, places, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _spread(grad.to(ctx.dtype), Places(*ctx.saved_tensors), ctx.k), None, None


def place(chosen: Tensor, experts: int, slots: int | None) -> Places:
    """The places of chosen experts [S, k] int64; ``slots`` is C, or None where nothing is dropped.

    Sorting is stable, so an expert's assignments stay in the order of tokens.
    """
    in_order, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(len(order), device=chosen.device)
    rank = torch.empty_like(order).scatter_(0, order, every)  # the inverse permutation
    index = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(in_order, index, right=True, out_int32=True)
    if slots is None:
        return Places(order, rank, ends)
    starts = F.pad(ends[:-1], (1, 0)).long()
    within = torch.arange(slots, device=chosen.device)
    filled = (within < (ends - starts).unsqueeze(-1)).view(-1, 1)
    row = (starts.unsqueeze(-1) + within).clamp_max(len(order) - 1).flatten()
    expert = chosen.flatten()
    nth = rank - starts[expert]
    slot = expert * slots + nth.clamp_max(slots - 1)
    return Places(order[row], slot, ends, filled, (nth < slots).unsqueeze(-1))


class MoE(nn.Module):
    """[B, T, D] -> [B, T, D] in fp32 (float64 for float64). ``grouped`` is the kernel of the plan, from the registry.

    With ``balance`` above 0 there are buffers: ``bias`` [E] fp32, and ``counts`` [E] int64, the assignments by expert
    of every training forward since the last ``balance_step``. Raises ValueError for settings that cannot be.
    """

    bias: Tensor
    counts: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        topk: int,
        capacity: float,
        balance: float,
        grouped: Callable[..., Tensor],
    ) -> None:
        super().__init__()
        if not 1 <= topk <= experts:
            raise ValueError(f"topk={topk} with experts={experts}: a token can go to 1 up to {experts} experts")
        if capacity < 0 or balance < 0:
            raise ValueError(f"capacity={capacity:g} and balance={balance:g} must not be negative; 0 turns them off")
        self.experts_count, self.topk, self.capacity, self.balance = experts, topk, capacity, balance
        self.grouped = grouped
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        for stack in (self.gate, self.up, self.down):
            stack.inputs_first = True  # type: ignore[attr-defined]  # what Muon asks of a matrix
        if balance:
            self.register_buffer("bias", torch.zeros(experts))
            self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64))

    @torch.no_grad()
    def reset(self, out_scale: float) -> None:
        """Matrices by fan-in, the output scaled down; the balance begins anew."""
        nn.init.normal_(self.router.weight, std=self.router.in_features**-0.5)
        for stack in (self.gate, self.up):
            nn.init.normal_(stack, std=stack.shape[1] ** -0.5)
        nn.init.normal_(self.down, std=out_scale * self.down.shape[1] ** -0.5)
        if self.balance:
            self.bias.zero_()
            self.counts.zero_()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        chosen, weights = self.route(tokens)
        places = place(chosen, self.experts_count, self.slots(len(tokens)))
        if self._counts_now():
            self.counts.add_(torch.diff(places.ends, prepend=places.ends.new_zeros(1)))
        spread, collect = cast(_Apply, _Spread.apply), cast(_Apply, _Collect.apply)
        rows = spread(compute(tokens), places, self.topk)
        scales = spread(weights.view(-1, 1), places, 1)
        return collect(self.experts(rows, scales, places.ends), places, self.topk).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[S, D] -> the chosen experts [S, k] int64 and their weights [S, k], both without regard to autocast."""
        with torch.autocast(tokens.device.type, enabled=False):
            affinity = F.linear(tokens.to(_working(tokens.dtype)), self.router.weight).sigmoid()
            ranked = affinity.detach() + self.bias if self.balance else affinity.detach()
            chosen = ranked.topk(self.topk, dim=-1).indices
            weights = affinity.gather(-1, chosen)
            if self.topk > 1:
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(LEAST_SUM)
            return chosen, weights

    def slots(self, tokens: int) -> int | None:
        """C for S tokens, or None where nothing is dropped. An expert gets a token once, so it needs no more than S."""
        if not self.capacity:
            return None
        return min(tokens, math.ceil(self.capacity * tokens * self.topk / self.experts_count))

    def experts(self, rows: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
        """rows [R, D] by expert, scales [R, 1] -> [R, D]: each row's SwiGLU times its scale, in the dtype of the rows.

        The scale goes in before the last product, where it is H numbers a row and not D, and where what backward
        needs of it is not the last product's output. Gate and up are two products: one over both would first copy the
        weights together, in every step.
        """
        gate, up, down = compute(self.gate), compute(self.up), compute(self.down)
        if self.capacity:
            rows = rows.view(self.experts_count, -1, rows.shape[-1])
            hidden = F.silu(torch.bmm(rows, gate)) * torch.bmm(rows, up)
            return torch.bmm((hidden * scales.view(*rows.shape[:2], 1)).to(rows.dtype), down).flatten(0, 1)
        hidden = F.silu(self.grouped(rows, gate, ends, full=True)) * self.grouped(rows, up, ends, full=True)
        return self.grouped((hidden * scales).to(rows.dtype), down, ends, full=True)

    def _counts_now(self) -> bool:
        """Whether this forward is a training step's own: not an evaluation, and not run again inside backward."""
        again = torch._C._current_graph_task_id() != -1  # what torch's own checkpoint asks
        return bool(self.balance) and self.training and torch.is_grad_enabled() and not again

    @torch.no_grad()
    def balance_step(self, counts: Tensor) -> None:
        """Move the bias by the assignments [E] int64 of all ranks together, and count anew.

        Only integers are compared, so equal counts give equal bits on every rank. Counts that are all 0 move nothing.
        """
        above = (counts.sum() - self.experts_count * counts).sign()  # of mean - count, times E
        self.bias.add_(above.to(self.bias.dtype) * self.balance)
        self.counts.zero_()


def balanced(model: nn.Module) -> list[MoE]:
    """The mixtures of a model that have a balance to keep, in the model's order."""
    return [module for module in model.modules() if isinstance(module, MoE) and module.balance]
