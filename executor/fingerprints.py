"""What a model is, in few bytes. Two digests: SHA-256 of every byte, which a record keeps, and lanes of sums, which the
device computes in one pass, so that ranks can be compared while they train.

SHA-256 of a billion parameters takes the host seconds; lanes take an H200 1.4 ms a GB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from executor.parts import wholes

LANES = 1024
"""Numbers that are added up apart: differences cancel only within a lane. (Exclusive ors, which are faster, would not
show what turns one bit of all numbers.)"""
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


def fingerprint(model: nn.Module) -> str:
    """SHA-256, in hex, of the bytes of every parameter, then of every buffer that a checkpoint keeps, by name.

    Where parameters are sharded, every rank gathers them, one after another, and comes to a digest of its own.
    """
    digest = hashlib.sha256()
    for _, tensor in _kept(model):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of ``tensor``'s numbers, in their order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def lanes(model: nn.Module) -> tuple[Tensor, list[tuple[str, int]]]:
    """[n] uint8 on the model's device, of the same tensors: of each the sum of every LANES-th of its numbers, taken as
    integers by their bits, and its last ones as they are; and how many of the n are which tensor's. Nothing is read by
    the host. A number that differs shows, unless others in its lane differ by as much the other way."""
    found = [(name, part) for name, tensor in _kept(model) for part in _folded(tensor.detach().reshape(-1))]
    whole = torch.cat([part for _, part in found] or [torch.empty(0, dtype=torch.uint8)])
    return whole, [(name, len(part)) for name, part in found]


def owner(sizes: Sequence[tuple[str, int]], place: int) -> str:
    """The tensor that byte ``place`` of lanes is of."""
    ends = accumulate(size for _, size in sizes)
    return next(name for (name, _), end in zip(sizes, ends, strict=True) if place < end)


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, then every buffer that a checkpoint keeps, in the order of their names."""
    parameters, state = dict(model.named_parameters()), model.state_dict()
    buffers = {name: state[name] for name in sorted(state.keys() - parameters.keys())}
    kept: dict[str, Tensor] = {name: parameters[name] for name in sorted(parameters)}
    kept |= {name: item for name, item in buffers.items() if isinstance(item, Tensor)}
    yield from zip(kept, wholes(kept.values()), strict=True)


def _folded(flat: Tensor) -> Iterator[Tensor]:
    """The bytes of ``flat``'s lanes, and of what does not fill a row of them."""
    rows = len(flat) // LANES
    if rows > 1:
        numbers = flat[: rows * LANES].view(rows, LANES).view(_AS_INTEGERS[flat.element_size()])
        yield numbers.sum(0, dtype=torch.int64).view(torch.uint8)
    rest = flat[rows * LANES :] if rows > 1 else flat
    if len(rest):
        yield rest.view(torch.uint8)
