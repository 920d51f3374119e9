"""AdamW's moments kept in 8 bits: a quarter of their bytes, for the whole fleet, at an error of about one per cent.

Not exact, and the kernel's arithmetic differs between kinds of card: one decision for a fleet of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from executor.optim.adamw_8bit import BLOCK, LEAST_ELEMENTS, moment_bytes
from executor.optim.routing import Routed, split
from planner.door import MechanismRow

NAME = "optim_8bit"
SCOPE = "fleet"
EXACT = False
ERROR = 0.014
"""||difference|| / ||way|| of the weights after 50 steps on given gradients, against fp32 moments; a test holds it."""
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "component": "adamw_state",
    "alike": True,
    "sharded": False,
    "sharded_why": "a maximum is of 256 elements, and which these are would follow from how many ranks there are",
    "toolchain": ["bitsandbytes"],
    "devices": ["cpu", "cuda"],
    "why": f"moments in codes of 8 bits and a maximum every {BLOCK} elements; tensors under {LEAST_ELEMENTS} "
    "and the rows of tables keep fp32",
    "error": f"after 50 steps the way of the weights differs by {ERROR:.1%} of its length",
}


def offered(model: nn.Module, opt: str) -> bool:
    """Whether a model has AdamW state that it makes smaller."""
    return any(parameter.numel() >= LEAST_ELEMENTS for _, parameter in split(model, opt).adamw)


def state_bytes(routed: Routed) -> int:
    """Bytes of the AdamW route's state under it."""
    return sum(moment_bytes(parameter) for _, parameter in routed.adamw)


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether ranks of these facts can use it, and why.

    ``device``: "cpu" or "cuda"; ``bitsandbytes``: its version, None where it is not installed; ``sm`` and ``arches``:
    of a card, and of bitsandbytes' machine code, as text ("8.6").
    """
    device = facts.get("device")
    if device not in ROW["devices"]:
        return False, f"offered on {' and '.join(ROW['devices'])}; this rank is {device}"
    if not facts.get("bitsandbytes"):
        return False, "bitsandbytes is not installed"
    if device == "cuda" and facts["sm"] not in facts["arches"]:
        return False, f"bitsandbytes has no machine code for sm {facts['sm']} (it has {', '.join(facts['arches'])})"
    return True, "bitsandbytes steps blockwise on this device"


def apply(options: dict[str, Any]) -> None:
    """Change the options that the optimizers are built with."""
    options["adamw"] = "8bit"
