"""The sending of Muon's updates: each rank computes those of the matrices it owns, all ranks apply the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Newer releases of torch name it anew and warn of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sharing:
    """One collective a step: each rank's updates packed flat in the dtype they were computed in, padded to the largest.

    Lossless: nothing is converted on the way. ``shapes`` and ``owners`` are of all matrices, in the model's order.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        owners: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.shapes, self.owners, self.dtype, self.device, self.group = shapes, owners, dtype, device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        totals = [sum(s.numel() for s, o in zip(shapes, owners, strict=True) if o == r) for r in range(self.size)]
        self._padded = max(totals)
        self.bytes = self._padded * dtype.itemsize
        """Bytes that each rank hands to the collective."""

    def all(self, updates: list[Tensor]) -> list[Tensor]:
        """This rank's ``updates``, in order of its own matrices -> the updates of all matrices, in order.

        The list given is emptied, so that its tensors are free once they are packed.
        """
        packed = torch.zeros(self.size, self._padded, dtype=self.dtype, device=self.device)
        at = 0
        while updates:  # one name may keep a whole stack alive, so none is left over
            update = updates.pop(0).reshape(-1)
            packed[self.rank, at : at + update.numel()] = update
            at += update.numel()
            del update
        _all_gather(packed.view(-1), packed[self.rank], group=self.group)
        return self._unpack(packed)

    def _unpack(self, packed: Tensor) -> list[Tensor]:
        at = [0] * self.size
        found = []
        for shape, owner in zip(self.shapes, self.owners, strict=True):
            found.append(packed[owner][at[owner] : at[owner] + shape.numel()].view(shape))
            at[owner] += shape.numel()
        return found
