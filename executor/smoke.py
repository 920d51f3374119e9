"""The smoke launch: one discarded forward and backward, before anything counts.

It proves that the planned kernels run and in which dtype, that loss and gradients are finite, and, under DDP, lets the
final buckets be built. No state advances: windows are a function of the step, and gradients are zeroed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from executor.kernels import registry
from executor.precision import Products, compute_in
from schemas.form import Json


def launch(rank: int, model: nn.Module, inputs: Tensor, targets: Tensor, dtype: str) -> dict[str, Json]:
    """Run it outside DDP, and say what ran on ``rank``.

    Returns:
        ``error``: what it raised, else None; ``finite``, and ``nonfinite``: the loss and the gradients that are not;
        ``dtype``: of the products with parameters, by the largest share of their FLOPs (None where there are none);
        ``kernels``: of each kernel, the choice that ran (several: separated by commas).
    """
    registry.calls.clear()
    products, bad = Products(), []
    try:
        with products:
            with compute_in(dtype, inputs.device.type):
                loss = model(inputs, targets)
            torch.autograd.backward(loss)
        bad = _not_finite(model, loss.detach())
    except (RuntimeError, NotImplementedError) as error:  # what a kernel raises that does not serve this device
        return failed(rank, error)
    model.zero_grad(set_to_none=False)
    ran: dict[str, list[str]] = {}
    for kernel, choice in sorted(registry.calls):
        ran.setdefault(kernel, []).append(choice)
    return {
        "rank": rank,
        "error": None,
        "finite": not bad,
        "nonfinite": bad,
        "dtype": products.ran(),
        "kernels": {kernel: ", ".join(choices) for kernel, choices in ran.items()},
    }


def failed(rank: int, error: Exception) -> dict[str, Json]:
    """The row of a rank that ``error`` kept from a smoke launch."""
    words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
    return {"rank": rank, "error": words, "finite": False, "nonfinite": [], "dtype": None, "kernels": {}}


def _not_finite(model: nn.Module, loss: Tensor) -> list[str]:
    """The loss and the gradients that are not finite, and parameters without one (DDP would wait for it for ever)."""
    bad = [] if torch.isfinite(loss) else ["loss"]
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            bad += [f"gradient of {name} (it has none)"] if parameter.requires_grad else []
        elif not torch.isfinite(parameter.grad).all():
            bad.append(f"gradient of {name}")
    return bad


def build_buckets(
    forward: Callable[[Tensor, Tensor], Tensor], model: nn.Module, inputs: Tensor, targets: Tensor, dtype: str
) -> None:
    """One more, through DDP: it orders its buckets by the first backward that it sees."""
    with compute_in(dtype, inputs.device.type):
        loss = forward(inputs, targets)
    torch.autograd.backward(loss)
    model.zero_grad(set_to_none=False)
