"""The smoke launch: one discarded forward and backward, before anything counts.

It proves that the planned kernels run and in which dtype, that loss and gradients are finite, and, under DDP, lets the
final buckets be built. No state advances: windows are a function of the step, gradients are zeroed, and buffers
(counts, running means) are put back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from executor import peaks
from executor.count import Tally
from executor.fingerprints import bytes_of
from executor.guest import told
from executor.kernels import registry
from executor.models.moe import balanced
from executor.parts import is_part, own
from executor.places import followed
from executor.precision import Products, compute_in
from schemas.form import Json


def launch(
    rank: int,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    dtype: str,
    arrive: Callable[[], None] | None = None,
) -> dict[str, Json]:
    """Run it outside DDP, and say what ran on ``rank``. ``arrive``: waits until all that was launched is done.

    Returns:
        ``error``: what it raised, else None; ``nonfinite``: of the loss and the gradients, those that are not finite;
        ``unused``: the trainable parameters that no gradient reached;
        ``moved``: the buffers of a checkpoint that it changed, but for a mixture's counts, which are summed, and the
        SHA-256 of what they were then;
        ``dtype``: of the products with parameters, by the largest share of their FLOPs (None where there are none);
        ``kernels``: of each kernel, the choice that ran (several: separated by commas);
        ``allocator``: how the device's memory grows, "expandable" or "segments" (None on a CPU);
        ``kept``: bytes of the storages that lie there when forward is over, by the part of the model that made them.
    """
    registry.calls.clear()
    products, nonfinite, unused = Products(), list[str](), list[str]()
    try:
        with _kept_buffers(model) as before, products:
            loss, kept = _forward(model, inputs, targets, dtype)
            torch.autograd.backward(loss)
            moved = _moved(model, before)
        if arrive is not None:
            arrive()
        nonfinite, unused = _not_finite(model, loss.detach()), _without_gradient(model)
    except (Exception, SystemExit) as error:  # of a kernel that does not serve the device, or of a user's code
        return failed(rank, error)
    model.zero_grad(set_to_none=False)
    ran: dict[str, list[str]] = {}
    for kernel, choice in sorted(registry.calls):
        ran.setdefault(kernel, []).append(choice)
    return {
        "rank": rank,
        "error": None,
        "nonfinite": nonfinite,
        "unused": unused,
        "moved": moved,
        "dtype": products.ran(),
        "kernels": {kernel: ", ".join(choices) for kernel, choices in ran.items()},
        "allocator": peaks.allocator(inputs.device.type),
        "kept": kept,
    }


def _forward(model: nn.Module, inputs: Tensor, targets: Tensor, dtype: str) -> tuple[Tensor, dict[str, int]]:
    """The loss, and what is kept for backward by the part of the model that made it, autocast's copies gone. Where
    parameters are sharded, what is kept holds gathered ones, and is not told apart."""
    if any(map(is_part, model.parameters())):
        with compute_in(dtype, inputs.device.type):
            return model(inputs, targets), {}
    known = (inputs, targets, *model.parameters(), *model.buffers())
    with followed(model) as place, Tally(known, place=place) as tally, compute_in(dtype, inputs.device.type):
        loss = model(inputs, targets)
    return loss, tally.saved()


def failed(rank: int, error: BaseException) -> dict[str, Json]:
    """The row of a rank that ``error`` kept from a smoke launch."""
    return {
        "rank": rank,
        "error": told(error),
        "nonfinite": [],
        "unused": [],
        "moved": {},
        "dtype": None,
        "kernels": {},
        "allocator": None,
        "kept": {},
    }


def _not_finite(model: nn.Module, loss: Tensor) -> list[str]:
    bad = [] if torch.isfinite(loss) else ["loss"]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(own(parameter.grad)).all():
            bad.append(f"gradient of {name}")
    return bad


def _without_gradient(model: nn.Module) -> list[str]:
    """Of these DDP would wait for the gradient for ever."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def build_buckets(
    forward: Callable[[Tensor, Tensor], Tensor], model: nn.Module, inputs: Tensor, targets: Tensor, dtype: str
) -> None:
    """One more, through DDP: it orders its buckets by the first backward that it sees, and makes them anew at the next
    forward. No gradient is left then that would keep the old ones beside the new."""
    with _kept_buffers(model):
        with compute_in(dtype, inputs.device.type):
            loss = forward(inputs, targets)
        torch.autograd.backward(loss)
    model.zero_grad(set_to_none=True)


Buffers = Sequence[tuple[Tensor, Tensor]]
"""Each buffer of a model, and a copy of what it was."""


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[Buffers]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield before
    finally:
        for buffer, old in before:
            buffer.copy_(old)


def _moved(model: nn.Module, before: Buffers) -> dict[str, str]:
    summed = {id(mixture.counts) for mixture in balanced(model)}
    state = model.state_dict(keep_vars=True)
    names = {id(buffer): name for name, buffer in model.named_buffers() if name in state and id(buffer) not in summed}
    moved = (buffer for buffer, old in before if id(buffer) in names and not torch.equal(buffer, old))
    return {names[id(buffer)]: hashlib.sha256(bytes_of(buffer)).hexdigest() for buffer in moved}
