"""Lazy Adam for tables of which a step touches few rows: only those rows and their moments move.

The mathematics are those of torch.optim.SparseAdam; a row is touched where any of its gradient is not 0. With its
gradient x and the global step t,
    m = m + (1-b1) (x - m)    v = v + (1-b2) (x^2 - v)    p = p - lr sqrt(1-b2^t) / (1-b1^t) m / (sqrt(v) + eps)
Without weight decay, since a row's decay would then tell how often it is met.

One rule serves both places a table can lie in: ``Tables`` on the device, from a dense gradient, and ``HostTables`` in
host memory, from the gradient of the rows that were looked up. As in ``executor.optim.adamw``, every operation is one
that IEEE rounds alike everywhere, so that ranks on unlike hardware, and the two places, stay identical.

Legend: R rows of a table, E channels a row, n rows at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from executor.models.host_table import HostTable
from executor.optim.steps import dropped, gradients_of
from planner.door import CHUNK_BYTES

HOST_CHUNK_BYTES = 2**18  # what a core's cache holds with its temporaries


class Rule:
    """Scalars of the rule, on ``device``, and the rule itself."""

    def __init__(self, betas: tuple[float, float], eps: float, device: torch.device) -> None:
        self.betas, self.eps = betas, eps
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)
        self.powers = torch.ones_like(self._betas)
        """b1^t and b2^t, of the steps that were kept."""

    def begin(self, lr: float, keep: Tensor | None) -> Tensor:
        """Count the step where ``keep`` is not False; gives its bias-corrected rate, float64 without dimensions."""
        ahead = self.powers * self._betas
        self.powers.mul_(self._betas.masked_fill(dropped(keep, self.powers), 1.0))
        rate: Tensor = torch.sqrt(1.0 - ahead[1]) * lr / (1.0 - ahead[0])
        return rate

    def advance(
        self, weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, touched: Tensor, rate: Tensor
    ) -> None:
        """Advance the ``touched`` [n, 1] of rows [n, E] in place; whatever the gradient of others holds, they stay."""
        moved = touched.to(weight.dtype)
        gradient = gradient.masked_fill(~touched, 0.0)
        first.add_((gradient - first).mul_(moved * (1.0 - self.betas[0])))
        second.add_((gradient * gradient).sub_(second).mul_(moved * (1.0 - self.betas[1])))
        weight.sub_((first / second.sqrt().add_(self.eps)).mul_(moved * rate.to(weight.dtype)))


def _touched(gradient: Tensor, keep: Tensor | None) -> Tensor:
    """[n, 1] bool: which rows of a gradient [n, E] move. The largest magnitude is exact, where a sum could vanish."""
    touched: Tensor = torch.linalg.vector_norm(gradient, float("inf"), dim=-1, keepdim=True) != 0
    return touched if keep is None else touched & keep


def _run(table: Tensor, nbytes: int) -> int:
    """How many rows of ``table`` make ``nbytes``."""
    return max(1, nbytes // (table.shape[-1] * table.element_size()))


class Tables:
    """Lazy Adam over named tables [R, E] on one device; dense gradients are read from ``.grad``."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.rule = Rule(betas, eps, self.parameters[0].device if named else torch.device("cpu"))

    @torch.no_grad()
    def step(self, lr: float, keep: Tensor | None = None) -> None:
        """One update, without effect where ``keep`` (bool without dimensions, on the device) is False.

        Raises RuntimeError where a table has no gradient (naming it), before anything changes.
        """
        gradients = gradients_of(self.names, self.parameters, "table")
        rate = self.rule.begin(lr, keep)
        for p, first, second, gradient in zip(self.parameters, self.first, self.second, gradients, strict=True):
            parts = (torch.split(whole, _run(p, CHUNK_BYTES)) for whole in (p, first, second, gradient))
            for weight, m, v, x in zip(*parts, strict=True):
                self.rule.advance(weight, m, v, x, _touched(x, keep), rate)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the storages that hold the state."""
        return {"tables_state": sum(t.untyped_storage().nbytes() for t in self.first + self.second)}

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly, wherever its tables lie."""
        return _state(self.names, self.rule, self.first, self.second)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises KeyError where a table's is missing."""
        _load(state, self.names, self.rule, self.first, self.second)


class HostTables:
    """Lazy Adam over named tables that lie in host memory: moments beside them, updates by each table's own worker.

    Nothing here waits for the device. A step hands each worker the gradient of the rows that were looked up; what
    reads the table next (``HostTable.take``) waits for the worker.
    """

    def __init__(
        self, named: Sequence[tuple[str, HostTable]], betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        self.names = [name for name, _ in named]
        self.tables = [table for _, table in named]
        self.first = [torch.zeros_like(table.weight) for table in self.tables]
        self.second = [torch.zeros_like(table.weight) for table in self.tables]
        self.rules = [Rule(betas, eps, torch.device("cpu")) for _ in named]  # each counted by its table's worker

    def leaves(self) -> list[Tensor]:
        """The rows that this step looked up, on the device: their ``.grad`` is clipped and unscaled like any other."""
        return [table.leaf() for table in self.tables]

    def prefetch(self, inputs: Tensor) -> None:
        """Begin to bring the rows of the next forward; ``inputs`` [B, T] is the very tensor it will be called with."""
        for table in self.tables:
            table.prefetch(inputs)

    def step(self, lr: float, keep: Tensor | None = None) -> None:
        """One update of each table, without effect where ``keep`` (bool without dimensions, on the device) is False.

        Raises RuntimeError where a table's rows have no gradient (naming it), before anything changes.
        """
        missing = [name for name, table in zip(self.names, self.tables, strict=True) if table.leaf().grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {', '.join(missing)}: every table must take part in every step")
        for i, table in enumerate(self.tables):
            table.give(partial(self._update, i, lr), keep)

    @torch.no_grad()
    def _update(self, i: int, lr: float, rows: Tensor, gradient: Tensor, keep: Tensor | None) -> None:
        """Of table i, the distinct ``rows`` [n] by their ``gradient`` [n, E]: on the table's worker."""
        rate = self.rules[i].begin(lr, keep)
        run = _run(gradient, HOST_CHUNK_BYTES)
        state = (self.tables[i].weight, self.first[i], self.second[i])
        for at, x in zip(torch.split(rows, run), torch.split(gradient, run), strict=True):
            weight, m, v = (whole.index_select(0, at) for whole in state)
            self.rules[i].advance(weight, m, v, x, _touched(x, keep), rate)
            for whole, new in zip(state, (weight, m, v), strict=True):
                whole.index_copy_(0, at, new)

    def state_bytes(self) -> dict[str, int]:
        """Bytes on the device (none) and in host memory: the tables themselves and their moments."""
        held = [table.weight for table in self.tables] + self.first + self.second
        return {"tables_state": 0, "tables_host": sum(t.untyped_storage().nbytes() for t in held)}

    def state_dict(self) -> dict[str, Any]:
        """What ``Tables.state_dict`` gives, once every update is done."""
        for table in self.tables:
            table.settle()
        return _state(self.names, self.rules[0], self.first, self.second)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises KeyError where a table's is missing."""
        for rule in self.rules:
            _load(state, self.names, rule, self.first, self.second)


def _state(names: Sequence[str], rule: Rule, first: Sequence[Tensor], second: Sequence[Tensor]) -> dict[str, Any]:
    return {"powers": rule.powers, "first": dict(zip(names, first, strict=True)),
            "second": dict(zip(names, second, strict=True))}  # fmt: skip


@torch.no_grad()
def _load(
    state: dict[str, Any], names: Sequence[str], rule: Rule, first: Sequence[Tensor], second: Sequence[Tensor]
) -> None:
    rule.powers.copy_(state["powers"])
    for name, m, v in zip(names, first, second, strict=True):
        m.copy_(state["first"][name])
        v.copy_(state["second"][name])
