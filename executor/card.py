"""What a card does otherwise than a CPU where that decides what is kept: counted without one.

- RMSNorm is one kernel there, which keeps its input and one number a row. A CPU's is several operators, which keep a
  normalised copy of the input besides.
- Autocast runs softmax, norms and losses in fp32 there; a CPU's leaves some of them in 16 bits.
- The gradient of an embedding is summed there over sorted indices, in memory that the operator takes and returns.
- Recurrent layers are cuDNN's, one kernel for all layers and steps (``executor.recurrent``).

Only shapes are right here: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from executor import recurrent

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


_ROWS_A_SUM = 10  # indices that are summed at a time, in torch's EmbeddingBackwardKernel.cu
_FEW_ROWS = 3072


def _sorting(gradient: Tensor, indices: Tensor, rows: int, *_: Any, out: Tensor) -> int:
    """Bytes that the gradient of ``rows`` embeddings takes within itself: int64 copies of the indices and bounds of
    what is summed, and the partial sums in fp32.

    Those are of the indices' own number or of the rows', whichever is less: of few rows these, of many those, so that
    it stays a line over tokens. Few indices are not sorted, and take nothing: then it says too much.
    """
    count, width = indices.numel(), gradient.shape[-1]
    segments = rows if rows <= _FEW_ROWS else count
    sums = count // _ROWS_A_SUM + segments
    return 8 * (3 * count + 2 * segments + sums + 2) + max(4, gradient.element_size()) * sums * width


TEMPORARY: dict[str, Callable[..., int]] = {"aten::embedding_dense_backward": _sorting}
"""Operators that take memory of their own on a card: bytes, as a function of arguments and result."""
temporary: dict[str, Callable[..., int]] = {}
"""Those of them that count now: all inside `as_on_a_card`, else none."""

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
        recurrent.on_a_card(library)
        temporary.update(TEMPORARY)
        yield
    finally:
        temporary.clear()
        library._destroy()  # type: ignore[no-untyped-call]
