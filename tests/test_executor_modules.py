"""The model as a whole: its modules against finite differences, all of it against itself in float64, no token before
its time, nothing that grows with the square of the length, and the presets' sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices import BOUNDS, DEVICES, relative
from executor.kernels.registry import lookup
from executor.measure import measure
from executor.models.engram import Engram
from executor.models.kda import Block, FeedForward, KdaModel, Mix
from executor.models.moe import MoE
from executor.models.presets import B1, MEDIUM, SMALL, TINY, KdaWorkload
from executor.phantom import phantoms
from executor.precision import NAMES, compute_in
from executor.workloads import configure, values

PLAIN = {"kda": "chunk_torch", "grouped": "grouped_loop"}
FUSED = {"kda": "chunk_fla", "grouped": "grouped_triton"}
ALL_PARTS = {"experts": 4, "topk": 2, "expert_ffn": 48, "engram_rows": 300, "engram_heads": 2, "engram_dim": 8}


def built(workload: KdaWorkload, kernels: Mapping[str, str] = PLAIN, **settings: int | str) -> KdaModel:
    made = workload.build(values(configure(workload, {k: str(v) for k, v in settings.items()})), kernels)
    assert isinstance(made, KdaModel)
    return made


def core() -> Callable[..., Tensor]:
    return lookup("kda", "chunk_torch")


def small(experts: int = 0) -> KdaModel:
    """All parts, as small as they can be, in float64."""
    parts = {**ALL_PARTS, "experts": experts, "expert_ffn": 3, "engram_rows": 5, "engram_heads": 1, "engram_dim": 2}
    return built(TINY, layers=2, width=8, heads=2, ffn=8, **(parts if experts else {})).double()


# Finite differences. The kernels, the mixture and Engram have such tests of their own.


class Called(nn.Module):
    """A module behind one of its functions."""

    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *given: Tensor) -> Tensor:
        return self.call(*given)


def checked(module: nn.Module, call: Callable[..., Tensor], x: Tensor | None = None, fast: bool = False) -> bool:
    """Whether gradients of ``call``, a function of ``module``, by ``x`` and every parameter are those of finite
    differences; ``fast``: along one random direction of each."""
    whole = Called(module, call)
    names = [name for name, _ in whole.named_parameters()]
    given = [] if x is None else [x.requires_grad_()]

    def run(*values: Tensor) -> Any:
        return torch.func.functional_call(
            whole, dict(zip(names, values[len(given) :], strict=True)), values[: len(given)]
        )

    return torch.autograd.gradcheck(run, (*given, *module.parameters()), rtol=1e-5, atol=1e-7, fast_mode=fast)


@pytest.fixture
def seeded() -> None:
    """One draw: a token at the edge between two experts would step over it."""
    torch.manual_seed(0)


@pytest.mark.parametrize("length", [5, 18])
@pytest.mark.parametrize("recurrent", [True, False])
def test_gradients_of_the_mix_are_those_of_finite_differences(recurrent: bool, length: int) -> None:
    mix = Mix(4, 2, 3, core() if recurrent else None).double()
    mix.reset(1.0)
    assert checked(mix, mix, torch.randn(1, length, 4, dtype=torch.float64), fast=length > 16)


def test_gradients_of_the_feed_forward_are_those_of_finite_differences() -> None:
    made = FeedForward(4, 3).double()
    made.reset(1.0)
    assert checked(made, made, torch.randn(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_of_a_block_are_those_of_finite_differences(whole: bool, seeded: None) -> None:
    ffn = MoE(4, 3, 4, 2, 0.0, 0.0, lookup("grouped", "grouped_loop")) if whole else FeedForward(4, 3)
    block = Block(Mix(4, 2, 3, core()), ffn, 4, Engram(4, 5, 1, 2) if whole else None).double()
    for part in (block.mix, block.ffn, *([block.engram] if block.engram is not None else [])):
        part.reset(1.0)
    inputs = torch.randint(256, (1, 5))
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    assert checked(block, lambda x: block(x, inputs), x, fast=whole)


@pytest.mark.parametrize("experts", [0, 4])
def test_gradients_of_the_model_are_those_of_finite_differences(experts: int, seeded: None) -> None:
    model, inputs, weight = small(experts), torch.randint(256, (2, 18)), torch.randn(2, 18, 256, dtype=torch.float64)
    assert checked(model, lambda: (model.logits(inputs) * weight).sum(), fast=True)


# In float64.

CALM = 1e-2
"""Beneath the root of the norm over a head's output. At a window's first tokens that output is one product q k, near
zero for some, and the norm divides by it: with the model's own 1e-6, such a token makes rounding errors many times
larger, of fp32 (1 to 7 times) as of bf16 (3 to 14). With this no token does, and each gradient can be held."""
OWN = 1e-6
LOSS_SCALE = 4096.0  # keeps fp16's gradients out of what it cannot hold, and rounds nothing
SIZES: dict[str, tuple[KdaWorkload, dict[str, int]]] = {
    "tiny": (TINY, ALL_PARTS),
    "small": (SMALL, {}),
    "medium": (MEDIUM, {"layers": 2, "engram_rows": 5000}),
}
CASES = [
    *(("cpu", "tiny", PLAIN, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ("cuda", "tiny", PLAIN, torch.float32),
    *(("cuda", size, FUSED, dtype) for size in ("small", "medium") for dtype in (torch.bfloat16, torch.float16)),
]


def loss_of(model: KdaModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """What the model's forward gives, in the dtype of its logits."""
    return F.cross_entropy(model.logits(inputs).flatten(0, 1), targets.flatten())


def mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def keep_choices(model: nn.Module) -> list[Tensor]:
    """A list that fills with the experts that each mixture of ``model`` chooses."""
    kept: list[Tensor] = []

    def keeping(moe: MoE) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def route(tokens: Tensor) -> tuple[Tensor, Tensor]:
            chosen, weights = MoE.route(moe, tokens)
            kept.append(chosen)
            return chosen, weights

        return route

    for moe in mixtures(model):
        moe.route = keeping(moe)  # type: ignore[method-assign]
    return kept


def choose_again(model: nn.Module, choices: list[Tensor]) -> list[float]:
    """Let each mixture of ``model`` choose ``choices``; gives a list that fills with the share it would choose too."""
    agreed: list[float] = []

    def choosing(moe: MoE, chosen: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def route(tokens: Tensor) -> tuple[Tensor, Tensor]:
            own, _ = MoE.route(moe, tokens)
            agreed.append(float((own.sort(-1).values == chosen.sort(-1).values).double().mean()))
            affinity = torch.sigmoid(tokens @ moe.router.weight.T).gather(-1, chosen)
            return chosen, affinity / affinity.sum(-1, keepdim=True)

        return route

    for moe, chosen in zip(mixtures(model), choices, strict=True):
        moe.route = choosing(moe, chosen)  # type: ignore[method-assign]
    return agreed


def against_float64(
    size: str, kernels: Mapping[str, str], dtype: torch.dtype, device: str, eps: float, fault: str | None = None
) -> dict[str, float]:
    """Errors of the loss and every gradient, and of all gradients as one ("all"), against the same weights in float64.

    Which expert a token goes to is a step, which rounding may take for tokens that stand at its edge: the reference
    takes the choices of the model, and must agree with nearly all of them. A gradient that is nearly nothing beside the
    largest is held to a thousandth of that. ``fault``: a parameter that is a tenth larger in the reference.
    """
    torch.manual_seed(1)
    workload, settings = SIZES[size]
    model, exact = (
        built(workload, kernels, **settings).to(device),
        built(workload, PLAIN, **settings).to(device).double(),
    )
    exact.load_state_dict(model.state_dict())
    if fault is not None:
        exact.get_parameter(fault).data.mul_(1.1)
    for block in (*model.blocks, *exact.blocks):
        block.mix.norm.eps = eps
    inputs, targets = (torch.randint(256, (2, 90)).to(device) for _ in range(2))

    kept = keep_choices(model)
    with compute_in(NAMES[dtype], device):
        loss = model(inputs, targets)
    (loss * LOSS_SCALE).backward()
    agreed = choose_again(exact, kept)
    wanted = loss_of(exact, inputs, targets)
    wanted.backward()
    assert all(share > 0.97 for share in agreed), agreed

    found = [gradient / LOSS_SCALE for gradient in gradients(model)]
    references = gradients(exact)
    largest = max(float(reference.norm()) for reference in references)
    errors = {"loss": relative(loss, wanted), "all": relative(flat(found), flat(references))}
    for (name, _), gradient, reference in zip(exact.named_parameters(), found, references, strict=True):
        norm = float(reference.norm())
        errors[name] = relative(gradient, reference) * norm / max(norm, 1e-3 * largest)
    return errors


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def bound(size: str, dtype: torch.dtype) -> float:
    """Of fp32: that of one operator. Of a 16-bit dtype: one such error for each block and one for what stands round
    them, which are independent, and so add in squares."""
    workload, settings = SIZES[size]
    layers = settings.get("layers", workload.shape.layers)
    return BOUNDS[dtype] * (1.0 if dtype == torch.float32 else (1 + layers) ** 0.5)


@pytest.mark.parametrize(
    ("device", "size", "kernels", "dtype"),
    [pytest.param(*case, marks=pytest.mark.gpu) if case[0] == "cuda" else case for case in CASES],
    ids=str,
)
def test_the_loss_and_every_gradient_of_the_whole_model_are_those_of_float64(
    device: str, size: str, kernels: Mapping[str, str], dtype: torch.dtype
) -> None:
    errors = against_float64(size, kernels, dtype, device, CALM)
    too_far = {name: error for name, error in errors.items() if not error <= bound(size, dtype)}
    assert not too_far, (bound(size, dtype), too_far)
    errors = against_float64(size, kernels, dtype, device, OWN)
    middle = sorted(errors.values())[len(errors) // 2]
    assert max(middle, errors["loss"], errors["all"]) <= bound(size, dtype), (middle, errors)
    if dtype == torch.float32:
        assert max(errors.values()) <= bound(size, dtype), errors


@pytest.mark.parametrize(
    "name",
    [
        *("blocks.0.engram.value.weight", "blocks.1.ffn.down", "blocks.1.ffn.router.weight", "blocks.2.mix.q.weight"),
        *("blocks.1.mix.decay_up.weight", "blocks.1.mix.beta.weight", "blocks.2.mix.conv.weight"),
    ],
)
def test_the_bound_of_bf16_catches_one_parameter_that_is_a_tenth_off(name: str) -> None:
    errors = against_float64("tiny", PLAIN, torch.bfloat16, "cpu", CALM, fault=name)
    assert max(errors.values()) > 1.3 * bound("tiny", torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_the_stream_every_norm_and_the_loss_stay_fp32(device: str) -> None:
    model, inputs = built(TINY, layers=2, **ALL_PARTS).to(device), torch.randint(256, (2, 20)).to(device)
    watched = {name: module for name, module in model.named_modules() if isinstance(module, Block | nn.RMSNorm)}
    seen: dict[str, torch.dtype] = {}
    for name, module in watched.items():
        module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: out.dtype}))  # type: ignore[misc]
    with compute_in("bf16", device):
        loss, logits = model(inputs, inputs), model.logits(inputs)
    assert seen == dict.fromkeys(watched, torch.float32)
    assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16


# No token before its time.


@pytest.mark.parametrize("device", DEVICES)
def test_no_token_sees_a_later_one(device: str) -> None:
    """Bytes up to 127 come before the 40th token, those from 128 on after: so rows of the embedding tell them apart."""
    torch.manual_seed(0)
    model = built(TINY, **ALL_PARTS).double().to(device)
    early, late = torch.randint(128, (3, 40)), torch.randint(128, 256, (2, 3, 30))
    first, second = (torch.cat([early, other], 1).to(device) for other in late)
    before, after = model.logits(first), model.logits(second)
    # Not bit for bit: the products of an expert have other rows beside those of these tokens.
    assert relative(after[:, :40], before[:, :40]) < BOUNDS[torch.float64]
    assert relative(after[:, 40:], before[:, 40:]) > 0.1

    (before[:, :40].square().sum()).backward()
    embedding, table = model.embedding.weight.grad, model.blocks[0].engram.table.grad
    rows = model.blocks[0].engram.indices(first)
    only_late = torch.ones(len(table), dtype=torch.bool, device=device).index_fill_(0, rows[:, :40].flatten(), False)
    assert embedding[:128].any() and not embedding[128:].any()
    assert table[rows[:, :40]].any() and only_late[rows[:, 40:]].any() and not table[only_late].any()


# Nothing that grows with the square of the length.


def totals(model: nn.Module, length: int, dtype: str) -> dict[str, int]:
    """The counts of a step of 4 windows, with what is saved and alive at the peak in all."""
    measured = measure(model, 4, length, dtype)
    saved = measured.saved()
    counts = {name: count for name, count in measured.counts.items() if name != "beyond"}
    return {**counts, "saved": saved, "peak": saved + measured.counts["beyond"]}


def grows_slowly(counts: Callable[[int], Mapping[str, int]]) -> dict[str, bool]:
    """Of each count, whether it grows from T = 256 to 1024 in a straight line; of a peak, which is the highest of
    several lines (not each of them begins at 0), whether it grows hardly more than T does."""
    at = [counts(length) for length in (256, 512, 1024)]
    lines = {name: at[2][name] - at[1][name] == 2 * (at[1][name] - at[0][name]) for name in at[0]}
    return lines | {name: at[2][name] < 4.1 * at[0][name] for name in at[0] if "peak" in name}


@pytest.mark.parametrize("capacity", [0.0, 1.0])
@pytest.mark.parametrize(("kernels", "dtype"), [(PLAIN, "fp32"), (PLAIN, "bf16"), (FUSED, "bf16")], ids=str)
def test_what_a_step_computes_moves_and_keeps_grows_in_a_straight_line_with_the_length(
    kernels: Mapping[str, str], dtype: str, capacity: float
) -> None:
    with phantoms(), torch.device("cpu"):
        model = built(TINY, kernels, layers=2, width=64, heads=2, moe_capacity=str(capacity), **ALL_PARTS)
        grows = grows_slowly(lambda length: totals(model, length, dtype))
    assert {"flops", "bytes", "saved", "peak"} <= set(grows)
    assert all(grows.values()), grows


def test_a_product_of_every_token_with_every_other_would_be_seen() -> None:
    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 8)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            x = self.embedding(inputs)
            return (x @ x.mT).square().mean()  # type: ignore[no-any-return]

    with phantoms(), torch.device("cpu"):
        model = Quadratic()
        grows = grows_slowly(lambda length: totals(model, length, "fp32"))
    assert not any(grows[name] for name in ("flops", "bytes", "saved", "peak")), grows


# The presets' sizes.


@pytest.mark.parametrize(
    ("workload", "millions", "of_engram"), [(SMALL, 9.5, None), (MEDIUM, 142.0, None), (B1, 1070.0, 402.0)]
)
def test_presets_have_the_sizes_that_are_told_of_them(
    workload: KdaWorkload, millions: float, of_engram: float | None
) -> None:
    with torch.device("meta"):
        model = built(workload, FUSED)
    assert numbers(model) / 1e6 == pytest.approx(millions, rel=0.02)
    engrams = [module for module in model.modules() if isinstance(module, Engram)]
    assert len(engrams) == 1
    if of_engram is not None:
        assert numbers(engrams[0]) / 1e6 == pytest.approx(of_engram, rel=0.02)


def numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
