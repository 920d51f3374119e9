"""The all-reduce of gradients: DDP's communication hook, which reduces in the planned dtype and counts what it did.

Gradients come weighted by their rank's share of the step's tokens, so their plain sum over ranks is the gradient of the
mean over the step's tokens, whatever the batches are.
"""

# Annotations are evaluated in this file: DDP reads those of the hook and takes no text for them.

import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from executor.clock import Clock, Moment
from executor.precision import DTYPES, NAMES
from planner.door import REDUCES_IN_FLIGHT, staged_elements

# Buffers are not sent before each forward. Newer releases of torch name that option anew and warn of the old name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


@dataclass
class Exchanged:
    """What one step handed to the sums over ranks: bytes, their dtypes, how many sums (``buckets``), and a (launch,
    completion) a collective. ``gathered``: bytes of parameters made whole, where they are sharded. ``blocking``: the
    rank waited for each collective where it launched it, so that none was hidden. ``stalls``: (start, end) of each time
    that backward waited for a collective meanwhile."""

    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    buckets: int = 0
    spans: list[list[Moment]] = field(default_factory=list)
    stalls: list[tuple[Moment, Moment]] = field(default_factory=list)
    gathered: int = 0
    blocking: bool = False

    def whole_spans(self) -> list[tuple[Moment, Moment]]:
        return [(span[0], span[1]) for span in self.spans if len(span) == 2]


class Reducer:
    """The state of the hook. ``seen`` is renewed by `begin` before each backward; ``entered`` is when (monotonic) this
    rank last handed a bucket over, ``handed`` how many it has handed over in all.

    What is reduced in a narrower dtype goes through a few buffers of one size, each lent anew when what it held is back
    in the gradients. So a narrower copy of all gradients is never held, and one large tensor moves in several parts.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: str, clock: Clock) -> None:
        self.group, self.dtype, self.clock = group, DTYPES[dtype], clock
        self.seen = Exchanged()
        self.entered, self.handed = 0.0, 0
        self.most = 0
        """Elements of a buffer."""
        self._lent: deque[tuple[Tensor, torch.futures.Future[Tensor]]] = deque()

    def begin(self) -> None:
        self.seen = Exchanged()

    def held(self) -> list[Tensor]:
        """The buffers, which are kept from step to step."""
        return [whole for whole, _ in self._lent]

    def narrowed(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Sum ``gradients`` [n], n at most ``most``, in the reduce dtype, and put the sum back in them.

        With all buffers lent, the stream of the backward (on a CPU its thread) waits for the first of them: the link
        has the others to move meanwhile.
        """
        if len(self._lent) < REDUCES_IN_FLIGHT:
            whole = torch.empty(self.most, dtype=self.dtype, device=gradients.device)
        else:
            whole, before = self._lent.popleft()
            start = self.clock.now()
            before.wait()
            self.seen.stalls.append((start, self.clock.now()))
        sent = whole[: gradients.numel()].copy_(gradients)
        future = self.summed(sent, lambda: gradients.copy_(sent))
        self._lent.append((whole, future))
        return future

    def summed(self, sent: Tensor, back: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Start the sum of ``sent`` over the ranks; its future gives what ``back`` does once it is there."""
        seen = self.seen
        seen.bytes += sent.nbytes
        seen.buckets += 1
        seen.dtypes.add(NAMES.get(sent.dtype, str(sent.dtype)))
        span = [self.clock.now()]
        seen.spans.append(span)

        def done(future: torch.futures.Future[Any]) -> Tensor:
            future.value()  # raises what the collective raised
            span.append(self.clock.now())
            return back()

        return sum_over_ranks(sent, self.group).then(done)


def wrap(model: nn.Module, reducer: Reducer, bucket_bytes: int) -> DistributedDataParallel:
    """``model`` under DDP, its buckets reduced by `reduce_bucket`. Weights become those of rank 0."""
    parallel = DistributedDataParallel(
        model,
        process_group=reducer.group,
        bucket_cap_mb=bucket_bytes / 2**20,  # DDP takes fractions
        gradient_as_bucket_view=True,
        **_KEEP_BUFFERS,
    )
    reducer.most = staged_elements(bucket_bytes, sum(p.numel() for p in model.parameters() if p.requires_grad))
    parallel.register_comm_hook(reducer, reduce_bucket)
    return parallel


def reduce_bucket(reducer: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum one bucket over the ranks, in the reduce dtype where that is narrower, and give it back in its own."""
    hook: Reducer = reducer
    hook.entered, hook.handed = time.monotonic(), hook.handed + 1
    gradients: Tensor = bucket.buffer()
    if hook.dtype.itemsize >= gradients.dtype.itemsize:
        return hook.summed(gradients, lambda: gradients)
    # In as few parts as can be, all about as large.
    parts = gradients.tensor_split(-(-gradients.numel() // hook.most))
    *earlier, last = [hook.narrowed(part) for part in parts]

    def whole(future: torch.futures.Future[Tensor]) -> Tensor:
        future.value()
        for other in earlier:
            other.wait()
        return gradients

    return last.then(whole)


def sum_over_ranks(buffer: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    """Start the sum of ``buffer`` over the ranks of ``group``, in place."""
    work = dist.all_reduce(buffer, dist.ReduceOp.SUM, group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future
