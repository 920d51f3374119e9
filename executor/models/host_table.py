"""A table in host memory whose rows come to the device for one forward, brought while the one before it still computes.

The rows of a forward are known from its inputs alone, so they can be prepared early; their values are known only when
the step before has updated them. Each table therefore has one worker, a thread that takes its jobs in order:

    main thread   forward k | prefetch(k+1) | backward k | give(k) ............... | take(k+1) = forward k+1
    worker                    hash, distinct rows of k+1        update k, send k+1

Because the update of step k stands before the sending of k+1 in one queue, what a forward reads is what training on
the device would have read. Copies run on a side stream, from and to pinned memory, ordered by events. The host waits in
one place, ``take``: the layer of step k+1 cannot be launched before the update of step k is done, and that needs
backward k to have reached the table. All that lies between (the rest of backward, the optimizers, the layers before the
table) overlaps.

Shapes on the device are static: n = B T S rows are set aside, of which the distinct ones are filled. The rest is never
looked up, so its gradient is 0, and only distinct rows cross the link.

Legend: B batch, T length, S lookups a position, R rows of the table, E channels a row, n = B T S, d distinct rows of n.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Update = Callable[[Tensor, Tensor, Tensor | None], None]
"""(distinct rows [d] int64, their gradient [d, E], keep), all in host memory."""


class Arriving(NamedTuple):
    """A tensor in host memory, and the event after which it holds what was copied."""

    tensor: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The tensor with its content. Blocks the calling thread."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensor


@dataclass(eq=False)
class Window:
    """One forward's rows [n, E] and slots [B, T, S] (places in rows) on its device.

    ``version`` is the inputs' count of writes: a tensor that was refilled is no more the one prepared for.
    ``prepared`` gives the distinct rows [d] of the table and the slots, on the host; ``sent`` the event of arrival.
    """

    inputs: Tensor
    version: int
    rows: Tensor
    slots: Tensor
    made: torch.cuda.Event | None
    prepared: Future[tuple[Tensor, Tensor]]
    sent: Future[torch.cuda.Event | None] | None = None


class HostTable:
    """A table ``weight`` [R, E]; ``indices`` gives the rows [B, T, S] of inputs [B, T]; all in host memory."""

    def __init__(self, weight: Tensor, indices: Callable[[Tensor], Tensor], lookups: int) -> None:
        self.weight, self._indices, self._lookups = weight, indices, lookups
        self._worker = ThreadPoolExecutor(1, "host-table")
        self._current: Window | None = None  # looked up by this step's forward
        self._ahead: list[Window] = []  # prepared for forwards to come, in their order
        self._applied: Future[None] | None = None

    def prefetch(self, inputs: Tensor) -> None:
        """Begin to bring the rows for ``inputs`` [B, T], the very tensor that a forward to come will be called with.

        It may be called before this step's forward or after it; two are kept.
        """
        self._ahead = [*self._ahead[-1:], self._open(inputs)]

    def take(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, E] and slots [B, T, S] on the device of ``inputs``; in grad mode the rows are a leaf.

        The same tensor gives the same leaf until its backward, so a block that runs its forward twice has one gradient.
        Inputs that were not prefetched are looked up on the spot, and so is everything outside of grad mode.
        """
        if not torch.is_grad_enabled():
            return self._arrived(self._open(inputs))
        if not _is_for(self._current, inputs):
            self._current = next((window for window in self._ahead if _is_for(window, inputs)), None)
            if self._current is None:
                self._current = self._open(inputs)
            else:
                self._ahead = self._ahead[self._ahead.index(self._current) + 1 :]
        assert self._current is not None
        rows, slots = self._arrived(self._current)
        return rows.requires_grad_(), slots

    def leaf(self) -> Tensor:
        """The rows [n, E] that this step's forward looked up. Raises RuntimeError where there was none."""
        if self._current is None:
            raise RuntimeError("no forward has looked up rows of the table since the last step")
        return self._current.rows

    def give(self, update: Update, keep: Tensor | None) -> None:
        """End the step: the worker calls ``update`` once the gradient of the rows looked up is in host memory."""
        gradient, window = self.leaf().grad, self._current
        assert window is not None and gradient is not None
        distinct, _ = window.prepared.result()
        arriving = _to_host(gradient[: len(distinct)])
        kept = None if keep is None else _to_host(keep.clone())
        self._applied = self._worker.submit(_apply, update, distinct, arriving, kept)
        self._current = None
        for ahead in self._ahead:
            ahead.sent = self._worker.submit(self._send, ahead)

    def settle(self) -> None:
        """Wait until every update is done. Raises what one of them raised."""
        if self._applied is not None:
            self._applied.result()

    def _open(self, inputs: Tensor) -> Window:
        """Set memory aside on the device, and let the worker find out which rows are for it."""
        lookups, device = inputs.numel() * self._lookups, inputs.device
        rows = torch.empty(lookups, self.weight.shape[1], dtype=self.weight.dtype, device=device)
        slots = torch.empty(*inputs.shape, self._lookups, dtype=torch.int64, device=device)
        made = _recorded(torch.cuda.current_stream(device)) if inputs.is_cuda else None
        prepared = self._worker.submit(self._prepare, _to_host(inputs))
        return Window(inputs, inputs._version, rows, slots, made, prepared)

    def _prepare(self, inputs: Arriving) -> tuple[Tensor, Tensor]:
        distinct, slots = torch.unique(self._indices(inputs.wait()), return_inverse=True)
        return distinct, slots

    @torch.no_grad()
    def _send(self, window: Window) -> torch.cuda.Event | None:
        """Copy the distinct rows and the slots to the device; gives the event of their arrival."""
        distinct, slots = window.prepared.result()
        pinned = window.rows.is_cuda
        found = torch.empty(len(distinct), self.weight.shape[1], dtype=self.weight.dtype, pin_memory=pinned)
        torch.index_select(self.weight, 0, distinct, out=found)
        if not pinned:
            window.rows[: len(distinct)] = found
            window.slots.copy_(slots)
            return None
        stream = _side(window.rows.device)
        places = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots)
        assert window.made is not None
        stream.wait_event(window.made)
        with torch.cuda.stream(stream):
            for target, source in ((window.rows[: len(distinct)], found), (window.slots, places)):
                target.copy_(source, non_blocking=True)
                target.record_stream(stream)
        return _recorded(stream)

    def _arrived(self, window: Window) -> tuple[Tensor, Tensor]:
        """The rows and slots of ``window``, to be used on the current stream. Waits for the worker, not the device."""
        if window.sent is None:
            window.sent = self._worker.submit(self._send, window)
        arrival = window.sent.result()
        self.settle()
        if arrival is not None:
            torch.cuda.current_stream(window.rows.device).wait_event(arrival)
        return window.rows, window.slots


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies between the host and ``device``."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _to_host(tensor: Tensor) -> Arriving:
    """Begin to copy ``tensor``, as it is at this point of the current stream, to pinned memory."""
    if not tensor.is_cuda:
        return Arriving(tensor, None)
    stream = _side(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        target.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
    return Arriving(target, _recorded(stream))


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event at this point of ``stream``; who waits for it sleeps, and leaves the core to others."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(stream)
    return event


def _is_for(window: Window | None, inputs: Tensor) -> bool:
    """Whether ``window`` was made for ``inputs`` as they are, and no backward has gone through it yet."""
    if window is None or window.inputs is not inputs or window.version != inputs._version:
        return False
    return window.rows.grad is None


def _apply(update: Update, rows: Tensor, gradient: Arriving, keep: Arriving | None) -> None:
    update(rows, gradient.wait(), None if keep is None else keep.wait())
