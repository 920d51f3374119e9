"""The lazy row rule against torch's own SparseAdam, on the device and in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from devices import BOUNDS, DEVICES, relative
from elsewhere import both
from executor.models.host_table import HostTable
from executor.optim import tables
from executor.optim.tables import HostTables, Tables

ROWS, CHANNELS = 37, 5
BETAS = (0.9, 0.95)


def uniform(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in [-1, 1), the same bits on all CPU kernels."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1).to(dtype)


def table(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(uniform((ROWS, CHANNELS), 1, dtype).to(device))


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dense, with about a third of its rows not 0, among them one that is 0 but for its last channel."""
    rows = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(1000 + step)) < 0.3
    dense = uniform((ROWS, CHANNELS), 100 + step, dtype) * rows
    dense[step % ROWS] = torch.tensor([0.0] * (CHANNELS - 1) + [-1e-30])
    return dense


def steps(optimizer: Tables, p: nn.Parameter, which: range, lr: float = 1e-2) -> None:
    for step in which:
        p.grad = gradient(step, p.dtype).to(p.device)
        optimizer.step(lr * (step + 1))


def weights_after(count: int) -> bytes:
    """The bytes of the weights after some steps: run in other processes."""
    p = table()
    steps(Tables([("table", p)], BETAS), p, range(count))
    return p.detach().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_twenty_steps_equal_torchs_own_sparse_adam(dtype: torch.dtype, device: str) -> None:
    p, reference = table(dtype, device), table(dtype)
    own = Tables([("table", p)], BETAS, eps=1e-6)
    torchs = torch.optim.SparseAdam([reference], betas=BETAS, eps=1e-6)
    start = reference.detach().clone()
    for step in range(20):
        steps(own, p, range(step, step + 1))
        reference.grad = gradient(step, dtype).to_sparse(1)
        torchs.param_groups[0]["lr"] = 1e-2 * (step + 1)
        torchs.step()
    state = torchs.state[reference]
    assert relative(p, reference) <= BOUNDS[dtype]
    assert relative(p.detach().cpu() - start, reference.detach() - start) <= 10 * BOUNDS[dtype]
    assert relative(own.first[0], state["exp_avg"]) <= BOUNDS[dtype]
    assert relative(own.second[0], state["exp_avg_sq"]) <= BOUNDS[dtype]


def test_rows_without_gradient_keep_their_very_bits() -> None:
    p = table()
    before = p.detach().clone()
    own = Tables([("table", p)], BETAS)
    steps(own, p, range(3))
    met = torch.stack([gradient(step).ne(0).any(1) for step in range(3)]).any(0)
    moved = p.detach().ne(before).any(1)
    assert 0 < met.sum() < ROWS
    assert not moved[~met].any() and moved[met].sum() > 5
    assert not own.first[0][~met].any() and not own.second[0][~met].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_not_kept_changes_nothing_whatever_the_gradient_holds(device: str) -> None:
    p, straight = table(device=device), table(device=device)
    own, other = Tables([("table", p)], BETAS), Tables([("table", straight)], BETAS)
    for step in range(4):
        p.grad = torch.full_like(p, float("nan") if step % 2 else float("inf"))
        own.step(1e-2, torch.tensor(False, device=device))
        p.grad = gradient(step).to(device)
        own.step(1e-2 * (step + 1), torch.tensor(True, device=device))
        steps(other, straight, range(step, step + 1))
    for found, wanted in zip(tensors(own, p), tensors(other, straight), strict=True):
        assert torch.equal(found, wanted)


def tensors(optimizer: Tables, p: nn.Parameter) -> list[Tensor]:
    return [p.detach(), optimizer.first[0], optimizer.second[0], optimizer.rule.powers]


def test_weights_are_bit_identical_on_cpu_kernels_that_round_differently() -> None:
    plain, vectors = both("test_executor_tables.weights_after(20)")
    assert plain == vectors


def test_chunks_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_after(3)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 4 * CHANNELS * 10)
    assert weights_after(3) == whole


def test_state_bytes_are_two_copies_of_the_table() -> None:
    assert Tables([("table", table())]).state_bytes() == {"tables_state": 2 * 4 * ROWS * CHANNELS}


def test_a_missing_gradient_is_named_and_changes_nothing() -> None:
    p, q = table(), table()
    own = Tables([("first", p), ("second", q)])
    p.grad = gradient(0)
    with pytest.raises(RuntimeError, match="no gradient for second"):
        own.step(1e-2)
    assert torch.equal(p, table()) and own.rule.powers.tolist() == [1.0, 1.0]


def test_a_saved_state_goes_on_exactly_on_the_device_and_in_host_memory() -> None:
    straight, first = table(), table()
    own, early = Tables([("table", straight)], BETAS), Tables([("table", first)], BETAS)
    steps(own, straight, range(4))
    steps(early, first, range(2))
    second, third = nn.Parameter(first.detach().clone()), host(first.detach().clone())
    late, on_host = Tables([("table", second)], BETAS), HostTables([("table", third)], BETAS)
    late.load_state_dict(early.state_dict())
    on_host.load_state_dict(early.state_dict())
    steps(late, second, range(2, 4))
    host_steps(on_host, third, range(2, 4))
    assert torch.equal(second, straight)
    assert torch.equal(third.weight, straight)
    for found in (late.state_dict(), on_host.state_dict()):
        assert torch.equal(found["powers"], own.rule.powers)
        assert torch.equal(found["first"]["table"], own.first[0])
        assert torch.equal(found["second"]["table"], own.second[0])


# In host memory: rows are looked up by number, one a position.


def host(weight: Tensor) -> HostTable:
    return HostTable(weight, lambda inputs: inputs.unsqueeze(-1), 1)


def host_steps(optimizer: HostTables, one: HostTable, which: range, keep: Tensor | None = None) -> None:
    """The same gradients as ``steps`` has, through rows that are all looked up in an order of their own."""
    for step in which:
        inputs = torch.randperm(ROWS).view(1, -1)
        rows, slots = one.take(inputs)
        torch.nn.functional.embedding(slots, rows).squeeze(2).mul(gradient(step)[inputs]).sum().backward()
        optimizer.step(1e-2 * (step + 1), keep)
    one.settle()


def test_on_the_host_the_rule_gives_the_very_bits_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "HOST_CHUNK_BYTES", 4 * CHANNELS * 10)
    p, one = table(), host(table().detach())
    own, on_host = Tables([("table", p)], BETAS), HostTables([("table", one)], BETAS)
    steps(own, p, range(5))
    host_steps(on_host, one, range(2))
    host_steps(on_host, one, range(7, 8), torch.tensor(False))
    host_steps(on_host, one, range(2, 5))
    assert torch.equal(one.weight, p)
    assert torch.equal(on_host.first[0], own.first[0]) and torch.equal(on_host.second[0], own.second[0])


def test_host_state_bytes_are_three_copies_of_the_table_and_none_on_the_device() -> None:
    held = HostTables([("table", host(table().detach()))]).state_bytes()
    assert held == {"tables_state": 0, "tables_host": 3 * 4 * ROWS * CHANNELS}


def test_a_host_table_without_gradient_is_named_and_changes_nothing() -> None:
    one, other = host(table().detach()), host(table().detach())
    own = HostTables([("first", one), ("second", other)])
    for each in (one, other):
        each.take(torch.arange(4).view(1, -1))
    one.leaf().grad = torch.ones_like(one.leaf())
    with pytest.raises(RuntimeError, match="no gradient for second"):
        own.step(1e-2)
    one.settle()
    assert torch.equal(one.weight, table())


def test_what_a_worker_raises_ends_the_next_forward() -> None:
    def update(*_: object) -> None:
        raise ValueError("of the worker")

    one = host(table().detach())
    rows, _ = one.take(torch.arange(4).view(1, -1))
    rows.grad = torch.ones_like(rows)
    one.give(update, None)
    with pytest.raises(ValueError, match="of the worker"):
        one.take(torch.arange(4).view(1, -1))
