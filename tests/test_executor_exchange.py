"""Gradients reduced in a narrower dtype: through two buffers, however large they are, and to the bit what one sum of
narrower copies gives. Over gloo, and over NCCL where there are two cards."""

from __future__ import annotations

import multiprocessing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from planner.door import REDUCES_IN_FLIGHT, staged_elements
from processes import free_port

BUCKET_BYTES, STEPS, WORLD = 8 * 1024, 3, 2
WIDTHS = (24, 64, 300, 8)  # one matrix is larger than any bucket


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for m, n in pairwise(WIDTHS) for layer in (nn.Linear(m, n), nn.Tanh())]).to(device)


def _gradients(model: nn.Module, call: Any, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=False)
    drawn = torch.Generator().manual_seed(10 * step + rank)
    device = next(model.parameters()).device
    call(torch.randn(5, WIDTHS[0], generator=drawn).to(device)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _rank(rank: int, port: int, kind: str, results: Any) -> None:
    import torch.distributed as dist

    from executor.clock import Clock
    from executor.exchange import Reducer, wrap

    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not export it
        "127.0.0.1", port, WORLD, is_master=rank == 0
    )
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None
    reducer = Reducer(group, "bf16", Clock(kind))
    model, alone = _model(device), _model(device)
    parallel = wrap(model, reducer, BUCKET_BYTES)
    wrong = 0
    for step in range(STEPS):
        reducer.begin()
        found = _gradients(model, parallel, rank, step)
        of_ranks = [_gradients(alone, alone, other, step) for other in range(WORLD)]
        wanted = [sum(part.bfloat16() for part in parts).float() for parts in zip(*of_ranks, strict=True)]
        wrong += sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    whole = [span for span in reducer.seen.spans if len(span) == 2]
    held = sorted({buffer.data_ptr(): buffer.nbytes for buffer, _ in reducer._lent}.values())
    results.put((rank, wrong, held, reducer.seen.bytes, len(reducer.seen.spans), len(whole)))
    dist.barrier()
    dist.destroy_process_group()


def _run(kind: str) -> list[Any]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    results: Any = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, port, kind, results)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=100) for _ in processes)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * WORLD
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_go_through_two_buffers_and_come_back_as_one_sum_of_narrower_copies(kind: str) -> None:
    if kind == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip("needs two cards")
    elements = sum(p.numel() for p in _model("cpu").parameters())
    for _, wrong, held, nbytes, sums, whole in _run(kind):
        assert wrong == 0 and nbytes == 2 * elements
        assert held == [2 * staged_elements(BUCKET_BYTES, elements)] * REDUCES_IN_FLIGHT
        assert sum(held) < elements
        assert sums == whole > 4 * elements / (1.5 * BUCKET_BYTES)
