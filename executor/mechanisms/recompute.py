"""Activation recomputation: each block keeps its input only and runs its forward again in backward.

Exact: the second forward runs the same kernels on the same values, so gradients are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.door import MechanismRow

# The function inside torch's wrapper: the wrapper only hides it from torch.compile, and imports the compiler to do so
# (over a second) at its first call.
_checkpoint = getattr(checkpoint, "__wrapped__", checkpoint)

NAME = "recompute"
SCOPE = "rank"
EXACT = True
HOOKED = 1
"""Operators of a model that each detaching by torch's checkpoint costs the host, with all that its hooks do around it:
0.9 on a CPU, of a model too small to compute. There are two for each tensor that is saved."""
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "variant": "recompute",
    "excludes": ["moe_offload", "act_ckpt"],
    "devices": ["cpu", "cuda"],
    "why": "each block keeps its input only and runs its forward twice; gradients are bit-equal",
}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the members of the outermost module lists."""
    found: list[nn.Module] = []
    pending: list[nn.Module] = [model]
    while pending:
        for child in pending.pop(0).children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                pending.append(child)
    return found


def offered(model: nn.Module, opt: str) -> bool:
    """Whether the model has repeated blocks."""
    return bool(blocks(model))


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a rank of these facts ({"device": "cpu" | "cuda"}) can use it, and why."""
    device = facts.get("device")
    if device not in ROW["devices"]:
        return False, f"recomputation is offered on {' and '.join(ROW['devices'])}; this rank is {device}"
    return True, "needs nothing of the device"


def apply(model: nn.Module) -> None:
    """Wrap each block's forward. Raises ValueError where the model has no list of blocks."""
    members = blocks(model)
    if not members:
        raise ValueError("recompute needs repeated blocks in an nn.ModuleList; this model has none")
    for block in members:
        block.forward = _recomputed(block)


def _recomputed(block: nn.Module) -> Any:
    original = block.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # No random numbers inside a block, so the generator's state need not be kept.
        return _checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward
