"""The mixture of experts against a float64 loop over tokens written here, and what its balance must keep."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.kernels import grouped
from executor.measure import measure
from executor.mechanisms import recompute
from executor.models.moe import MoE, balanced, place
from executor.phantom import phantoms
from tests.devices import DEVICES, assert_near, relative

WIDTH, HIDDEN, EXPERTS = 16, 12, 6
BF16, F16 = torch.bfloat16, torch.float16


def mixture(topk: int = 2, capacity: float = 0.0, balance: float = 0.0, choice: str = "grouped_loop") -> MoE:
    moe = MoE(WIDTH, HIDDEN, EXPERTS, topk, capacity, balance, grouped.choices()[choice])
    moe.reset(1.0)
    if balance:
        moe.bias.copy_(torch.linspace(0.1, -0.1, EXPERTS))
    return moe


def by_tokens(moe: MoE, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, router: Tensor) -> Tensor:
    """Each token alone: the best k of affinity + bias, those with room each do their SwiGLU, weighted."""
    tokens = x.flatten(0, 1)
    bias = moe.bias.double().cpu() if moe.balance else torch.zeros(EXPERTS, dtype=x.dtype)
    room = math.ceil(moe.capacity * len(tokens) * moe.topk / EXPERTS) if moe.capacity else len(tokens)
    taken: Counter[int] = Counter()
    outs = []
    for token in tokens:
        affinity = (router @ token).sigmoid()
        best = sorted(range(EXPERTS), key=lambda e, a=affinity: -float(a[e].detach() + bias[e]))[: moe.topk]  # type: ignore[misc]
        share = affinity[best].sum() if moe.topk > 1 else 1.0
        out = torch.zeros_like(token)
        for e in best:
            taken[e] += 1
            if taken[e] <= room:
                out = out + affinity[e] / share * (F.silu(token @ gate[e]) * (token @ up[e])) @ down[e]
        outs.append(out)
    return torch.stack(outs).view_as(x)


def compared(moe: MoE, x: Tensor, bound: torch.dtype) -> None:
    """Output and every gradient of ``moe`` near those of the loop over tokens."""
    exact = [part.detach().double().cpu().requires_grad_() for part in (x, *moe.parameters())]
    weight = torch.randn(x.shape, dtype=torch.float64)
    wanted = by_tokens(moe, *exact)
    found = moe(x.requires_grad_())
    found_gradients = torch.autograd.grad((found * weight.to(x.device, found.dtype)).sum(), (x, *moe.parameters()))
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), exact)
    names = ("out", "x", "gate", "up", "down", "router.weight")
    assert names[2:] == tuple(name for name, _ in moe.named_parameters())
    assert_near((found, *found_gradients), (wanted, *wanted_gradients), bound, names)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("balance", [0.0, 0.01])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0, 20.0])
@pytest.mark.parametrize("topk", [1, 2, EXPERTS])
def test_output_and_every_gradient_equal_the_loop_over_tokens(
    topk: int, capacity: float, balance: float, dtype: torch.dtype, device: str
) -> None:
    moe = mixture(topk, capacity, balance).to(device, dtype)
    compared(moe, torch.randn(2, 11, WIDTH, dtype=dtype, device=device), dtype)


@pytest.mark.parametrize(
    ("device", "choice", "dtype"),
    [
        *(("cpu", "grouped_loop", dtype) for dtype in (BF16, F16)),
        *(pytest.param("cuda", choice, BF16, marks=pytest.mark.gpu) for choice in grouped.choices()),
        *(pytest.param("cuda", choice, F16, marks=pytest.mark.gpu) for choice in ("grouped_triton", "grouped_loop")),
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_under_autocast_every_choice_is_near_the_loop_over_tokens(
    capacity: float, device: str, choice: str, dtype: torch.dtype
) -> None:
    moe = mixture(2, capacity, 0.01, choice).to(device)
    with torch.autocast(device, dtype):
        compared(moe, torch.randn(3, 50, WIDTH, device=device), dtype)


@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_the_gradient_is_that_of_finite_differences(capacity: float) -> None:
    moe = MoE(4, 3, 4, 2, capacity, 0.01, grouped.choices()["grouped_loop"]).double()
    moe.reset(1.0)
    names = [name for name, _ in moe.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *moe.parameters()))


def test_routing_runs_in_fp32_under_autocast() -> None:
    moe, x = mixture(balance=0.01), torch.randn(200, WIDTH)
    chosen, weights = moe.route(x)
    with torch.autocast("cpu", torch.bfloat16):
        again, weights_again = moe.route(x)
        out = moe(x.unsqueeze(0))
    assert weights.dtype == out.dtype == torch.float32
    assert torch.equal(chosen, again) and torch.equal(weights, weights_again)


def test_the_bias_changes_who_is_chosen_and_no_weight() -> None:
    moe, x = mixture(balance=0.01), torch.randn(50, WIDTH)
    affinity = F.linear(x, moe.router.weight).sigmoid()
    moe.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0, 0.0]))
    chosen, weights = moe.route(x)
    assert set(chosen.flatten().tolist()) == {0, 1}
    wanted = affinity.gather(1, chosen)
    torch.testing.assert_close(weights, wanted / wanted.sum(1, keepdim=True))


def test_a_token_that_no_expert_likes_gives_zero_and_finite_gradients() -> None:
    moe, x = mixture(), torch.ones(1, 3, WIDTH, requires_grad=True)
    with torch.no_grad():
        moe.router.weight.fill_(-200.0)  # sigmoid(-3200) is 0
    out = moe(x)
    gradients = torch.autograd.grad(1e6 * out.sum(), (x, *moe.parameters()))
    assert not out.any() and all(gradient.isfinite().all() for gradient in gradients)


def test_assignments_beyond_an_experts_slots_are_dropped_from_the_last_token_on() -> None:
    chosen = torch.tensor([[0, 2], [0, 1], [0, 2], [2, 0]])
    places = place(chosen, experts=4, slots=2)
    assert places.kept is not None and places.filled is not None
    assert places.kept.view(4, 2).tolist() == [[True, True], [True, True], [False, True], [False, False]]
    assert places.filled.flatten().tolist() == [True, True, True, False, True, True, False, False]
    assert places.ends.tolist() == [4, 5, 8, 8]
    kept = places.kept.flatten()
    assert torch.equal(places.assignment[places.slot[kept]], torch.arange(8)[kept])


class Bytes(nn.Module):
    """Embedding -> blocks -> head, a model round mixtures."""

    def __init__(self, blocks: int = 2, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(mixture(**settings) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def logits(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(inputs).float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("device", DEVICES)
def test_a_capacity_makes_logits_depend_on_the_batch_and_dropless_ones_do_not(device: str) -> None:
    torch.manual_seed(0)
    model, inputs = Bytes().to(device), torch.randint(256, (4, 64), device=device)
    apart: dict[float, float] = {}
    for capacity in (1.0, 0.0):
        for block in balanced_or_not(model):
            block.capacity = capacity
        whole, halves = model.logits(inputs), torch.cat([model.logits(half) for half in inputs.chunk(2)])
        apart[capacity] = float((whole - halves).detach().abs().max())
    assert apart[1.0] > 1e-2, apart
    assert apart[0.0] < 1e-5, apart


def balanced_or_not(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_an_idle_experts_gradient_is_there_and_exactly_zero(capacity: float, device: str) -> None:
    moe = mixture(2, capacity, balance=0.01).to(device)
    moe.bias[3] = -9.0
    moe(torch.randn(2, 9, WIDTH, device=device)).square().sum().backward()
    for name in ("gate", "up", "down"):
        gradient = moe.get_parameter(name).grad
        assert gradient is not None and not gradient[3].any() and gradient[[0, 1, 2, 4, 5]].any(), name


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["grouped_triton", "grouped_torch"])
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_a_step_asks_the_card_nothing_and_gives_the_same_bits_again(capacity: float, choice: str) -> None:
    moe, x = mixture(2, capacity, 0.01, choice).cuda(), torch.randn(4, 100, WIDTH, device="cuda", requires_grad=True)

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = moe(x)
        return [out, *torch.autograd.grad(out.square().sum(), (x, *moe.parameters()))]

    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
        moe.counts.add_(1)
        moe.balance_step(moe.counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_halves_counts_move_the_bias_as_one_process_does_and_as_whole_numbers_say() -> None:
    whole, left, right = (mixture(balance=0.003) for _ in range(3))
    left.load_state_dict(whole.state_dict())
    right.load_state_dict(whole.state_dict())
    by_hand = whole.bias.clone()
    for _ in range(20):
        x = torch.randn(4, 30, WIDTH)
        whole(x)
        left(x[:2])
        right(x[2:])
        summed = left.counts + right.counts
        assert torch.equal(summed, whole.counts) and summed.sum() == 4 * 30 * 2
        for e, count in enumerate(summed.tolist()):
            by_hand[e] += torch.tensor(0.003) * ((EXPERTS * count < 240) - (EXPERTS * count > 240))
        for moe, counts in ((whole, whole.counts), (left, summed), (right, summed)):
            moe.balance_step(counts)
            assert torch.equal(moe.bias, by_hand) and not moe.counts.any()
    assert len(set(by_hand.tolist())) > 2


def test_the_balance_evens_out_who_gets_how_much() -> None:
    moe = mixture(balance=0.02)
    with torch.no_grad():
        moe.router.weight[0] += 1.0  # of inputs with a positive mean, the favourite
    x = torch.randn(4, 100, WIDTH) + 0.5
    most = []
    for _ in range(60):
        moe(x)
        most.append(int(moe.counts.max()))
        moe.balance_step(moe.counts)
    mean = 4 * 100 * 2 / EXPERTS
    assert most[0] > 2 * mean and most[-1] < 1.2 * mean, most


def test_counts_that_are_all_zero_move_nothing() -> None:
    moe = mixture(balance=0.01)
    before = moe.bias.clone()
    moe(torch.randn(1, 9, WIDTH))
    moe.balance_step(moe.counts * torch.tensor(False))  # a step that is dropped
    assert torch.equal(moe.bias, before) and not moe.counts.any()


def test_only_a_training_forward_counts_and_forwards_add_up() -> None:
    moe, x = mixture(balance=0.01), torch.randn(1, 9, WIDTH)
    with torch.no_grad():
        moe(x)
    moe.eval()(x)
    assert not moe.counts.any()
    moe.train()(x)
    moe(x)
    assert moe.counts.sum() == 2 * 9 * 2


def test_a_recomputed_forward_counts_once_and_gives_the_same_bits() -> None:
    plain, again = Bytes(balance=0.01), Bytes(balance=0.01)
    again.load_state_dict(plain.state_dict())
    recompute.apply(again)
    inputs = torch.randint(256, (2, 30))
    for model in (plain, again):
        model(inputs, inputs).backward()
    for one, other in zip(balanced(plain), balanced(again), strict=True):
        assert torch.equal(one.counts, other.counts) and one.counts.sum() == 2 * 30 * 2
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_the_account_counts_on_tensors_without_memory_what_real_ones_take(capacity: float, dtype: str) -> None:
    with phantoms(), torch.device("cpu"):
        counted = measure(Bytes(capacity=capacity, balance=0.01), 2, 128, dtype)
    assert counted == measure(Bytes(capacity=capacity, balance=0.01), 2, 128, dtype)
    rows = EXPERTS * math.ceil(capacity * 256 * 2 / EXPERTS) if capacity else 256 * 2
    experts, router, head = 3 * 2 * rows * WIDTH * HIDDEN, 2 * 256 * WIDTH * EXPERTS, 2 * 256 * WIDTH * 256
    assert counted.counts["flops"] == 3 * (2 * (experts + router) + head)


def test_without_balance_there_are_no_buffers_and_balanced_names_those_that_have_one() -> None:
    assert not list(mixture().buffers()) and not balanced(Bytes())
    model = Bytes(balance=0.01)
    assert balanced(model) == list(model.blocks)
    buffers = {name for name, _ in balanced(model)[0].named_buffers()}
    assert buffers == {"bias", "counts"} and buffers < set(balanced(model)[0].state_dict())


@pytest.mark.parametrize(
    ("topk", "capacity", "balance", "words"),
    [
        (0, 0.0, 0.0, "topk=0 with experts=6: a token can go to 1 up to 6 experts"),
        (7, 0.0, 0.0, "topk=7 with experts=6"),
        (2, -1.0, 0.0, "capacity=-1 and balance=0 must not be negative; 0 turns them off"),
        (2, 0.0, -0.5, "balance=-0.5"),
    ],
)
def test_settings_that_cannot_be_are_an_error(topk: int, capacity: float, balance: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoE(WIDTH, HIDDEN, EXPERTS, topk, capacity, balance, grouped.choices()["grouped_loop"])


def test_initial_values_are_by_fan_in_and_leave_nothing_unset() -> None:
    torch.manual_seed(0)
    moe = MoE(64, 48, 8, 2, 0.0, 0.01, grouped.choices()["grouped_loop"])
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers()):
            tensor.fill_(7)
    moe.reset(0.5)
    deviations = {name: float(parameter.detach().std()) for name, parameter in moe.named_parameters()}
    wanted = {"router.weight": 64**-0.5, "gate": 64**-0.5, "up": 64**-0.5, "down": 0.5 * 48**-0.5}
    assert deviations == pytest.approx(wanted, rel=0.1)
    assert not moe.bias.any() and not moe.counts.any()
    assert relative(moe(torch.ones(1, 4, 64)), moe(torch.ones(1, 4, 64))) == 0
