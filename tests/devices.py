"""What a reference test runs on, and how near to its reference it must come."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

# The same test on the CPU always, and on a card with `pytest -m gpu`.
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

# ||found - wanted|| / ||wanted||, by the dtype that the arithmetic had.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative(found: Tensor, wanted: Tensor) -> float:
    """The relative error of ``found``, in float64 on the CPU; NaN anywhere gives NaN, which is under no bound."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-300))


def assert_near(found: Iterable[Tensor], wanted: Iterable[Tensor], dtype: torch.dtype, names: Iterable[str]) -> None:
    """Each of ``found`` within the bound of ``dtype``; ``names`` go into the message."""
    errors = {name: relative(a, b) for name, a, b in zip(names, found, wanted, strict=True)}
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors
