"""Time the choices of the grouped product on this card, at the shape that a model calls it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import grouped
from executor.precision import DTYPES

REPEATS = 20


def grouped_seconds(shape: Mapping[str, int], batch: int, seq: int, dtype: str) -> dict[str, float]:
    """Seconds of one expert pass, forward and backward, by choice; those only that run on this card in ``dtype``.

    ``shape`` has experts, topk, width and hidden. Tokens are spread over the experts at random, alike for each choice.
    """
    torch.manual_seed(0)
    rows, experts = batch * seq * shape["topk"], shape["experts"]
    counts = torch.bincount(torch.randint(experts, (rows,)), minlength=experts)
    ends = counts.cumsum(0).to(torch.int32).cuda()
    sizes: list[tuple[int, ...]] = [(rows, shape["width"])]
    sizes += [
        (experts, *pair) for pair in ((shape["width"], shape["hidden"]),) * 2 + ((shape["hidden"], shape["width"]),)
    ]
    tensors = [torch.randn(size, device="cuda").to(DTYPES[dtype]).requires_grad_() for size in sizes]
    gradient = torch.randn(sizes[0], device="cuda").to(DTYPES[dtype])
    able = torch.cuda.get_device_capability()
    found = {}
    for row in grouped.ROWS:
        least = tuple(int(part) for part in (row["min_sm"] or "0.0").split("."))
        if "cuda" in row["devices"] and dtype in row["dtypes"] and able >= least:
            call = partial(_pass, grouped.choices()[row["name"]], tensors, ends, gradient)
            # A graph has the card's own time alone; what reads group sizes back cannot be captured in one.
            found[row["name"]] = _seconds(call if row["name"] == "grouped_loop" else _captured(call))
    return found


def _pass(product: Callable[..., Tensor], tensors: list[Tensor], ends: Tensor, gradient: Tensor) -> None:
    x, gate, up, down = tensors
    hidden = F.silu(product(x, gate, ends, full=True)) * product(x, up, ends, full=True)
    torch.autograd.grad(product(hidden, down, ends, full=True), tensors, gradient)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """``call`` as one graph, after it ran on a side stream so that nothing is compiled or allocated in capture."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _seconds(call: Callable[[], None]) -> float:
    """Median of REPEATS by events, after two to warm up."""
    times: list[float] = []
    for repeat in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return median(times)
