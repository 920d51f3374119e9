"""Memory mechanisms: what is exact is bit-equal, what is offered says where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.mechanisms import act_ckpt, moe_offload, muon_state_bf16, recompute, saved
from executor.models.presets import TINY
from executor.workloads import configure, values


def model() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = TINY.build(
        values(configure(TINY, {"layers": "2"})), {"kda": "chunk_torch", "grouped": "grouped_loop"}
    )
    return made


@pytest.mark.parametrize("bf16", [False, True])
def test_recomputed_gradients_and_loss_are_bit_equal(bf16: bool) -> None:
    plain, recomputed = model(), model()
    recompute.apply(recomputed)
    tokens = torch.randint(256, (2, 41))
    losses = []
    for each in (plain, recomputed):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = each(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for (name, a), (other, b) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert name == other
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_recomputation_runs_each_block_twice() -> None:
    each = model()
    runs = []
    each.blocks[0].mix.register_forward_hook(lambda *_: runs.append(1))
    recompute.apply(each)
    tokens = torch.randint(256, (1, 17))
    each(tokens[:, :-1], tokens[:, 1:]).backward()
    assert len(runs) == 2


def copied(flat: torch.Tensor) -> saved.Get:
    kept = flat.clone()
    return lambda: kept


def test_saved_views_are_kept_once_a_storage_and_come_back_with_their_strides() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    seen: list[int] = []

    def put(flat: torch.Tensor) -> saved.Get:
        seen.append(flat.numel())
        return copied(flat)

    def computed() -> torch.Tensor:
        both = x * 1.0
        left, right = both.chunk(2, -1)
        return (left * right) @ weight + (both.T @ both).sin().sum()

    wanted = torch.autograd.grad(computed().square().sum(), [x, weight])
    with saved.saving(0, put=put):
        out = computed()
    # Of both, the product of its halves, the sine's argument and the leaf weight: one each. The weight is no parameter.
    assert sorted(seen) == [24, 24, 48, 64]
    assert all(
        torch.equal(*pair) for pair in zip(torch.autograd.grad(out.square().sum(), [x, weight]), wanted, strict=True)
    )


def test_a_storage_written_between_two_saves_is_kept_as_it_was_at_each() -> None:
    x = torch.randn(64, requires_grad=True)
    with saved.saving(0, put=copied):
        y = x * 1.0
        before = y.sin()
        y.detach().mul_(2)
        after = y.cos()
    (found,) = torch.autograd.grad((before + after).sum(), x)
    assert torch.allclose(found, x.cos() - (2 * x).sin())


def test_a_block_that_takes_keywords_is_recomputed_with_them() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return super().forward(x) * scale

    each = nn.Sequential(nn.ModuleList([Scaled(3, 3)]))
    recompute.apply(each)
    x = torch.randn(2, 3, requires_grad=True)
    each[0][0](x, scale=3.0).sum().backward()
    assert torch.allclose(x.grad, 3 * each[0][0].weight.sum(0).expand(2, 3))


def test_recomputation_leaves_nothing_for_the_mechanisms_that_it_excludes() -> None:
    assert {moe_offload.NAME, act_ckpt.NAME} == set(recompute.ROW["excludes"])
    assert all(recompute.NAME in other.ROW["excludes"] for other in (moe_offload, act_ckpt))


def test_a_model_without_blocks_cannot_be_recomputed() -> None:
    assert recompute.offered(model(), "muon")
    assert not recompute.offered(nn.Linear(2, 2), "muon")
    with pytest.raises(ValueError, match="has none"):
        recompute.apply(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("mechanism", "facts", "ok", "reason"),
    [
        (recompute, {"device": "cpu"}, True, "needs nothing"),
        (recompute, {"device": "mps"}, False, "offered on cpu and cuda; this rank is mps"),
        (act_ckpt, {"device": "cpu"}, True, "needs nothing"),
        (act_ckpt, {"device": "mps"}, False, "offered on cpu and cuda; this rank is mps"),
        (moe_offload, {"device": "cuda"}, True, "pinned host memory"),
        (moe_offload, {"device": "cpu"}, False, "offered on cuda; what a rank on cpu saves is in host memory already"),
        (muon_state_bf16, {"device": "cuda", "opt": "muon"}, True, "storage only"),
        (muon_state_bf16, {"device": "cuda", "opt": "adamw"}, False, "no Muon momentum under --opt adamw"),
    ],
)
def test_eligibility_gives_its_reason(mechanism: object, facts: dict[str, str], ok: bool, reason: str) -> None:
    found, why = mechanism.eligibility(facts)  # type: ignore[attr-defined]
    assert found is ok
    assert reason in why
