"""The all-reduce of gradients: DDP's communication hook, which reduces in the planned dtype and counts what it did.

Gradients come weighted by their rank's share of the step's tokens, so their plain sum over ranks is the gradient of the
mean over the step's tokens, whatever the batches are.
"""

# Annotations are evaluated in this file: DDP reads those of the hook and takes no text for them.

import inspect
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from executor.clock import Clock, Moment
from executor.precision import DTYPES, NAMES

# Buffers are not sent before each forward. Newer releases of torch name that option anew and warn of the old name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


@dataclass
class Exchanged:
    """What one step handed to the sums over ranks: bytes, their dtypes, how many sums (``buckets``), and a (launch,
    completion) a collective. ``gathered``: bytes of parameters made whole, where they are sharded. ``blocking``: the
    rank waited for each collective where it launched it, so that none was hidden."""

    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    buckets: int = 0
    spans: list[list[Moment]] = field(default_factory=list)
    gathered: int = 0
    blocking: bool = False

    def whole_spans(self) -> list[tuple[Moment, Moment]]:
        return [(span[0], span[1]) for span in self.spans if len(span) == 2]


class Reducer:
    """The state of the hook. ``seen`` is renewed by `begin` before each backward; ``entered`` is when (monotonic) this
    rank last handed a bucket over, ``handed`` how many it has handed over in all."""

    def __init__(self, group: dist.ProcessGroup, dtype: str, clock: Clock) -> None:
        self.group, self.dtype, self.clock = group, DTYPES[dtype], clock
        self.seen = Exchanged()
        self.entered, self.handed = 0.0, 0

    def begin(self) -> None:
        self.seen = Exchanged()


def wrap(model: nn.Module, reducer: Reducer, bucket_bytes: int) -> DistributedDataParallel:
    """``model`` under DDP, its buckets reduced by `reduce_bucket`. Weights become those of rank 0."""
    parallel = DistributedDataParallel(
        model,
        process_group=reducer.group,
        bucket_cap_mb=bucket_bytes / 2**20,  # DDP takes fractions
        gradient_as_bucket_view=True,
        **_KEEP_BUFFERS,
    )
    parallel.register_comm_hook(reducer, reduce_bucket)
    return parallel


def reduce_bucket(reducer: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum one bucket over the ranks, in the reduce dtype where that is narrower, and give it back in its own."""
    seen: Exchanged = reducer.seen
    reducer.entered, reducer.handed = time.monotonic(), reducer.handed + 1
    gradients: Tensor = bucket.buffer()
    narrower = reducer.dtype.itemsize < gradients.dtype.itemsize
    sent = gradients.to(reducer.dtype) if narrower else gradients
    seen.bytes += sent.nbytes
    seen.buckets += 1
    seen.dtypes.add(NAMES.get(sent.dtype, str(sent.dtype)))
    span = [reducer.clock.now()]
    seen.spans.append(span)

    def done(future: torch.futures.Future[Any]) -> Tensor:
        future.value()  # raises what the collective raised
        span.append(reducer.clock.now())
        if narrower:
            gradients.copy_(sent)
        return gradients

    return sum_over_ranks(sent, reducer.group).then(done)


def sum_over_ranks(buffer: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    """Start the sum of ``buffer`` over the ranks of ``group``, in place."""
    work = dist.all_reduce(buffer, dist.ReduceOp.SUM, group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future
