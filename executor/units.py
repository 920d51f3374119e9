"""The units that FSDP2 gathers at a time, the same for the account and for the run: every repeated block, then the rest
of the model, which is called the root."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from executor.mechanisms.recompute import blocks

ROOT = ""
"""The name of the unit of all that lies in no block."""


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of each unit that has parameters, the root last."""
    names = {module: name for name, module in model.named_modules()}
    found = [(names[block], block) for block in blocks(model) if any(True for _ in block.parameters())]
    return [*found, (ROOT, model)]


def parameters_of(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """(name, the parameters that it gathers itself) of each unit, in order."""
    seen: set[nn.Parameter] = set()
    for name, unit in units(model):
        mine = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen |= set(mine)
        yield name, mine
