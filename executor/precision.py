"""The compute dtype of a rank: how it is set, and which one the products with parameters really had."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_aten = torch.ops.aten
# Where the two factors of a two-dimensional product stand. Batched products belong to kernels, not to parameters.
_FACTORS = {_aten.mm.default: 0, _aten.addmm.default: 1}


def compute_in(dtype: str, kind: str) -> AbstractContextManager[Any]:
    """The context that a forward pass runs in on a device of ``kind``: autocast, or nothing for fp32."""
    return nullcontext() if dtype == "fp32" else torch.autocast(kind, dtype=DTYPES[dtype])


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the FLOPs of matrix products by operand dtype while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _FACTORS.get(function)
        if place is not None:
            left, right = args[place], args[place + 1]
            self.flops[_name(left)] += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*args, **(kwargs or {}))

    def ran(self) -> str | None:
        """The dtype with the largest share of the FLOPs; None when there was no product."""
        return self.flops.most_common(1)[0][0] if self.flops else None


def _name(tensor: Tensor) -> str:
    return NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
