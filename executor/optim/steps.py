"""How every optimizer does a step: in chunks, so that temporaries stay small, and gated on the device.

Whether a step counts is known on the device first (a gradient may be infinite), and asking it would hold the host up.
So a step takes ``keep``, a bool tensor without dimensions on the parameters' device (None: True), and is launched
either way: where it is False, gradients read as 0 and each factor as the one that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from planner.door import CHUNK_BYTES

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def chunks(
    parameters: Sequence[Tensor], kind: Callable[[Tensor], Hashable] = lambda p: None, limit: int | None = None
) -> list[list[int]]:
    """Positions in runs of at most ``limit`` bytes (None: CHUNK_BYTES; a larger tensor stands alone), one device, dtype
    and ``kind`` a run."""
    limit = CHUNK_BYTES if limit is None else limit
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for i, p in enumerate(parameters):
        nbytes, this = p.numel() * p.element_size(), (p.device, p.dtype, kind(p))
        run, size = filling.get(this, ([], 0))
        if not run or size + nbytes > limit:
            run, size = [], 0
            found.append(run)
        run.append(i)
        filling[this] = (run, size + nbytes)
    return found


def dropped(keep: Tensor | None, like: Tensor) -> Tensor:
    """Whether the step must change nothing: a bool tensor without dimensions, on the device of ``like``."""
    return torch.zeros((), dtype=torch.bool, device=like.device) if keep is None else ~keep


def factor(value: float, otherwise: float, drop: Tensor) -> Tensor:
    """``value``, or ``otherwise`` in a step that is dropped: float64, without dimensions."""
    return torch.full((), value, dtype=torch.float64, device=drop.device).masked_fill_(drop, otherwise)


def blank(gradients: Sequence[Tensor], drop: Tensor) -> None:
    """Zero ``gradients`` (of one dtype) in place in a step that is dropped, whatever they hold.

    As bit patterns: a product with 0 leaves NaN what it is, one of integers does not.
    """
    if gradients:
        bits = _BITS[gradients[0].element_size()]
        torch._foreach_mul_([gradient.view(bits) for gradient in gradients], (~drop).to(bits))


def gradients_of(names: Sequence[str], parameters: Sequence[nn.Parameter], what: str) -> list[Tensor]:
    """The gradients of ``parameters``. Raises RuntimeError naming those that have none."""
    missing = [name for name, p in zip(names, parameters, strict=True) if p.grad is None]
    if missing:
        raise RuntimeError(f"no gradient for {', '.join(missing)}: every {what} must take part in every step")
    return [p.grad for p in parameters if p.grad is not None]
