"""Quantized activations: off by as much as is stated, in what may be off, and never in anything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from devices import BOUNDS, DEVICES, relative
from executor.measure import measure
from executor.mechanisms import act_ckpt
from executor.mechanisms.act_ckpt import GROUP, quantized
from executor.models.kda import FeedForward
from executor.models.presets import TINY
from executor.phantom import phantoms
from executor.workloads import configure, values

TOKENS, WIDTH, HIDDEN = 48, 64, 96
DATA, FROZEN = torch.rand(2, TOKENS, WIDTH), torch.randn(WIDTH, WIDTH)


class Chain(nn.Module):
    """Blocks over embedded bytes, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x.float().flatten(0, -2), targets.flatten() % WIDTH)


class Calls(nn.Module):
    """A block that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.core = None
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Core(nn.Module):
    """A block of nothing but a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.core = lambda x: (x.cumsum(-1) / 8).exp() * x

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


def here_and_back(x: Tensor) -> Tensor:
    return quantized(x, lambda flat: lambda: flat)()


def model(layers: int, **keys: str) -> nn.Module:
    torch.manual_seed(0)
    config = values(configure(TINY, {"layers": str(layers), **keys}))
    made: nn.Module = TINY.build(config, {"kda": "chunk_torch", "grouped": "grouped_loop"})
    return made


def texts(seed: int, batch: int, length: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Windows of a Python file."""
    data = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - length - 1, (batch, 1), generator=torch.Generator().manual_seed(seed))
    made = data[starts + torch.arange(length + 1)].to(device)
    return made[:, :-1], made[:, 1:]


def gradients(of: nn.Module, batch: tuple[Tensor, Tensor], bf16: bool = False) -> tuple[Tensor, list[Tensor]]:
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=bf16):
        loss = of(*batch)
    return loss.detach(), list(torch.autograd.grad(loss, list(of.parameters())))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [5, GROUP, 10 * GROUP + 7])
def test_each_element_is_off_by_half_a_level_of_its_group_at_most(device: str, dtype: torch.dtype, length: int) -> None:
    x = (torch.randn(length, device=device) * torch.logspace(-3, 2, length, device=device)).to(dtype)
    back = here_and_back(x)
    assert back.dtype == dtype
    assert back.shape == x.shape
    own = torch.finfo(dtype).eps  # what rounding back to the dtype adds
    for group, wanted in zip(back.double().split(GROUP), x.double().split(GROUP), strict=True):
        most = wanted.abs().max()
        assert (group - wanted).abs().max() <= most * (1 / 254 + own + 1e-6)
        assert len(group.unique()) <= 255


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_come_back_as_zeros_and_what_is_not_finite_not_finite(device: str) -> None:
    x = torch.zeros(4 * GROUP, device=device)
    x[GROUP], x[2 * GROUP], x[3 * GROUP] = torch.inf, torch.nan, 3.0
    groups = here_and_back(x).view(4, GROUP)
    assert torch.equal(groups[0], torch.zeros_like(groups[0]))
    assert not groups[1:3].isfinite().all(1).any()
    assert torch.equal(groups[3], x[3 * GROUP :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_weights_gradient_is_that_of_the_rounded_input_and_an_inputs_is_exact(device: str, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    chain = Chain(linear).to(device)
    act_ckpt.apply(chain)
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        out = linear(x * 1.0)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, [linear.weight, x], gradient)
    rows = x.detach().to(dtype).double().view(-1, GROUP)
    scale = rows.abs().amax(1, keepdim=True).float().double() / 127
    rounded = ((rows / scale).round() * scale).to(dtype).double().view(TOKENS, WIDTH)
    assert relative(found[0], gradient.double().T @ rounded) <= BOUNDS[dtype] / 3
    assert relative(found[0], gradient.double().T @ x.double()) > 1e-3
    assert relative(found[1], gradient.double() @ linear.weight.to(dtype).double()) <= BOUNDS[dtype] / 3


def test_what_the_kernel_keeps_is_exact() -> None:
    plain, quantizing = Chain(Core()), Chain(Core())
    quantizing.load_state_dict(plain.state_dict())
    act_ckpt.apply(quantizing)
    batch = texts(0, 2, TOKENS)
    assert torch.equal(flat(gradients(plain, batch)[1]), flat(gradients(quantizing, batch)[1]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * DATA,
        lambda x: x @ FROZEN,
        lambda x: x.gather(-1, torch.arange(WIDTH).flip(0).expand_as(x)),
        lambda x: x.sum(-1, keepdim=True).exp().expand_as(x),
    ],
    ids=["data", "frozen weight", "indices", "one number a token"],
)
def test_what_is_no_activation_or_small_is_exact(function: Callable[[Tensor], Tensor]) -> None:
    plain, quantizing = Chain(Calls(function)), Chain(Calls(function))
    quantizing.load_state_dict(plain.state_dict())
    act_ckpt.apply(quantizing)
    batch = texts(0, 2, TOKENS)
    assert torch.equal(flat(gradients(plain, batch)[1]), flat(gradients(quantizing, batch)[1]))


def saved(bf16: bool, quantize: bool) -> int:
    with phantoms(), torch.device("cpu"):
        chain = Chain(*(FeedForward(WIDTH, HIDDEN) for _ in range(3)))
        if quantize:
            act_ckpt.apply(chain)
        return measure(chain, 2, TOKENS, "bf16" if bf16 else "fp32").saved()


@pytest.mark.parametrize(("bf16", "size"), [(False, 4), (True, 2)])
def test_each_saved_activation_is_kept_once_at_a_byte_an_element_and_its_scales(bf16: bool, size: int) -> None:
    elements = 3 * 2 * TOKENS * (WIDTH + 4 * HIDDEN)  # of each block: its input, both halves, SiLU, their product
    fell = saved(bf16, quantize=False) - saved(bf16, quantize=True)
    assert fell == elements * size - (elements + elements // GROUP * 4)


@pytest.mark.gpu
def test_memory_of_the_card_falls() -> None:
    found = []
    for mechanisms in ((), (act_ckpt,)):
        chain = Chain(*(FeedForward(WIDTH, 4096) for _ in range(3))).cuda()
        for mechanism in mechanisms:
            mechanism.apply(chain)
        batch = texts(0, 4, 256, "cuda")
        gradients(chain, batch)
        with torch.autocast("cuda", torch.bfloat16):
            loss = chain(*batch)
        found.append(torch.cuda.memory_allocated())
        del loss, chain
    kept = 3 * 4 * 256 * 4 * 4096
    assert found[0] - found[1] >= 0.9 * kept * (1 - 4 / GROUP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", [{}, {"experts": "4", "topk": "2", "expert_ffn": "96"}], ids=["dense", "experts"])
def test_the_loss_is_exact_and_the_gradients_are_as_far_off_as_stated(device: str, keys: dict[str, str]) -> None:
    plain, quantizing, batch = model(4, **keys).to(device), model(4, **keys).to(device), texts(1, 4, 64, device)
    act_ckpt.apply(quantizing)
    bf16 = device == "cpu"  # on a card, two plain runs in bf16 are as far apart by themselves
    loss, wanted = gradients(plain, batch, bf16=bf16)
    loss_too, found = gradients(quantizing, batch, bf16=bf16)
    if device == "cpu":
        assert torch.equal(loss, loss_too)
    stated = float(act_ckpt.ROW["error"].split()[1]) / 100
    assert stated / 3 <= relative(flat(found), flat(wanted)) <= 3 * stated


def trained(steps: int, quantize: bool) -> list[float]:
    made, losses = model(2, width="64", heads="2", ffn="176"), []
    if quantize:
        act_ckpt.apply(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    for step in range(steps):
        loss, found = gradients(made, texts(step, 4, 32))
        for parameter, gradient in zip(made.parameters(), found, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_training_descends_as_it_does_without_and_twice_the_same() -> None:
    plain, quantizing = trained(50, quantize=False), trained(50, quantize=True)
    assert sum(plain[:5]) - sum(plain[-5:]) > 5 * 2.0
    assert abs(sum(plain[-10:]) - sum(quantizing[-10:])) / 10 < 0.03
    assert trained(5, quantize=True) == quantizing[:5]


def test_a_model_without_blocks_cannot_be_quantized() -> None:
    assert not act_ckpt.offered(nn.Linear(2, 2), "muon")
    with pytest.raises(ValueError, match="has none"):
        act_ckpt.apply(nn.Linear(2, 2))
