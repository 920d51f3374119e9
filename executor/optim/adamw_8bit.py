"""AdamW with moments of 8 bits, by the blockwise kernel of bitsandbytes.

A moment is a code of 8 bits an element and one fp32 maximum a block of 256 (arXiv 2110.02861): 2.03 bytes an element
for both moments instead of 8. Tensors of under 4096 elements keep fp32 moments (`executor.optim.adamw`), since they
are few bytes and often the sensitive ones.

The kernel takes its number of steps from the host and knows no gate. So a step counts as `settle` says once it is known
whether it was kept, and what a chunk was before is put back on the device where it was not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from executor.kernels import registry
from executor.optim.adamw import AdamW
from executor.optim.steps import gradients_of
from planner.door import CHUNK_BYTES

BLOCK = 256
CPU_CHUNK_BYTES = 2**17  # on a CPU bitsandbytes computes in fp32 tensors of its own, 20 B an element of a chunk
LEAST_ELEMENTS = 4096  # of a tensor with 8-bit moments: bitsandbytes' own bound


def is_small(parameter: Tensor) -> bool:
    """Whether a parameter's moments stay fp32."""
    return parameter.numel() < LEAST_ELEMENTS


def moment_bytes(parameter: Tensor) -> int:
    """Bytes of both moments of one parameter."""
    count = parameter.numel()
    return 8 * count if is_small(parameter) else 2 * (count + 4 * -(-count // BLOCK))


class AdamW8bit:
    """Decoupled AdamW over named contiguous parameters; gradients are read from ``.grad``.

    ``first`` and ``second`` hold all that lives of the moments: codes and maxima of the large tensors, the moments of
    the small ones. ``steps`` counts those kept. Raises ImportError where bitsandbytes cannot be imported.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.weight_decay, self.betas, self.eps, self.steps = weight_decay, betas, eps, 0
        self.small = AdamW([(name, p) for name, p in named if is_small(p)], weight_decay, betas, eps)
        large = [(name, p) for name, p in named if not is_small(p)]
        self.names, self.parameters = [name for name, _ in large], [p for _, p in large]
        self._codes = [[torch.zeros_like(p, dtype=torch.uint8) for p in self.parameters] for _ in betas]
        self._maxima = [[p.new_zeros(-(-p.numel() // BLOCK)) for p in self.parameters] for _ in betas]
        for device in {p.device for p in self.parameters if not p.is_meta}:
            _maps(device)  # the import takes seconds, which the first step should not

    @property
    def first(self) -> list[Tensor]:
        return [*self._codes[0], *self._maxima[0], *self.small.first]

    @property
    def second(self) -> list[Tensor]:
        return [*self._codes[1], *self._maxima[1], *self.small.second]

    @torch.no_grad()
    def step(self, lr: float, keep: Tensor | None = None) -> None:
        """One update, without effect where ``keep`` is False; `settle` must follow it.

        Raises RuntimeError where a parameter has no gradient (naming it), before anything changes.
        """
        gradients = gradients_of(self.names, self.parameters, "parameter")
        self.small.step(lr, keep)
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            (first, second), (most, more) = (codes[i] for codes in self._codes), (maxima[i] for maxima in self._maxima)
            run = (CPU_CHUNK_BYTES if parameter.device.type == "cpu" else CHUNK_BYTES) // 4
            for at in range(0, parameter.numel(), run):
                end = at + run
                blocks = slice(at // BLOCK, -(-end // BLOCK))
                state = [parameter.view(-1)[at:end], first.view(-1)[at:end], second.view(-1)[at:end],
                         most[blocks], more[blocks]]  # fmt: skip
                decay = self.weight_decay if parameter.ndim >= 2 else 0.0
                self._update(state, gradient.view(-1)[at:end], lr, decay, keep)

    def _update(self, state: list[Tensor], gradient: Tensor, lr: float, decay: float, keep: Tensor | None) -> None:
        before = [] if keep is None else [part.clone() for part in state]
        update(*state, gradient, self.steps + 1, lr, *self.betas, self.eps, decay)
        for part, old in zip(state, before, strict=bool(before)):
            assert keep is not None
            torch.where(keep, part, old, out=part)

    def settle(self, kept: bool) -> None:
        """Count the last step, or not."""
        self.steps += kept

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the storages that hold the state."""
        return {"adamw_state": sum(t.untyped_storage().nbytes() for t in self.first + self.second)}

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly."""
        parts = {"codes": self._codes, "maxima": self._maxima}
        large = {name: [dict(zip(self.names, of, strict=True)) for of in part] for name, part in parts.items()}
        return {"steps": self.steps, "small": self.small.state_dict(), **large}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises KeyError where a parameter's state is missing."""
        self.steps = int(state["steps"])
        self.small.load_state_dict(state["small"])
        for key, part in (("codes", self._codes), ("maxima", self._maxima)):
            for moment, tensors in zip(state[key], part, strict=True):
                for name, tensor in zip(self.names, tensors, strict=True):
                    tensor.copy_(moment[name])


@cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the codes of the two moments stand for: signed and unsigned dynamic maps [256] fp32."""
    # It warns there of a kernel for products of 4 bits, which nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional as functional  # slow import: late

    signed, unsigned = functional.create_dynamic_map(True), functional.create_dynamic_map(False)  # type: ignore[no-untyped-call]  # bitsandbytes leaves it so
    return signed.to(device), unsigned.to(device)


@torch.library.custom_op("dormouse::adamw_8bit_", mutates_args=("parameter", "first", "second", "most", "more"))
def update(parameter: Tensor, first: Tensor, second: Tensor, most: Tensor, more: Tensor, gradient: Tensor, step: int,
           lr: float, b1: float, b2: float, eps: float, decay: float) -> None:  # fmt: skip
    """Step ``step`` (from 1) of flat tensors in place: parameter [N] fp32, codes [N], maxima [N / 256 rounded up]."""
    import bitsandbytes.functional as functional  # slow import: late

    maps = _maps(parameter.device)
    functional.optimizer_update_8bit_blockwise(
        "adam", gradient, parameter, first, second, b1, b2, 0.0, 0.0, eps, step, lr, *maps, most, more, decay
    )


@update.register_fake
def _(parameter: Tensor, first: Tensor, second: Tensor, most: Tensor, more: Tensor, gradient: Tensor, step: int,
      lr: float, b1: float, b2: float, eps: float, decay: float) -> None:  # fmt: skip
    return


registry.cost("dormouse::adamw_8bit_", flops=lambda *_, **__: 0, launches=1)
