"""Quantized activations: what a block saves for its backward is kept as int8, with one scale a group of 128 elements.

Approximate: the loss is exact, the gradients are those of activations rounded to 8 bits. These stay as they are:
weights, data, indices, what is less than 32 numbers a token (routing weights, scales, gates of a head), and all that
the delta rule's kernel keeps. Its backward goes through an inverse and through exponentials of summed decays; rounding
those too makes the gradients twice as wrong, and those of the decay rates by half.

Rounding is to nearest. Stochastic rounding would be free of bias, but it doubles the variance, and its random numbers
would be one more state to carry through a resume. Ranks stay identical, since all apply the one summed gradient: so
each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.mechanisms import saved
from executor.mechanisms.recompute import blocks
from planner.door import MechanismRow

NAME = "act_ckpt"
SCOPE = "rank"
EXACT = False
GROUP = 128
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "variant": NAME,
    "excludes": ["recompute"],
    "devices": ["cpu", "cuda"],
    "why": "a block's saved activations are int8 with an fp32 scale for 128 of them; its kernel's stay as they are",
    "error": "gradients 0.2 % off in the first step of tiny, 1.0 to 1.7 % after 150 steps, where rounding to bf16 "
    "makes 0.6 % and 0.7 to 1.2 %; the loss after 150 steps is 2.140 for 2.137",
}
_LEVELS = 127


def offered(model: nn.Module, opt: str) -> bool:
    """Whether the model has repeated blocks."""
    return bool(blocks(model))


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a rank of these facts ({"device": "cpu" | "cuda"}) can use it, and why."""
    device = facts.get("device")
    if device not in ROW["devices"]:
        return False, f"quantized activations are offered on {' and '.join(ROW['devices'])}; this rank is {device}"
    return True, "needs nothing of the device"


def apply(model: nn.Module) -> None:
    """Wrap each block's forward. Raises ValueError where the model has no list of blocks."""
    members = blocks(model)
    if not members:
        raise ValueError("act_ckpt needs repeated blocks in an nn.ModuleList; this model has none")
    for block in members:
        block.forward = saved.around(block.forward, partial(saved.saving, code=quantized))
        for module in block.modules():
            core: Any = getattr(module, "core", None)
            if callable(core):
                module.core = saved.as_they_are(core)  # type: ignore[assignment]


def quantized(flat: Tensor, put: saved.Put) -> saved.Get:
    """Keep ``flat`` [n] as int8 [n / GROUP, GROUP] and fp32 scales [n / GROUP, 1]: absmax of a group / 127.

    A group of zeros comes back as zeros, whatever 0 / 0 is as int8: its scale is 0. A group that is not finite comes
    back not finite, so that an overflow is still found in the gradients.
    """
    length, dtype = flat.numel(), flat.dtype
    working = torch.promote_types(dtype, torch.float32)
    table = F.pad(flat, (0, -length % GROUP)).view(-1, GROUP) if length % GROUP else flat.view(-1, GROUP)
    scale = torch.linalg.vector_norm(table, torch.inf, dim=1, keepdim=True, dtype=working).div_(_LEVELS)
    codes, scales = put((table / scale).round_().to(torch.int8)), put(scale)
    return lambda: (codes() * scales()).view(-1)[:length].to(dtype)
