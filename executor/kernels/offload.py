"""Tensors to host memory and back, beside the compute stream: ``dormouse::offload`` and ``dormouse::restore``.

All copies of a device go through one stream of their own, so they are done in the order in which they were asked for,
and a buffer can be filled again as soon as its last copy back was asked for. The compute stream waits only where it is
told to (``reached``). On the CPU, and on tensors without memory, the same operators are plain copies.

Buffers are pinned where the device is a card. They are lent by size and come back when nobody holds them any more, so
from the second step on nothing is allocated. They are never given up: shapes are static, and a step needs them again.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from executor.kernels.registry import cost


class Pool:
    """Host buffers of one kind, pinned or not. ``free``: those not lent, by bytes. ``bytes``: of all, lent or not."""

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.bytes = pinned, 0
        self.free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, like: Tensor) -> Tensor:
        """A contiguous host tensor of the shape and dtype of ``like``, holding anything.

        Raises RuntimeError where the host has no more memory to pin.
        """
        nbytes = like.numel() * like.element_size()
        free = self.free[nbytes]
        buffer = free.pop() if free else self._made(nbytes)
        lent = buffer.view(like.dtype).view(like.shape)
        weakref.finalize(lent, free.append, buffer).atexit = False
        return lent

    def _made(self, nbytes: int) -> Tensor:
        if not self.pinned:
            self.bytes += nbytes
            return torch.empty(nbytes, dtype=torch.uint8)
        # Pages of its own, pinned in place: torch's own pinned allocator rounds up to a power of two.
        buffer = torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0))
        if failed:
            raise RuntimeError(
                f"the host pins no {nbytes} bytes beyond the {self.bytes} pinned for offloading (CUDA error {failed}); "
                "plan without moe_offload, or with a smaller batch"
            )
        # Before the pages go: CUDA would take others at the same address for these.
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
        self.bytes += nbytes
        return buffer


_pools = {pinned: Pool(pinned) for pinned in (False, True)}


def pool(device: torch.device) -> Pool:
    """The buffers for tensors of ``device``."""
    return _pools[device.type == "cuda"]


def pinned_bytes() -> int:
    """Pinned host memory that this process holds for offloaded tensors, lent or not."""
    return _pools[True].bytes


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@torch.library.custom_op("dormouse::offload", mutates_args=())
def _offload(x: Tensor) -> Tensor:
    """``x`` in host memory, once the side stream is ``reached``. ``x`` must not be freed or written before that."""
    host = pool(x.device).lend(x)
    if x.device.type != "cuda":
        return host.copy_(x)
    side = _side(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        return host.copy_(x, non_blocking=True)


@_offload.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu" if x.device.type == "cuda" else x.device)


@torch.library.custom_op("dormouse::restore", mutates_args=())
def _restore(host: Tensor, *, device: torch.device) -> Tensor:
    """``host`` on ``device``, once the side stream is ``reached``. The result must not be freed before that."""
    if device.type != "cuda":
        return host.clone()
    # Memory of the compute stream, whose earlier work in it must be over before the copy begins.
    x = torch.empty_like(host, device=device)
    side = _side(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return x.copy_(host, non_blocking=True)


@_restore.register_fake
def _(host: Tensor, *, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


CARRIED = 8
"""Operators of a model that a tensor's way out, or back, costs the host: hooks that look for what is worth it, buffers,
a stream that waits for another. On a host of H200 12 gave what medium's 33 of them took, and 3 what b1's did."""
cost("dormouse::offload", lambda x, out: 0, launches=CARRIED)
cost("dormouse::restore", lambda host, out, device: 0, launches=CARRIED)


def offload(x: Tensor) -> Tensor:
    """``dormouse::offload``."""
    host: Tensor = torch.ops.dormouse.offload(x)
    return host


def restore(host: Tensor, device: torch.device) -> Tensor:
    """``dormouse::restore``."""
    x: Tensor = torch.ops.dormouse.restore(host, device=device)
    return x


def reached(device: torch.device) -> Callable[[], None]:
    """A call that makes the compute stream wait for every copy of ``device`` asked for until now."""
    if device.type != "cuda":
        return lambda: None
    event = _side(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)
