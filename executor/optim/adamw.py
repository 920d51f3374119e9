"""AdamW of separately rounded operations, so that ranks on unlike hardware stay identical bit for bit.

Why not torch.optim.AdamW: it is built of lerp, addcmul and addcdiv, which use fused multiply-adds on one machine and
not on another, and foreach or single forms round differently. Replicated over unlike ranks the weights then drift
apart. Here every operation is one IEEE multiplication, addition, subtraction, division or square root an element, each
correctly rounded on every device; factors are float64 without dimensions on the device, rounded once to the parameters'
dtype, and reciprocals, since a division by a scalar is itself a multiplication on some devices; bias corrections are
running products, since pow is not exact in every libm.

The mathematics are those of decoupled AdamW (arXiv 1711.05101): with gradient x and step t,
    m = b1 m + (1-b1) x    v = b2 v + (1-b2) x^2    p = p (1 - lr wd) - lr / (1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
Weight decay applies to tensors of two dimensions or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.optim.steps import blank, chunks, dropped, factor, gradients_of


class Moments:
    """Named parameters, the two moments of each, and ``counter``, which tells on the device how many steps were kept.

    Gradients are read from ``.grad``. Weight decay is decoupled, for tensors of two dimensions or more.
    """

    counter: Tensor

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
        self.device = self.parameters[0].device if named else torch.device("cpu")
        self.first = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.parameters]
        self.second = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr: float, keep: Tensor | None = None) -> None:
        """One update, without effect where ``keep`` is False.

        Raises RuntimeError where a parameter has no gradient (naming it), before anything changes.
        """
        gradients = gradients_of(self.names, self.parameters, "parameter")
        if gradients:
            self._step(gradients, lr, dropped(keep, self.counter))

    def _step(self, gradients: list[Tensor], lr: float, drop: Tensor) -> None:
        """One update; ``drop``: whether it must change nothing, a bool tensor without dimensions."""
        raise NotImplementedError

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the storages that hold the state."""
        return {"adamw_state": sum(t.untyped_storage().nbytes() for t in self.first + self.second)}

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly."""
        return {"counter": self.counter, "first": dict(zip(self.names, self.first, strict=True)),
                "second": dict(zip(self.names, self.second, strict=True))}  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises KeyError where a parameter's state is missing."""
        self.counter.copy_(state["counter"])
        for name, first, second in zip(self.names, self.first, self.second, strict=True):
            first.copy_(state["first"][name])
            second.copy_(state["second"][name])


class AdamW(Moments):
    """Decoupled AdamW; ``counter`` is (b1^t, b2^t) in float64."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], *options: Any, **named_options: Any) -> None:
        super().__init__(named, *options, **named_options)
        self._betas = torch.tensor(self.betas, dtype=torch.float64, device=self.device)
        self.counter = torch.ones_like(self._betas)
        self._chunks = chunks(self.parameters)

    def _step(self, gradients: list[Tensor], lr: float, drop: Tensor) -> None:
        ahead, betas = self.counter * self._betas, self._betas.masked_fill(drop, 1.0)
        self.counter *= betas
        widen = (1.0 - ahead[1]).sqrt().reciprocal()
        rate = (lr * (1.0 - ahead[0]).reciprocal()).masked_fill_(drop, 0.0)
        factors = torch.stack([*betas, widen, rate, factor(1.0 - lr * self.weight_decay, 1.0, drop)])
        for chunk in self._chunks:
            mine = [gradients[i] for i in chunk]
            blank(mine, drop)
            self._update([self.parameters[i] for i in chunk], mine, [self.first[i] for i in chunk],
                         [self.second[i] for i in chunk], factors.to(mine[0].dtype))  # fmt: skip

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
                factors: Tensor) -> None:  # fmt: skip
        b1, b2, widen, rate, decay = factors.unbind()
        torch._foreach_mul_(first, b1)
        torch._foreach_add_(first, torch._foreach_mul(gradients, 1.0 - self.betas[0]))
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_mul_(squares, 1.0 - self.betas[1])
        torch._foreach_mul_(second, b2)
        torch._foreach_add_(second, squares)
        del squares
        scale = torch._foreach_sqrt(second)
        torch._foreach_mul_(scale, widen)
        torch._foreach_add_(scale, self.eps)
        update = torch._foreach_div(first, scale)
        torch._foreach_mul_(update, rate)
        decayed = [p for p in parameters if p.ndim >= 2]
        if decayed and self.weight_decay:
            torch._foreach_mul_(decayed, decay)
        torch._foreach_sub_(parameters, update)
