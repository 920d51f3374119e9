"""What passes between cards, timed inside a timing process: all-reduce by NCCL, and copies from card to card.

Every result is checked against known values: a broken path between cards may hang, and may also give wrong numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from planner.machine.curve import timed_curve
from planner.machine.stopwatch import Place, settled, tried
from schemas.form import Json

_DROPPED = 3  # first repeats of a size: ranks are not yet in step
_SMALL_BYTES = 2**22  # up to here three times the repeats, since they cost nothing
_TILE = 8191  # elements; prime, so that no two slices of a ring hold the same
LEAD_CYCLES = 150_000  # a repeat: torch takes longer to queue a collective than an operator
_COPY_SHARE = 0.1  # seconds a direction of a pair

Request = Mapping[str, Json]


def group(request: Request) -> Json:
    """One rank's part of an all-reduce in bf16 over growing sizes, and sizes between them (`timed_curve`).

    Returns:
        {"curve": [[bytes, samples of seconds]], "nccl": version}, or {"wrong": bytes} where a sum was not right.
        The curve ends early once ``budget`` seconds are spent.
    """
    import torch
    import torch.distributed as dist

    place = Place(0, request["dry"])
    if not place.dry and not dist.is_nccl_available():
        return {"error": "this torch is built without NCCL"}
    if not place.dry:
        torch.cuda.set_device(place.device)
    dist.init_process_group(
        "gloo" if place.dry else "nccl",
        init_method=f"file://{request['rendezvous']}",
        rank=request["rank"],
        world_size=request["world"],
        timeout=timedelta(seconds=4 * request["deadline"]),  # the asker's deadline comes first
        device_id=None if place.dry else place.device,
    )
    found = _curve(place, request)
    if "wrong" not in found:  # else the others still wait inside a collective, and are ended from outside
        _spent(place, 0.0)
        dist.destroy_process_group()
    return {**found, "nccl": None if place.dry else _nccl_version()}


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def tile(rank: int, world: int) -> Any:
    """Small integers whose sum over all ranks bf16 holds exactly, in whatever order they are added."""
    import torch

    values = max(2, min(16, 256 // world))
    return ((torch.arange(_TILE) * 5 + torch.arange(_TILE) // 7 + 3 * rank) % values).to(torch.bfloat16)


def _curve(place: Place, request: Request) -> Json:
    import torch
    import torch.distributed as dist

    rank, world, sizes = request["rank"], request["world"], request["sizes"]
    elements = max(sizes) // 2
    pattern = tile(rank, world).to(place.device).repeat(-(-elements // _TILE))[:elements]
    expected = sum((tile(other, world).float() for other in range(world)), torch.zeros(_TILE))
    expected = expected.to(torch.bfloat16).to(place.device)
    payload = torch.empty_like(pattern)
    middle = payload[: sizes[len(sizes) // 2] // 2].zero_()
    for _ in range(10):  # connections are made by the first, buffers by the first of this size
        dist.all_reduce(middle)
    start = time.perf_counter()

    def timing(size: int) -> list[float]:
        """The first rank's times, on every rank, so that all go on alike."""
        part = payload[: size // 2]
        part.copy_(pattern[: size // 2])
        dist.all_reduce(part)
        if not is_right(part, expected):
            raise _Wrong(size)
        count = request["repeats"] * (3 if size <= _SMALL_BYTES else 1) + _DROPPED
        times = place.times(partial(dist.all_reduce, part), count, LEAD_CYCLES * count)[_DROPPED:]
        first = torch.tensor(times, dtype=torch.float64, device=place.device)
        dist.broadcast(first, 0)
        return [float(value) for value in first.tolist()]

    try:
        found = timed_curve(sizes, timing, lambda: _spent(place, time.perf_counter() - start) > request["budget"])
    except _Wrong as wrong:
        return {"wrong": wrong.size}
    return {"curve": [[size, times] for size, times in found]}


class _Wrong(Exception):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def is_right(part: Any, expected: Any) -> bool:
    whole = len(part) // _TILE * _TILE
    rows, rest = part[:whole].view(-1, _TILE), part[whole:]
    return bool((rows == expected).all()) and bool((rest == expected[: len(rest)]).all())


def _spent(place: Place, seconds: float) -> float:
    """The most seconds that any rank has spent: all ranks decide alike. It also brings the ranks together."""
    import torch
    import torch.distributed as dist

    spent = torch.tensor([seconds], device=place.device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def pairs(request: Request) -> Json:
    """{"pairs": [{"samples": B/s both ways, "stable", "peer"} or {"error"}]} of each of ``pairs`` of card indices."""
    return {"pairs": [tried(partial(_pair, request, *pair)) for pair in request["pairs"]]}


def _pair(request: Request, first: int, second: int) -> Json:
    import torch

    one, other = (Place(index, request["dry"]) for index in (first, second))
    found = [_one_way(*way, request) for way in ((one, other), (other, one))]
    errors = [way for way in found if "error" in way]
    if errors:
        return errors[0]
    peer = None if request["dry"] else torch.cuda.can_device_access_peer(first, second)
    samples = [value for way in found for value in way["samples"]]
    return {"samples": samples, "stable": all(way["stable"] for way in found), "peer": peer}


def _one_way(source: Place, target: Place, request: Request) -> Json:
    import torch

    size = request["copy_bytes"]
    lack = source.lacks(size) or target.lacks(3 * size)
    if lack:
        return {"error": lack}
    numbers = torch.arange(size // 4, dtype=torch.int32, device=source.device)
    copied = torch.full((size // 4,), -1, dtype=torch.int32, device=target.device)
    target.wait()

    def batch(count: int) -> list[float]:
        return source.times(lambda: copied.copy_(numbers, non_blocking=True), count)

    seconds, stable = settled(batch, request["repeats"], min(_COPY_SHARE, request["share"]))
    target.wait()
    if not torch.equal(copied, torch.arange(size // 4, dtype=torch.int32, device=target.device)):
        return {"error": "what arrived differs from what was sent: the path between these cards is broken"}
    return {"samples": [size / value for value in seconds], "stable": stable}
