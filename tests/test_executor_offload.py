"""Offloaded experts: the same gradients bit for bit, and memory that is freed, filled again, never read too early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from devices import BOUNDS, DEVICES, relative
from executor.count import Tally
from executor.kernels import offload
from executor.kernels.grouped import choices
from executor.measure import measure
from executor.mechanisms import act_ckpt, moe_offload
from executor.models.moe import MoE
from executor.phantom import phantoms

LAYERS, WIDTH, HIDDEN, EXPERTS, TOPK = 3, 64, 96, 4, 2
BATCH, LENGTH = 2, 48
ROWS = BATCH * LENGTH * TOPK
# What one expert pass saves: its rows, both halves, SiLU of the one, their product, and that times the scale.
ELEMENTS = ROWS * (WIDTH + 5 * HIDDEN)


class Block(nn.Module):
    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.moe = MoE(WIDTH, HIDDEN, EXPERTS, TOPK, capacity, 0.0, choices()["grouped_loop"])
        self.moe.reset(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x)).to(x.dtype)


class Experts(nn.Module):
    """Layers of experts over embedded bytes."""

    def __init__(self, layers: int = LAYERS, capacity: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(capacity) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x.float().flatten(0, 1) @ self.embedding.weight.T, targets.flatten())


@pytest.fixture(autouse=True)
def fresh_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "_pools", {pinned: offload.Pool(pinned) for pinned in (False, True)})
    yield


def tokens(device: str) -> tuple[Tensor, Tensor]:
    made = torch.randint(256, (BATCH, LENGTH + 1), device=device)
    return made[:, :-1], made[:, 1:]


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], bf16: bool = False) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=bf16):
        loss = model(*batch)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def free(device: str) -> list[Tensor]:
    return [buffer for sized in offload.pool(torch.device(device)).free.values() for buffer in sized]


def lent(device: str) -> int:
    return offload.pool(torch.device(device)).bytes - sum(buffer.numel() for buffer in free(device))


def assert_same(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, wanted, strict=True):
        if a.device.type == "cpu":
            assert torch.equal(a, b)
        else:
            assert relative(a, b) <= BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [0.0, 1.0])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_the_same_in_each_of_several_steps_and_a_poisoned_buffer_is_never_read(
    device: str, capacity: float, bf16: bool
) -> None:
    plain, offloaded = Experts(capacity=capacity).to(device), Experts(capacity=capacity).to(device)
    moe_offload.apply(offloaded)
    held = set()
    for _ in range(3):
        batch = tokens(device)
        wanted = gradients(plain, batch, bf16)
        assert_same(gradients(offloaded, batch, bf16), wanted, torch.bfloat16 if bf16 else torch.float32)
        assert lent(device) == 0
        held.add(offload.pool(torch.device(device)).bytes)
        for buffer in free(device):
            buffer.fill_(0xFF)  # NaN in each float format
    assert len(held) == 1, "the buffers of the first step serve the others"


@pytest.mark.gpu
def test_a_slow_link_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(copy):  # type: ignore[no-untyped-def]
        def copied(*args):  # type: ignore[no-untyped-def]
            with torch.cuda.stream(offload._side(torch.device("cuda", 0))):
                torch.cuda._sleep(5_000_000)
            return copy(*args)

        return copied

    plain, offloaded = Experts().cuda(), Experts().cuda()
    moe_offload.apply(offloaded)
    monkeypatch.setattr(moe_offload, "offload", slow(moe_offload.offload))
    monkeypatch.setattr(moe_offload, "restore", slow(moe_offload.restore))
    for _ in range(3):
        batch = tokens("cuda")
        assert_same(gradients(offloaded, batch), gradients(plain, batch), torch.float32)
        for buffer in free("cuda"):
            torch.cuda.synchronize()
            buffer.fill_(0xFF)


def saved(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes alive after a forward under autocast, without those in the pool."""
    gradients(model, batch, bf16=True)
    with Tally([*batch, *model.parameters(), *free("cpu")]) as tally, torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch)
    assert loss.isfinite()
    return tally.live


def test_what_leaves_is_what_all_passes_but_the_last_save_and_no_copy_of_a_weight() -> None:
    plain, offloaded, batch = Experts(), Experts(), tokens("cpu")
    moe_offload.apply(offloaded)
    assert saved(plain, batch) - saved(offloaded, batch) == (LAYERS - 1) * ELEMENTS * 2
    assert offload.pool(torch.device("cpu")).bytes == (LAYERS - 1) * ELEMENTS * 2


@pytest.mark.gpu
def test_memory_of_the_card_falls_by_what_is_pinned() -> None:
    found, batch = {}, tokens("cuda")
    for name in ("plain", "offloaded"):
        model = Experts().cuda()
        if name == "offloaded":
            moe_offload.apply(model)
        gradients(model, batch)
        torch.cuda.synchronize()
        loss = model(*batch)
        torch.cuda.synchronize()
        found[name] = torch.cuda.memory_allocated()
        del loss, model
    fell = found["plain"] - found["offloaded"]
    assert fell >= 0.95 * (LAYERS - 1) * ELEMENTS * 4
    assert offload.pinned_bytes() == (LAYERS - 1) * ELEMENTS * 4
    assert all(buffer.is_pinned() for buffer in free("cuda"))


def test_a_pass_is_asked_back_when_the_backward_of_the_pass_after_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Experts(), list[object]()
    moe_offload.apply(model)
    original = moe_offload.restore
    monkeypatch.setattr(moe_offload, "restore", lambda *args: (seen.append("back"), original(*args))[1])

    def note(place: int, out: Tensor) -> None:
        out.register_hook(lambda _: seen.append(place))

    for place, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, out, place=place: note(place, out))
    gradients(model, tokens("cpu"))
    backs = ["back"] * 6
    assert seen == [2, *backs, 1, *backs, 0]


def test_a_graph_kept_for_a_second_backward_gives_the_same_again() -> None:
    model = Experts()
    moe_offload.apply(model)
    parameters = list(model.parameters())
    loss = model(*tokens("cpu"))
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert_same(list(torch.autograd.grad(loss, parameters)), list(first), torch.float32)


def test_a_graph_let_go_returns_its_buffers_and_evaluation_takes_none() -> None:
    model, batch = Experts(), tokens("cpu")
    moe_offload.apply(model)
    with torch.no_grad():
        model(*batch)
    assert offload.pool(torch.device("cpu")).bytes == 0
    loss = model(*batch)
    assert lent("cpu") == (LAYERS - 1) * ELEMENTS * 4
    del loss
    assert lent("cpu") == 0


def test_a_model_without_memory_is_counted_without_buffers() -> None:
    found = []
    for mechanisms in ((), (moe_offload,)):
        with phantoms(), torch.device("cpu"):
            model = Experts()
            for mechanism in mechanisms:
                mechanism.apply(model)
            found.append(measure(model, BATCH, LENGTH, "bf16"))
    plain, offloaded = found
    assert plain.saved() - offloaded.saved() == (LAYERS - 1) * ELEMENTS * 2
    assert plain.counts["flops"] == offloaded.counts["flops"]
    assert offload.pool(torch.device("cpu")).bytes == 0


@pytest.mark.parametrize("order", [(moe_offload, act_ckpt), (act_ckpt, moe_offload)])
def test_beside_quantized_activations_the_host_holds_their_int8_form(order: tuple[object, object]) -> None:
    quantized, both, batch = Experts(), Experts(), tokens("cpu")
    act_ckpt.apply(quantized)
    for mechanism in order:
        mechanism.apply(both)  # type: ignore[attr-defined]
    assert_same(gradients(both, batch, bf16=True), gradients(quantized, batch, bf16=True), torch.bfloat16)
    scales = ELEMENTS // act_ckpt.GROUP * 4
    assert offload.pool(torch.device("cpu")).bytes == (LAYERS - 1) * (ELEMENTS + scales)


def test_a_host_that_pins_no_more_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    pool = offload.Pool(pinned=True)
    with pytest.raises(RuntimeError, match=r"pins no 512 bytes beyond the 0 .*CUDA error 2.*without moe_offload"):
        pool.lend(torch.empty(128))
    assert pool.bytes == 0


def test_it_is_offered_where_there_is_more_than_one_pass_and_refused_where_there_is_none() -> None:
    assert moe_offload.offered(Experts(), "muon")
    assert not moe_offload.offered(Experts(layers=1), "muon")
    with pytest.raises(ValueError, match="this model has none"):
        moe_offload.apply(nn.Linear(2, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_comes_back_as_it_went(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = torch.randn(33, 5, device=device).mul(40).to(dtype)
        host = offload.offload(x)
        back = offload.restore(host, x.device)
        offload.reached(x.device)()
        assert host.device.type == "cpu"
        assert back.device == x.device
        assert torch.equal(back, x)
        torch.library.opcheck(torch.ops.dormouse.offload, (x,), test_utils=("test_schema", "test_faketensor"))
