"""Which part of a model runs, by a name that a person knows: what the bytes kept for backward are told by.

Parts are the children of the model and of its repeated blocks, each with all that lies within it. A child of the model
goes by its own name, one of a block by that of its class; all norms are one part, and so is every kernel's core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn

from executor.mechanisms.recompute import blocks

LOSS = "loss"
"""What the model's own forward makes, outside of its children."""
NORMS = "norms"
CORE = "core"


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """The parts of a model with their names."""
    found: dict[nn.Module, str] = {}
    for name, child in model.named_children():
        if not isinstance(child, nn.ModuleList):
            found[child] = _named(child, name)
    for block in blocks(model):
        found[block] = _named(block)
        found |= {child: _named(child) for child in block.children() if not isinstance(child, nn.ModuleList)}
    return found


def _named(module: nn.Module, name: str = "") -> str:
    kind = type(module).__name__
    if kind.endswith("Norm"):
        return NORMS
    return re.sub("[^a-z0-9]+", "_", (name if name.isidentifier() else kind).lower()).strip("_") or "part"


@contextmanager
def followed(model: nn.Module) -> Iterator[Callable[[], str]]:
    """While entered, the call that it gives tells the innermost part that runs."""
    running: list[str] = []
    hooks, cores = [], []
    for module, name in parts_of(model).items():
        hooks.append(module.register_forward_pre_hook(partial(_begun, running, name)))
        hooks.append(module.register_forward_hook(partial(_done, running), always_call=True))
    for module in model.modules():
        core: Any = module.__dict__.get("core")
        if callable(core):
            cores.append((module, core))
            module.core = _around(core, running)
    try:
        yield lambda: running[-1] if running else LOSS
    finally:
        for hook in hooks:
            hook.remove()
        for module, core in cores:
            module.core = core


def _begun(running: list[str], name: str, *_: Any) -> None:
    running.append(name)


def _done(running: list[str], *_: Any) -> None:
    running.pop()


def _around(core: Callable[..., Any], running: list[str]) -> Any:
    @wraps(core)
    def called(*args: Any, **kwargs: Any) -> Any:
        running.append(CORE)
        try:
            return core(*args, **kwargs)
        finally:
            running.pop()

    return called
