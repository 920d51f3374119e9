"""AdamW by torch's fused kernel: one pass over the memory instead of fourteen, for cards of one kind.

It uses fused multiply-adds, so that unlike ranks would drift apart: those get `executor.optim.adamw`. Alike cards run
the same instructions on the same values. The kernel itself gates on ``found_inf`` and counts its steps on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.optim.adamw import Moments


class FusedAdamW(Moments):
    """Decoupled AdamW (arXiv 1711.05101); ``counter`` is the number of steps kept, in fp32 as the kernel reads it."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], *options: Any, **named_options: Any) -> None:
        super().__init__(named, *options, **named_options)
        self.counter = torch.zeros((), device=self.device)

    def _step(self, gradients: list[Tensor], lr: float, drop: Tensor) -> None:
        found = drop.to(torch.float32)
        self.counter += 1.0 - found
        for decay in (self.weight_decay, 0.0):
            members = [i for i, p in enumerate(self.parameters) if (p.ndim >= 2) == (decay == self.weight_decay)]
            if members:
                self._update(members, [gradients[i] for i in members], lr, decay, found)

    def _update(self, members: Sequence[int], gradients: list[Tensor], lr: float, decay: float, found: Tensor) -> None:
        parameters: list[Tensor] = [self.parameters[i] for i in members]
        first, second = [self.first[i] for i in members], [self.second[i] for i in members]
        torch._fused_adamw_(
            parameters, gradients, first, second, [], [self.counter] * len(members), lr=lr, beta1=self.betas[0],
            beta2=self.betas[1], weight_decay=decay, eps=self.eps, amsgrad=False, maximize=False, found_inf=found,
        )  # fmt: skip
