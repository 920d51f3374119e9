"""Engram: its hash against Python's integers, the module against a loop, and the same training from host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices import BOUNDS, DEVICES, assert_near, relative
from executor import build
from executor.loop import Progress, train
from executor.measure import measure
from executor.mechanisms import engram_ram, recompute
from executor.models.engram import Engram, multipliers_of, parameters, row_counts
from executor.models.host_table import HostTable
from executor.optim.tables import HostTables, Tables
from executor.phantom import phantoms
from executor.slices import RankSlice
from test_executor_scaling import ALONE, training

WIDTH, ROWS, HEADS, DIM = 12, 50, 2, 3
SLOTS = 3 * HEADS
EXACT = {"dtype": "fp32", "mechanisms": (), "loss_scaling": False}
LOW = {torch.bfloat16: BOUNDS[torch.bfloat16], torch.float16: BOUNDS[torch.float16]}


def engram(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Engram:
    torch.manual_seed(0)
    made = Engram(WIDTH, rows, HEADS, DIM).to(dtype)
    made.reset(1.0)
    for norm in (made.stream_norm, made.key_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def bytes_of(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length))


# The hash.


def row_of(gram: list[int], multipliers: list[int], prime: int) -> int:
    """Python's integers have no width: wrap by hand. ``gram`` is the n-gram, its last byte first."""
    mask = 2**64 - 1
    word = sum(byte * multiplier for byte, multiplier in zip(gram, multipliers, strict=True)) & mask
    word = ((word ^ (word >> 32)) * 0xBF58476D1CE4E5B9) & mask
    word ^= word >> 29
    return (word - 2**64 if word >= 2**63 else word) % prime


def test_rows_are_those_of_the_written_hash_and_padding_stands_before_a_window() -> None:
    made, inputs = engram(), bytes_of(2, 7)
    found = made.indices(inputs)
    assert found.shape == (2, 7, SLOTS) and found.dtype == torch.int64
    multipliers, counts = multipliers_of(made.orders), row_counts(ROWS, SLOTS)
    for b, t, slot in ((b, t, slot) for b in range(2) for t in range(7) for slot in range(SLOTS)):
        order = (2, 3, 4)[slot // HEADS]
        gram = [int(inputs[b, t - lag]) if t >= lag else 256 for lag in range(order)]
        row = row_of(gram, [multipliers[lag][slot] for lag in range(order)], counts[slot])
        assert int(found[b, t, slot]) == sum(counts[:slot]) + row


@pytest.mark.gpu
def test_a_card_finds_the_rows_that_a_cpu_finds() -> None:
    made, inputs = engram(rows=2**20), bytes_of(8, 512)
    assert torch.equal(made.indices(inputs), made.cuda().indices(inputs.cuda()).cpu())


def test_row_counts_are_distinct_primes_from_the_nominal_count_on() -> None:
    for rows, lookups in ((2, 5), (50, 6), (2**19, 12)):
        counts = row_counts(rows, lookups)
        assert len(set(counts)) == lookups and min(counts) >= rows
        assert all(n % d for n in counts for d in range(2, math.isqrt(n) + 1))
    assert row_counts(50, 4) == [53, 59, 61, 67]


def test_multipliers_are_odd_and_distinct_and_stop_where_the_n_gram_does() -> None:
    by_lag = multipliers_of([2] * 4 + [3] * 4 + [4] * 4)
    used = [by_lag[lag][slot] for slot in range(12) for lag in range((2, 3, 4)[slot // 4])]
    assert len(set(used)) == len(used) and all(word % 2 and -(2**63) <= word < 2**63 for word in used)
    assert all(by_lag[lag][slot] == 0 for slot in range(12) for lag in range((2, 3, 4)[slot // 4], 4))


def test_the_same_n_gram_finds_the_same_rows_wherever_it_stands() -> None:
    made = engram()
    phrase, inputs = bytes_of(1, 4)[0], bytes_of(3, 20)
    inputs[0, 2:6], inputs[2, 13:17] = phrase, phrase
    found = made.indices(inputs)
    assert torch.equal(found[0, 5], found[2, 16])
    assert torch.equal(made.indices(inputs[2:])[0], found[2])


def test_random_n_grams_spread_evenly_over_the_rows_of_every_head() -> None:
    made = engram(rows=500)
    distinct = torch.unique(bytes_of(30_000, 4), dim=0)
    found = made.indices(distinct)[:, -1]
    for slot, count in enumerate(row_counts(500, SLOTS)):
        order = made.orders[slot]
        grams = torch.unique(torch.cat([distinct[:, -order:], found[:, slot : slot + 1]], 1), dim=0)
        hits = torch.bincount(grams[:, -1] - int(made.starts[slot]), minlength=count).double()
        expected = len(grams) / count
        chi = float(((hits - expected) ** 2 / expected).sum())
        assert abs(chi - (count - 1)) < 5 * math.sqrt(2 * (count - 1)), f"slot {slot}: {chi} for {count} rows"


def test_heads_of_an_order_collide_on_different_n_grams() -> None:
    found = engram().indices(torch.unique(bytes_of(4000, 2), dim=0))[:, -1, :HEADS]
    first, second = (found[:, head].unsqueeze(0) == found[:, head].unsqueeze(1) for head in range(HEADS))
    both, either = int((first & second).sum()) - len(found), int((first | second).sum()) - len(found)
    assert either > 0 and both / either < 0.05


# The module.


def by_hand(made: Engram, x: Tensor, inputs: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Position by position, in the dtype of ``x``."""
    rows, out = made.indices(inputs).tolist(), []
    for b, t in ((b, t) for b in range(x.shape[0]) for t in range(x.shape[1])):
        found = torch.cat([weights["table"][row] for row in rows[b][t]])
        key, value, stream = weights["key.weight"] @ found, weights["value.weight"] @ found, x[b, t]
        key = key / (key.square().mean() + 1e-6).sqrt() * weights["key_norm.weight"]
        stream = stream / (stream.square().mean() + 1e-6).sqrt() * weights["stream_norm.weight"]
        out.append(value / (1 + torch.exp(-(stream @ key) / math.sqrt(WIDTH))))
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compute", [torch.float64, torch.float32, *LOW], ids=str)
def test_output_and_every_gradient_equal_a_loop_in_float64(compute: torch.dtype, device: str) -> None:
    low = compute in LOW
    made = engram(torch.float32 if low else compute)
    x, weight, inputs = torch.randn(2, 9, WIDTH), torch.randn(2, 9, WIDTH), bytes_of(2, 9)
    exact = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    exact_x = x.double().requires_grad_()
    wanted = by_hand(made, exact_x, inputs, exact)
    (wanted * weight.double()).sum().backward()
    made = made.to(device)
    own_x = x.to(device, torch.float32 if low else compute).requires_grad_()
    with torch.autocast(device, compute if low else torch.bfloat16, enabled=low):
        found = made(own_x, inputs.to(device))
    assert found.dtype == own_x.dtype
    (found * weight.to(own_x)).sum().backward()
    own = [found, own_x.grad, *(p.grad for p in made.parameters())]
    others = [wanted, exact_x.grad, *(exact[name].grad for name, _ in made.named_parameters())]
    assert_near([g for g in own if g is not None], [g for g in others if g is not None], compute,
                ["output", "x", *exact])  # fmt: skip


def test_gradients_are_those_of_differences() -> None:
    made, inputs = engram(torch.float64), bytes_of(1, 4)
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [p.detach().clone().requires_grad_() for p in made.parameters()]
    names = [name for name, _ in made.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        given = (x, inputs)
        return torch.func.functional_call(made, dict(zip(names, weights, strict=True)), given)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(call, (x, *weights), fast_mode=True)


def test_a_byte_changes_no_output_before_it_and_none_of_other_windows() -> None:
    made, inputs, x = engram(), bytes_of(3, 12), torch.randn(3, 12, WIDTH)
    other = inputs.clone()
    other[1, 5] = (other[1, 5] + 1) % 256
    changed = (made(x, inputs) != made(x, other)).any(-1)
    assert changed[1, 5:9].all(), "a byte is in the n-grams of itself and of the three after it"
    changed[1, 5:9] = False
    assert not changed.any()


def test_the_parameter_formula_counts_what_is_built() -> None:
    made = Engram(WIDTH, ROWS, HEADS, DIM, orders=(2, 5))
    assert parameters(WIDTH, ROWS, HEADS, DIM, orders=(2, 5)) == sum(p.numel() for p in made.parameters())
    assert made.table.lazy_rows is True
    assert set(made.state_dict()) == {name for name, _ in made.named_parameters()}, "the hash is no state"


# The same training from host memory.


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.engram = Engram(WIDTH, rows, HEADS, DIM)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return x + self.engram(x, inputs)


class Model(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block(rows)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, inputs)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def model(device: str, hosted: bool = False) -> Model:
    torch.manual_seed(0)
    made = Model()
    made.blocks[0].engram.reset(1.0)
    if hosted:
        engram_ram.apply(made)
    return made.to(device)


def batches(count: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Of few different bytes, so that windows that follow each other look up the same rows."""
    drawn = torch.randint(8, (count, 2, 17), generator=torch.Generator().manual_seed(1)).to(device)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in drawn]


Trace = Iterator[tuple[float, Tensor]]


def on_device(each: Model, data: list[tuple[Tensor, Tensor]], skip: int) -> Trace:
    """(loss, gradient of the table [R, E]) of each step. Step ``skip`` is dropped."""
    own = Tables([("table", each.blocks[0].engram.table)])
    for step, (inputs, targets) in enumerate(data):
        each.zero_grad()
        loss = each(inputs, targets)
        loss.backward()
        gradient = each.blocks[0].engram.table.grad
        yield float(loss.detach()), gradient.clone()
        own.step(0.1, torch.tensor(step != skip, device=inputs.device))


def on_host(each: Model, data: list[tuple[Tensor, Tensor]], skip: int, when: str) -> Trace:
    """The same with rows that are prefetched at a certain time, or never."""
    module = each.blocks[0].engram
    own = HostTables([("table", module.host)])
    for step, (inputs, targets) in enumerate(data):
        following = data[step + 1][0] if step + 1 < len(data) and when != "never" else None
        if when == "before" and following is not None:
            own.prefetch(following)
        loss = each(inputs, targets)
        if when == "after" and following is not None:
            own.prefetch(following)
        loss.backward()
        (rows,) = own.leaves()
        distinct = torch.unique(module.host._indices(inputs.cpu()))
        assert rows.grad is not None and not rows.grad[len(distinct) :].any()
        dense = torch.zeros_like(module.host.weight).index_copy(0, distinct, rows.grad[: len(distinct)].cpu())
        yield float(loss.detach()), dense
        own.step(0.1, torch.tensor(step != skip, device=inputs.device))
        if step % 4 == 3:  # as an evaluation between steps does
            with torch.no_grad():
                assert math.isfinite(float(each(inputs, targets)))
    module.host.settle()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["before", "after", "never"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_ten_steps_from_host_memory_equal_ten_on_the_device(device: str, when: str, recomputed: bool) -> None:
    here, there = model(device), model(device, hosted=True)
    if recomputed:
        recompute.apply(there)
    data = batches(10, device)
    start = here.blocks[0].engram.table.detach().clone()
    traces = zip(on_device(here, data, skip=4), on_host(there, data, skip=4, when=when), strict=True)
    for (loss, gradient), (other, found) in traces:
        assert abs(loss - other) <= 1e-5 * loss
        assert relative(found, gradient) <= BOUNDS[torch.float32]
    table, hosted = here.blocks[0].engram.table.detach(), there.blocks[0].engram.host_tensors()["table"]
    assert relative(hosted - start.cpu(), table - start) <= 1e-4
    assert not torch.equal(hosted, start.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_the_loop_trains_the_same_with_and_without_the_mechanism(device: str) -> None:
    """Clipped, with one step prefetched at a time, as a run does it."""
    found = []
    for hosted in (False, True):
        sizes = {"layers": 1, "width": 32, "heads": 2, "ffn": 64, "engram_rows": 100, "engram_heads": 2}
        parts, work, data = training(device, steps=6, model={**sizes, "engram_dim": 8})
        if hosted:
            engram_ram.apply(parts.model)
            parts.optimizers = build.optimizers(parts.model, work, RankSlice(**ALONE, kind=device, **EXACT), ())
        train(parts, work, data, Progress())
        (_, module), *_ = engram_ram.engrams(parts.model)
        table = module.host_tensors()["table"] if hosted else module.table.detach()
        found.append((torch.tensor(parts.reporter.losses), table))  # type: ignore[attr-defined]
    assert isinstance(parts.optimizers.tables, HostTables)
    for wanted, other in zip(*found, strict=True):
        assert relative(other, wanted) <= 1e-4


def test_steps_that_skip_the_worker_s_order_would_be_seen() -> None:
    """The windows above overlap: rows sent before the update give another training."""
    there, late = model("cpu", hosted=True), model("cpu", hosted=True)
    host = late.blocks[0].engram.host

    def early(inputs: Tensor) -> None:
        host._ahead = [host._open(inputs)]
        host._ahead[0].sent = host._worker.submit(host._send, host._ahead[0])
        host._ahead[0].sent.result()

    own = HostTables([("table", host)])
    losses: list[float] = []
    data = batches(10, "cpu")
    for step, (inputs, targets) in enumerate(data):
        loss = late(inputs, targets)
        loss.backward()
        losses.append(float(loss.detach()))
        if step + 1 < len(data):
            early(data[step + 1][0])
        kept, host._ahead = host._ahead, []
        own.step(0.1)
        host._ahead = kept
    right = [loss for loss, _ in on_host(there, data, skip=-1, when="after")]
    assert max(abs(a - b) / b for a, b in zip(losses, right, strict=True)) > 1e-3


@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_that_were_prefetched_are_looked_up_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, opened = model("cpu", hosted=True), list[Tensor]()
    whole = HostTable._open
    monkeypatch.setattr(HostTable, "_open", lambda table, inputs: (opened.append(inputs), whole(table, inputs))[1])
    data = batches(3, "cpu")
    list(on_host(there, data, skip=-1, when=when))
    assert sorted(map(id, opened)) == sorted(id(inputs) for inputs, _ in data)


def test_a_step_sends_the_next_rows_and_ends_its_own() -> None:
    there, data = model("cpu", hosted=True), batches(2, "cpu")
    host = there.blocks[0].engram.host
    own = HostTables([("table", host)])
    there(*data[0]).backward()
    own.prefetch(data[1][0])
    own.step(0.1)
    (ahead,) = host._ahead
    assert ahead.sent is not None and ahead.sent.result() is None
    distinct, _ = ahead.prepared.result()
    assert torch.equal(ahead.rows[: len(distinct)], host.weight[distinct])
    with pytest.raises(RuntimeError, match="no forward has looked up rows"):
        own.leaves()


def test_an_evaluation_leaves_the_rows_of_a_step_alone() -> None:
    there, data = model("cpu", hosted=True), batches(2, "cpu")
    host = there.blocks[0].engram.host
    there(*data[0])
    host.prefetch(data[1][0])
    before = host.leaf(), host._ahead
    with torch.no_grad():
        there(*data[1])
    assert (host.leaf(), host._ahead) == before


def test_inputs_refilled_in_place_are_looked_up_anew() -> None:
    here, there = model("cpu"), model("cpu", hosted=True)
    data = batches(2, "cpu")
    inputs = data[0][0].clone()
    there.blocks[0].engram.host.prefetch(inputs)
    there.blocks[0].engram.host._ahead[0].prepared.result()
    inputs.copy_(data[1][0])
    assert torch.equal(there(inputs, data[1][1]), here(*data[1]))


def test_a_discarded_backward_leaves_no_gradient_behind() -> None:
    there, (inputs, targets) = model("cpu", hosted=True), batches(1, "cpu")[0]
    gradients = []
    for _ in range(2):
        there(inputs, targets).backward()
        gradient = there.blocks[0].engram.host.leaf().grad
        assert gradient is not None
        gradients.append(gradient.clone())
    assert torch.equal(*gradients)


def test_rows_set_aside_beyond_the_distinct_ones_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, data = model("cpu"), model("cpu", hosted=True), batches(1, "cpu")[0]
    empty = torch.empty

    def poisoned(*sizes: int, **options: object) -> Tensor:
        made = empty(*sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-1)

    monkeypatch.setattr(torch, "empty", poisoned)
    loss = there(*data)
    loss.backward()
    assert torch.equal(loss, here(*data))
    assert torch.isfinite(there.blocks[0].engram.host.leaf().grad).all()


def test_a_table_in_host_memory_is_no_parameter_and_keeps_its_name() -> None:
    here, there = model("cpu"), model("cpu", hosted=True)
    name = "blocks.0.engram.table"
    assert set(dict(here.named_parameters())) - set(dict(there.named_parameters())) == {name}
    held = there.blocks[0].engram.host_tensors()
    assert torch.equal(held["table"], dict(here.named_parameters())[name])
    assert here.blocks[0].engram.host_tensors() == {}


# The mechanism and the account.


def test_the_mechanism_is_offered_where_there_are_tables_and_on_one_rank() -> None:
    assert engram_ram.offered(model("cpu"), "adamw") and not engram_ram.offered(nn.Linear(2, 2), "muon")
    with pytest.raises(ValueError, match="this model has none"):
        engram_ram.apply(nn.Linear(2, 2))
    for facts, ok, reason in (
        ({"device": "cpu", "ranks": 1}, True, "needs nothing"),
        ({"device": "cuda", "ranks": 2}, False, "tables would differ by rank"),
        ({"device": "mps"}, False, "offered on cpu and cuda; this rank is mps"),
    ):
        found, why = engram_ram.eligibility(facts)
        assert found is ok and reason in why


def test_the_bytes_told_are_those_that_windows_and_moments_take() -> None:
    here, there, (batch, length) = model("cpu"), model("cpu", hosted=True), (2, 16)
    (inputs, targets), (following, _) = batches(2, "cpu")
    host = there.blocks[0].engram.host
    own = HostTables([("table", host)])
    there(inputs, targets).backward()
    own.prefetch(following)
    held = [host.leaf(), host.leaf().grad, host._current.slots, host._ahead[0].rows, host._ahead[0].slots]
    assert engram_ram.staging_bytes(here, batch, length) == sum(t.untyped_storage().nbytes() for t in held)
    pinned = [host.leaf(), host._current.slots, inputs]
    assert engram_ram.pinned_bytes(here, batch, length) == sum(t.nbytes for t in pinned)
    on_host = engram_ram.host_bytes(here, batch, length) - engram_ram.pinned_bytes(here, batch, length)
    assert on_host == own.state_bytes()["tables_host"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_account_counts_it_without_memory(dtype: str) -> None:
    with phantoms(), torch.device("cpu"):
        made = Model(rows=10_000)
        counted = measure(made, 2, 128, dtype)
    assert counted == measure(Model(rows=10_000), 2, 128, dtype)


# A card is not held up.


@pytest.mark.gpu
def test_neither_lookup_nor_update_holds_the_host_up() -> None:
    here, there = model("cuda"), model("cuda", hosted=True)
    own, other = Tables([("table", here.blocks[0].engram.table)]), HostTables([("table", there.blocks[0].engram.host)])
    # So many lookups that torch sorts them in backward, as it does in a real run.
    data = [(bytes_of(4, 400).cuda(), bytes_of(4, 400).cuda()) for _ in range(4)]
    keep = torch.tensor(True, device="cuda")
    try:
        for (inputs, targets), (following, _) in pairwise(data):
            for each, optimizer in ((here, own), (there, other)):
                loss = each(inputs, targets)
                if isinstance(optimizer, HostTables):
                    optimizer.prefetch(following)
                loss.backward()
                optimizer.step(0.1, keep)
            torch.cuda.set_sync_debug_mode("error")  # what is done once was in the first step
    finally:
        torch.cuda.set_sync_debug_mode("default")
        there.blocks[0].engram.host.settle()
