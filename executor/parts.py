"""What a rank holds of a tensor: all of it, or under FSDP2 its rows of it. Everything that reads or writes a model's
tensors outside of the step (fingerprints, checkpoints, gates) goes through here, and so need not know which it is.

Rows are dealt as torch.chunk deals them: every rank has ceil(rows / ranks) but the last, which may have fewer or none.
Legend: R rows (the size of the first dimension), P ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def is_part(tensor: Any) -> bool:
    """Whether this rank holds only some rows of ``tensor``: a DTensor (asked by what it can do, since its import is
    slow)."""
    return hasattr(tensor, "full_tensor")


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, where it lies: no copy."""
    if not is_part(tensor):
        return tensor
    with torch.no_grad():
        found: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, on every rank. Of a part it is a collective: every rank calls it, in the same order."""
    found: Tensor = tensor.full_tensor() if is_part(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def put(tensor: Tensor, values: Tensor) -> None:
    """Copy this rank's rows of ``values``, a whole tensor, into what it holds of ``tensor``."""
    if not is_part(tensor):
        tensor.copy_(values)
        return
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    rows = torch.chunk(values, mesh.size())
    rank = mesh.get_local_rank()
    if rank < len(rows):  # else there are more ranks than rows
        own(tensor).copy_(rows[rank])


def wholes(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each of ``tensors`` whole, one after another: no more than one is gathered at a time."""
    for tensor in tensors:
        yield whole(tensor)
