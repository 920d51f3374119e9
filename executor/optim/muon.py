"""Muon by owners: one rank computes a matrix's update, every rank applies the same bits.

The mathematics are those of torch.optim.Muon: momentum as an exponential mean, Nesterov, a quintic Newton-Schulz
iteration with (3.4445, -4.7750, 2.0315), the "original" learning-rate adjustment sqrt(max(1, rows / columns)), and
decoupled weight decay (1 - lr wd). What differs is the shape of the work:

- The update is in two halves. ``updates`` runs on the owner of a matrix, whose device may round as it likes; it gives
  tensors in ns_dtype, to be sent unchanged. ``apply`` runs on every rank for every matrix and uses only separately
  rounded elementwise operations (a product, then a difference), so that ranks on unlike hardware stay identical; an
  ``add_`` with alpha, lerp or addcmul would be a fused multiply-add on some hardware and not on other.
- Matrices of one shape are stacked, up to STACK_BYTES, and iterated as one batch. A stack [E, m, n] (experts) counts
  as E matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.optim.steps import chunks, dropped, factor, gradients_of
from planner.door import STACK_BYTES

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalise(batch: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz on a batch [E, m, n] -> [E, m, n] in ``dtype``: singular values go to about 1.

    The iteration runs on the wide form (m <= n), where the Gram matrix is the smaller one.
    """
    a, b, c = COEFFICIENTS
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.to(dtype)
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def lr_scale(parameter: Tensor) -> float:
    """The "original" adjustment, sqrt(max(1, outputs / inputs)); exact in IEEE, so equal on every rank.

    Rows are outputs, but where the parameter's attribute ``inputs_first`` says that they are inputs.
    """
    outputs, inputs = parameter.shape[-2:]
    if getattr(parameter, "inputs_first", False):
        outputs, inputs = inputs, outputs
    return math.sqrt(max(1.0, outputs / inputs))


class Muon:
    """Muon over named matrices [m, n] or stacks [E, m, n]; gradients are read from ``.grad``.

    ``owners[i]`` is the rank that computes matrix i. Momentum exists for this rank's own matrices only, stacked by
    shape, in ``state_dtype``.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[str, nn.Parameter]],
        owners: Sequence[int],
        rank: int,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if len(owners) != len(matrices):
            raise ValueError(f"{len(matrices)} matrices need as many owners; {len(owners)} given")
        self.names = [name for name, _ in matrices]
        self.parameters = [parameter for _, parameter in matrices]
        self.momentum, self.weight_decay, self.ns_steps, self.ns_dtype = momentum, weight_decay, ns_steps, ns_dtype
        self.owned = [i for i, owner in enumerate(owners) if owner == rank]
        owned = [self.parameters[i] for i in self.owned]
        runs = chunks(owned, kind=lambda p: p.shape[-2:], limit=STACK_BYTES)
        self._groups = [[self.owned[place] for place in run] for run in runs]
        self._buffers = [self._zeros(members, state_dtype) for members in self._groups]
        self._chunks = chunks(self.parameters, kind=lr_scale)

    def _zeros(self, members: list[int], dtype: torch.dtype) -> Tensor:
        first = self.parameters[members[0]]
        count = sum(math.prod(self.parameters[i].shape[:-2]) for i in members)
        return torch.zeros(count, *first.shape[-2:], dtype=dtype, device=first.device)

    @torch.no_grad()
    def updates(self, keep: Tensor | None = None) -> list[Tensor]:
        """Updates of the owned matrices in matrix order, each in its matrix's shape and in ns_dtype.

        Momentum advances where ``keep`` is not False; the updates are finite either way. Raises RuntimeError where an
        owned matrix has no gradient, before anything changes.
        """
        gradients_of([self.names[i] for i in self.owned], [self.parameters[i] for i in self.owned], "matrix")
        computed: dict[int, Tensor] = {}
        for members, buffer in zip(self._groups, self._buffers, strict=True):
            batch = self._nesterov(members, buffer, keep)
            batch = orthogonalise(batch, self.ns_steps, self.ns_dtype)
            sizes = [math.prod(self.parameters[i].shape[:-2]) for i in members]
            for i, update in zip(members, torch.split(batch, sizes), strict=True):
                computed[i] = update.reshape(self.parameters[i].shape)
        return [computed[i] for i in self.owned]

    def _nesterov(self, members: list[int], buffer: Tensor, keep: Tensor | None) -> Tensor:
        """Advance the momentum of one group and return its look-ahead gradients [E, m, n]."""
        gradients: list[Tensor] = []
        for i in members:
            gradient = self.parameters[i].grad
            assert gradient is not None  # checked by updates()
            gradients.append(gradient.reshape(-1, *gradient.shape[-2:]))
        stacked = torch.cat(gradients)
        if keep is not None:  # the mean of the momentum and itself is the momentum
            torch.where(keep, stacked, buffer, out=stacked)
        if buffer.dtype == stacked.dtype:
            mean = buffer.lerp_(stacked, 1.0 - self.momentum)
        else:
            mean = buffer.to(stacked.dtype).lerp_(stacked, 1.0 - self.momentum)
            buffer.copy_(mean)
        return stacked.lerp_(mean, self.momentum)

    @torch.no_grad()
    def apply(self, updates: Sequence[Tensor], lr: float, keep: Tensor | None = None) -> None:
        """Apply the updates of all matrices, in matrix order, the same on every rank; none where ``keep`` is False."""
        for chunk in self._chunks:
            parameters: list[Tensor] = [self.parameters[i] for i in chunk]
            drop = dropped(keep, parameters[0])
            scaled = [torch.empty_like(p) for p in parameters]
            torch._foreach_copy_(scaled, [updates[i] for i in chunk])
            rate = factor(lr * lr_scale(parameters[0]), 0.0, drop).to(scaled[0].dtype)
            torch._foreach_mul_(scaled, rate)
            if self.weight_decay:
                torch._foreach_mul_(parameters, factor(1.0 - lr * self.weight_decay, 1.0, drop).to(rate.dtype))
            torch._foreach_sub_(parameters, scaled)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the storages that hold the state on this rank."""
        return {"muon_momentum": sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)}

    def state_dict(self) -> dict[str, Any]:
        """Momentum of the owned matrices by name, as views of the stacked buffers."""
        state: dict[str, Any] = {}
        for members, buffer in zip(self._groups, self._buffers, strict=True):
            sizes = [math.prod(self.parameters[i].shape[:-2]) for i in members]
            for i, part in zip(members, torch.split(buffer, sizes), strict=True):
                state[self.names[i]] = part.reshape(self.parameters[i].shape)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over momentum of the owned matrices. Raises KeyError where one is missing."""
        for name, part in self.state_dict().items():
            part.copy_(state[name])
