"""The one cast between the residual stream and the products that read it."""

from __future__ import annotations

import torch
from torch import Tensor


def compute(x: Tensor) -> Tensor:
    """x in the autocast dtype, cast once for all products that read it (autocast itself would cast once a product)."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
