"""AdamW against torch's own, and bit for bit on CPU kernels that round differently."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from elsewhere import both
from executor.optim import steps
from executor.optim.adamw import AdamW

SHAPES = ((37, 11), (64,), (3, 5, 7), (1,))


def uniform(shape: Sequence[int], seed: int) -> Tensor:
    """Values in [-1, 1), the same bits on all CPU kernels (torch.randn's are not: its logarithm is vectorised)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(uniform(shape, i).to(dtype))) for i, shape in enumerate(SHAPES)]


def set_gradients(named: list[tuple[str, nn.Parameter]], step: int) -> None:
    for i, (_, p) in enumerate(named):
        p.grad = uniform(p.shape, 100 * step + i + 10).to(p.dtype)


def weights_after(steps: int, own: bool = True) -> bytes:
    """The bytes of all weights after some steps: run in other processes."""
    named = parameters()
    if own:
        step = AdamW(named, weight_decay=0.1).step
    else:
        torchs = torch.optim.AdamW([p for _, p in named], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        step = lambda _: torchs.step()  # noqa: E731
    for i in range(steps):
        set_gradients(named, i)
        step(3e-3)
    return b"".join(p.detach().numpy().tobytes() for _, p in named)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_twenty_steps_equal_torchs_own_adamw(dtype: torch.dtype, bound: float) -> None:
    named, reference = parameters(dtype), parameters(dtype)
    own = AdamW(named, weight_decay=0.1)
    groups = [
        {"params": [p for _, p in reference if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in reference if p.ndim < 2], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        for optimizer_named in (named, reference):
            set_gradients(optimizer_named, step)
        own.step(3e-3)
        torchs.step()
    for (_, p), (_, r) in zip(named, reference, strict=True):
        assert float((p - r).detach().norm() / r.detach().norm()) < bound


def test_weights_are_bit_identical_on_cpu_kernels_that_round_differently() -> None:
    plain, vectors = both("test_executor_adamw.weights_after(20)")
    assert plain == vectors


def test_the_pair_of_processes_does_tell_torchs_own_adamw_apart() -> None:
    plain, vectors = both("test_executor_adamw.weights_after(20, own=False)")
    assert plain != vectors, "these CPU kernels no longer round differently: the test above proves nothing here"


def test_chunks_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_after(3)
    monkeypatch.setattr(steps, "CHUNK_BYTES", 300)
    assert weights_after(3) == whole
    assert len(AdamW(parameters())._chunks) > 1


def test_state_bytes_are_two_copies_of_the_parameters() -> None:
    named = parameters()
    assert AdamW(named).state_bytes() == {"adamw_state": 2 * 4 * sum(p.numel() for _, p in named)}


def test_a_missing_gradient_is_named_and_changes_nothing() -> None:
    named = parameters()
    before = [p.detach().clone() for _, p in named]
    set_gradients(named, 0)
    named[1][1].grad = None
    with pytest.raises(RuntimeError, match="no gradient for p1"):
        AdamW(named).step(1e-3)
    assert all(torch.equal(p, b) for (_, p), b in zip(named, before, strict=True))


def test_a_saved_state_goes_on_exactly() -> None:
    straight, first, second = parameters(), parameters(), parameters()
    a, b = AdamW(straight), AdamW(first)
    for step in range(4):
        set_gradients(straight, step)
        a.step(1e-2)
    for step in range(2):
        set_gradients(first, step)
        b.step(1e-2)
    c = AdamW(second)
    c.load_state_dict(b.state_dict())
    for (_, p), (_, q) in zip(second, first, strict=True):
        p.data.copy_(q.data)
    for step in range(2, 4):
        set_gradients(second, step)
        c.step(1e-2)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(straight, second, strict=True))
