"""Offloaded experts: what a routed expert pass saves for backward goes to host memory, and comes back before its turn.

Exact: the bytes come back as they went, in the layout that they had. Copies run beside the compute. Of each pass:

- forward: each storage is copied out as soon as it is saved. The originals are held until the next pass begins, when
  the compute stream waits for the copies. So nothing is written over too early, and how much is held at once does not
  depend on how fast the link is.
- backward: when a pass begins, the pass before it is asked back, and has the time of a whole layer to come.

The last layer's stay on the device: its backward comes first, at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from executor.kernels.offload import offload, reached, restore
from executor.mechanisms import saved
from planner.door import MechanismRow

NAME = "moe_offload"
SCOPE = "rank"
EXACT = True
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "variant": NAME,
    "excludes": ["recompute"],
    "sharded": False,
    "sharded_why": "its copies and the gathers of parameters have passed no gate beside each other",
    "devices": ["cuda"],
    "why": "the expert passes' saved activations wait in pinned host memory; the same bytes come back",
}


def experts_of(model: nn.Module) -> list[Any]:
    """The modules with a routed expert pass, in the order of layers: those whose class has a method ``experts``."""
    return [module for module in model.modules() if callable(getattr(type(module), "experts", None))]


def offered(model: nn.Module, opt: str) -> bool:
    """Whether the model has more than one routed expert pass: the last one's activations stay."""
    return len(experts_of(model)) > 1


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a rank of these facts ({"device": "cpu" | "cuda"}) can use it, and why."""
    device = facts.get("device")
    if device not in ROW["devices"]:
        return False, f"offered on cuda; what a rank on {device} saves is in host memory already"
    return True, "copies to pinned host memory run beside the compute"


def apply(model: nn.Module) -> None:
    """Wrap each module's ``experts``. Raises ValueError where the model has none."""
    modules = experts_of(model)
    if not modules:
        raise ValueError("moe_offload needs layers of routed experts; this model has none")
    turns = _Turns()
    for place, module in enumerate(modules):
        module.experts = turns.around(module.experts, first=place == 0, last=place == len(modules) - 1)


class _Away:
    """One storage in host memory, on its way back, or back."""

    __slots__ = ("__weakref__", "_arrived", "_back", "_device", "_host")

    def __init__(self, flat: Tensor) -> None:
        self._back: Tensor | None = None
        self._arrived: Callable[[], None] = _nothing
        self._host, self._device = offload(flat), flat.device

    def ask_back(self) -> Tensor:
        """The device tensor that the bytes are being copied into; the copy begins at the first call."""
        if self._back is None:
            self._back = restore(self._host, self._device)
            self._arrived = reached(self._device)
        return self._back

    def get(self) -> Tensor:
        """The device tensor, its bytes there for whatever the compute stream does next."""
        back = self.ask_back()
        self._arrived()
        return back

    def __del__(self) -> None:
        # What was asked back and never used is freed here, and the copy into it may still be under way.
        self._arrived()


def _nothing() -> None:
    pass


class _Pass:
    """One expert pass of one forward."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._away: list[weakref.ref[_Away]] = []

    def put(self, flat: Tensor) -> saved.Get:
        """Begin to copy ``flat`` out."""
        away = _Away(flat)
        self._held.append(flat)
        self._away.append(weakref.ref(away))
        return away.get

    def release(self) -> None:
        """Let the originals go."""
        if self._held:
            reached(self._held[0].device)()
        self._held.clear()

    def ask_back(self) -> None:
        """Begin to copy back all of it that is still needed."""
        for reference in self._away:
            away = reference()
            if away is not None:
                away.ask_back()


class _Turns:
    """The passes of a model, one after the other; ``_latest`` is the one that began last."""

    def __init__(self) -> None:
        self._latest: _Pass | None = None

    def around(self, experts: Callable[..., Tensor], first: bool, last: bool) -> Callable[..., Tensor]:
        """``experts`` with the pass before it released when it begins, and asked back when its backward begins."""

        @wraps(experts)
        def called(*args: Any, **kwargs: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return experts(*args, **kwargs)
            before = None if first else self._latest
            now = self._latest = _Pass()
            if before is not None:
                before.release()
            tokens = saved.tokens_of((*args, *kwargs.values()))
            with nullcontext() if last else saved.saving(tokens, put=now.put):
                out = experts(*args, **kwargs)
            if before is not None and out.requires_grad:
                out.register_hook(partial(_ask_back, before))  # type: ignore[no-untyped-call]
            return out

        return called


def _ask_back(before: _Pass, _: Tensor) -> None:
    before.ask_back()
