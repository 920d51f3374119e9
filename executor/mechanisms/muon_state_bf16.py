"""Muon's momentum kept in bf16: half its bytes, for the whole fleet, at a small error.

Each step reads the momentum as fp32, advances it and rounds it back. The error of one rounding is 2^-9 relative; since
the mean forgets, it does not grow with the steps. Not exact, hence one decision for the whole fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from executor.optim.routing import split
from planner.door import MechanismRow

NAME = "muon_state_bf16"
SCOPE = "fleet"
EXACT = False
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "component": "muon_momentum",
    "factor": 0.5,
    "devices": ["cpu", "cuda"],
    "why": "momentum stored in bf16, advanced in fp32; relative error 2^-9 a step, which the mean forgets",
}


def offered(model: nn.Module, opt: str) -> bool:
    """Whether a model has momentum that it makes smaller."""
    return bool(split(model, opt).muon)


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a run of these facts ({"device": ..., "opt": "muon" | "adamw"}) can use it, and why."""
    if facts.get("opt", "muon") != "muon":
        return False, f"there is no Muon momentum under --opt {facts['opt']}"
    if facts.get("device") not in ROW["devices"]:
        return False, f"offered on {' and '.join(ROW['devices'])}; this rank is {facts.get('device')}"
    return True, "bf16 is storage only here; no bf16 arithmetic is needed of the device"


def apply(options: dict[str, Any]) -> None:
    """Change the keyword options that ``executor.optim.muon.Muon`` is built with."""
    options["state_dtype"] = torch.bfloat16
