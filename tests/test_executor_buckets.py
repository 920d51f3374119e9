"""DDP makes its final buckets before the first step, and never holds two sets of them beside a step's activations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from executor import smoke
from executor.clock import Clock
from executor.exchange import Reducer, wrap

WIDTH = 1000


class Wide(nn.Module):
    """Weights of 8 MB, and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    """Of a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Reducer(group, "fp32", Clock("cpu"))
    dist.destroy_process_group()


def test_no_step_makes_buckets_anew(reducer: Reducer) -> None:
    model, batch = Wide(), torch.ones(2, WIDTH)
    model.zero_grad(set_to_none=False)
    parallel = wrap(model, reducer, 2**22)
    for _ in range(2):
        smoke.build_buckets(parallel, model, batch, batch, "fp32")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        loss = parallel(batch, batch)
    largest = max(event.self_cpu_memory_usage for event in watched.key_averages())
    assert largest < 4 * WIDTH * WIDTH, "a forward took as much as a bucket of gradients"
    torch.autograd.backward(loss)
    assert all(p.grad is not None for p in model.parameters())
