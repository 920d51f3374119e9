"""One forward and backward of a model, measured: what it does, and what it keeps for backward by part."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from executor.count import Counts, Tally
from executor.envelope import Course
from executor.places import followed

COUNTS = ("flops", "bytes", "launches", "host", "link")
OF_TABLES = ("tables_bytes", "tables_peak")  # what a model with tables has besides
SAVED = "saved/"  # begins the count of the bytes that one part of the model keeps for backward


class Measured(NamedTuple):
    """What came of one forward and backward: counts; after each operator of both the bytes alive, what an opaque one
    took within itself included, and that part alone; how many operators forward has; and the bytes of weights that
    autocast holds to its end beside those saved."""

    counts: Counts
    course: Course
    turn: int
    cast: int

    def saved(self) -> int:
        """Bytes kept for backward."""
        return sum(count for name, count in self.counts.items() if name.startswith(SAVED))


def measure(model: nn.Module, batch: int, length: int, dtype: str, hooked: int = 0) -> Measured:
    """One forward and backward on zeros, with gradients already allocated; real, fake or phantom tensors.

    ``hooked``: operators that keeping a tensor in another form costs the host. Counts are those of a tally;
    ``saved/PART`` for each part of the model that keeps bytes for backward; ``beyond``, what backward takes at its peak
    beyond all that is saved.
    """
    device = next(model.parameters()).device
    inputs = torch.zeros(batch, length, dtype=torch.int64, device=device)
    targets = torch.zeros_like(inputs)
    known: list[Tensor] = [inputs, targets]
    for parameter in model.parameters():
        known.append(parameter)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            known.append(parameter.grad)
    known += list(model.buffers())
    tables = [parameter for parameter in model.parameters() if getattr(parameter, "lazy_rows", False)]
    autocast = torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()
    with followed(model) as place, Tally(known, tables, place) as tally:
        with autocast:
            loss = model(inputs, targets)
            held = tally.live
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"forward(inputs, targets) gives {found}; it must give the mean cross-entropy, a scalar")
        saved, parts, turn = tally.live, tally.saved(), len(tally.course)
        torch.autograd.backward(loss)
    counts = {name: getattr(tally, name) for name in (*COUNTS, *OF_TABLES)}
    counts["launches"] += hooked * tally.detached
    counts |= {"beyond": tally.peak - saved, **{f"{SAVED}{part}": n for part, n in parts.items()}}
    return Measured(counts, tally.course, turn, held - saved)
