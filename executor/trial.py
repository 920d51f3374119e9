"""The link between the ranks, tried before step 0: the all-reduce of one bucket, checked, timed, and under a deadline.

A broken path between cards may hang, sum wrongly or crawl; each ends, or is told, with what is set of NCCL and what to
try. What comes of it is measured: the seconds of a bucket with nothing beside it, and the rate that each rank sends at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from executor.meeting import RankFailed
from executor.precision import DTYPES
from executor.slices import ExchangeSlice
from executor.watch import within
from planner.machine.benchmark_links import LEAD_CYCLES, is_right, tile
from planner.machine.ring_readings import nccl_settings
from planner.machine.stopwatch import Place

Value = TypeVar("Value")

SECONDS = 120.0
"""For making the connections and for the trial; NCCL was seen to take up to 20 s to start."""
CRAWLS = 2.0
"""A bucket that takes this many times the longest that was reckoned with is told as a crawl."""

_WARM, _REPEATS = 3, 12


class LinkFailed(RankFailed):
    """The ranks cannot reach each other, or what arrives is wrong. No collective is to be waited for any more."""


@dataclass(frozen=True)
class Trial:
    """Seconds of each all-reduce of ``bytes``, over ``ranks``."""

    seconds: list[float]
    bytes: int
    ranks: int

    @property
    def rate(self) -> float:
        """Bytes a second that each rank sent: 2(P-1)/P of the bucket, as every ring all-reduce does."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / median(self.seconds)


def made(seconds: float, work: Callable[[], Value]) -> Value:
    """What ``work`` gives, or raises, where it does within ``seconds``. Raises LinkFailed where it does not."""

    def caught() -> tuple[Value | None, BaseException | None]:
        try:
            return work(), None
        except BaseException as error:
            return None, error

    found = within(seconds, caught)
    if found is None:
        raise LinkFailed(f"all ranks: no all-reduce came within {seconds:g} s of the start; {_told()}")
    value, error = found
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only beside an error


def tried(group: dist.ProcessGroup, rank: int, device: torch.device, plan: ExchangeSlice) -> Trial:
    """The trial, which every rank makes at once. Raises LinkFailed where a sum is not right."""
    world, dtype = dist.get_world_size(group), DTYPES[plan.reduce_dtype]
    elements = max(1, -(-(plan.payload or 0) // max(1, plan.buckets) // dtype.itemsize))
    tiles = [tile(other, world).to(device) for other in range(world)]
    payload = tiles[rank].to(dtype).repeat(-(-elements // len(tiles[rank])))[:elements]
    for _ in range(_WARM):  # connections are made by the first
        start = payload.clone()
        dist.all_reduce(start, group=group)
        if not is_right(start, torch.stack(tiles).sum(0, dtype=dtype)):
            raise LinkFailed(f"rank {rank}: the sum of {start.nbytes} B over the ranks came out wrong; {_told()}")
    place = Place(0, None if device.type == "cuda" else {})
    seconds = place.times(lambda: dist.all_reduce(payload, group=group), _REPEATS, LEAD_CYCLES * _REPEATS)
    return Trial(seconds[_WARM:], payload.nbytes, world)


def crawl(found: Trial, plan: ExchangeSlice) -> str | None:
    """A line that tells of a link far slower than the plan reckons with; None where it is not."""
    seconds = median(found.seconds)
    if plan.alone_high is None or seconds <= CRAWLS * plan.alone_high:
        return None
    told = (
        f"the link between the ranks crawls: {found.bytes} B took {1e3 * seconds:.3g} ms ({found.rate / 1e9:.3g} GB/s"
    )
    return f"{told} a rank), and the plan reckons with {1e3 * plan.alone_high:.3g} ms at most; {_told()}"


def _told() -> str:
    settings, hint = nccl_settings()
    return f"{settings}; {hint}"
