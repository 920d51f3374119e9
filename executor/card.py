"""What a card does otherwise than a CPU where that decides what is kept: counted without one.

- RMSNorm is one kernel there, which keeps its input and one number a row. A CPU's is several operators, which keep a
  normalised copy of the input besides.
- Autocast runs softmax, norms and losses in fp32 there; a CPU's leaves some of them in 16 bits.

Only shapes are right here: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Of those that a card's autocast runs in fp32, what a language model keeps results of (torch's autocast_mode.h).
IN_FP32 = (
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softplus", "logsumexp"),
    *("softmax.int", "log_softmax.int", "cumsum", "exp", "log", "rsqrt", "pow.Tensor_Scalar"),
)


def _whole(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """The result, and the inverse root of the mean square of each row in at least fp32."""
    rows = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return _whole(x), x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


def _norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    return _whole(x), torch.empty_like(x if weight is None else weight)


# What stands for them on tensors without memory.
SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._fused_rms_norm.default: _norm,
    torch.ops.aten._fused_rms_norm_backward.default: _norm_backward,
}


def _widened(operator: Any) -> Callable[..., Any]:
    """``operator`` on fp32 in place of 16-bit tensors, as autocast calls it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        # Inside, no autocast; the conversions themselves are operators like any other.
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*(_wide(item) for item in args), **kwargs)

    return called


def _wide(item: Any) -> Any:
    return item.float() if isinstance(item, Tensor) and item.dtype in (torch.bfloat16, torch.float16) else item


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """While entered, operators on CPU tensors are dispatched as a card's are."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    try:
        for operator, shapes in SHAPES.items():
            library.impl(operator, shapes, "CPU")  # type: ignore[no-untyped-call]
        for name in IN_FP32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _widened(operator), "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
