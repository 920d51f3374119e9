"""Dynamic loss scaling: what lets fp16 hold small gradients (arXiv 1710.03740, section 3.2).

The loss is multiplied by a scale before backward, gradients by its inverse after they are reduced. The scale is halved
when a gradient overflows, in a step that then changes nothing, and doubled after so many steps without. It is a power
of two, so scaling rounds nothing. It lives on the device and is never read in a step; every rank of a fleet has the
same, whatever its own dtype, since it follows from what the ranks agreed on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROWTH, BACKOFF = 2.0, 0.5


class Scaler:
    """``scale``: fp32 without dimensions, doubled after ``patience`` steps without an overflow."""

    def __init__(self, scale: float, patience: int, device: torch.device) -> None:
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)  # a plan renders 65536.0 as 65536
        self.patience = patience
        self._clean = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """After a step; ``overflowed``: bool without dimensions on the device, the same on every rank."""
        found = overflowed.to(torch.float32)
        torch._amp_update_scale_(self.scale, self._clean, found, GROWTH, BACKOFF, self.patience)

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly."""
        return {"scale": self.scale, "clean": self._clean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.scale.copy_(state["scale"])
        self._clean.copy_(state["clean"])
