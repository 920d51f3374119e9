"""AdamW of separately rounded operations, so that ranks on unlike hardware stay identical bit for bit.

Why not torch.optim.AdamW: it is built of lerp, addcmul and addcdiv, which use fused multiply-adds on one machine and
not on another, and foreach or single forms round differently. Replicated over unlike ranks the weights then drift
apart. Here every operation is one IEEE multiplication, addition, subtraction, division or square root an element, each
correctly rounded on every device; scalars are reciprocals computed once on the host, since a division by a host scalar
is itself a multiplication on some devices; bias corrections are running products, since pow is not exact in every libm.

The mathematics are those of decoupled AdamW (arXiv 1711.05101): with gradient x and step t,
    m = b1 m + (1-b1) x    v = b2 v + (1-b2) x^2    p = p (1 - lr wd) - lr / (1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
Weight decay applies to tensors of two dimensions or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_BYTES = 64 * 2**20  # parameters updated at a time, so that temporaries stay small


class AdamW:
    """Decoupled AdamW over named parameters; gradients are read from ``.grad``."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self.first = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.parameters]
        self.second = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.parameters]
        self.powers = (1.0, 1.0)  # b1^t, b2^t
        self.steps = 0
        self._chunks = _chunks(self.parameters)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update. Raises RuntimeError where a parameter has no gradient (naming it), before anything changes."""
        missing = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {', '.join(missing)}: every parameter must take part in every step")
        self.powers = (self.powers[0] * self.betas[0], self.powers[1] * self.betas[1])
        self.steps += 1
        for chunk in self._chunks:
            self._update([self.parameters[i] for i in chunk], [self.first[i] for i in chunk],
                         [self.second[i] for i in chunk], lr)  # fmt: skip

    def _update(self, parameters: list[nn.Parameter], first: list[Tensor], second: list[Tensor], lr: float) -> None:
        b1, b2 = self.betas
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(first, b1)
        torch._foreach_add_(first, torch._foreach_mul(gradients, 1.0 - b1))
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_mul_(squares, 1.0 - b2)
        torch._foreach_mul_(second, b2)
        torch._foreach_add_(second, squares)
        del squares
        scale = torch._foreach_sqrt(second)
        torch._foreach_mul_(scale, 1.0 / math.sqrt(1.0 - self.powers[1]))
        torch._foreach_add_(scale, self.eps)
        update = torch._foreach_div(first, scale)
        torch._foreach_mul_(update, lr * (1.0 / (1.0 - self.powers[0])))
        decayed: list[Tensor] = [p for p in parameters if p.ndim >= 2]
        if decayed and self.weight_decay:
            torch._foreach_mul_(decayed, 1.0 - lr * self.weight_decay)
        targets: list[Tensor] = list(parameters)
        torch._foreach_sub_(targets, update)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the storages that hold the state."""
        return {"adamw_state": sum(t.untyped_storage().nbytes() for t in self.first + self.second)}

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly."""
        return {"steps": self.steps, "powers": self.powers, "first": dict(zip(self.names, self.first, strict=True)),
                "second": dict(zip(self.names, self.second, strict=True))}  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises KeyError where a parameter's state is missing."""
        self.steps, self.powers = int(state["steps"]), (float(state["powers"][0]), float(state["powers"][1]))
        for name, first, second in zip(self.names, self.first, self.second, strict=True):
            first.copy_(state["first"][name])
            second.copy_(state["second"][name])


def _chunks(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Positions in runs of at most CHUNK_BYTES (a larger tensor stands alone), one device and dtype a run."""
    chunks: list[list[int]] = []
    size, kind = 0, None
    for i, p in enumerate(parameters):
        nbytes, this = p.numel() * p.element_size(), (p.device, p.dtype)
        if not chunks or this != kind or size + nbytes > CHUNK_BYTES:
            chunks.append([])
            size, kind = 0, this
        chunks[-1].append(i)
        size += nbytes
    return chunks
