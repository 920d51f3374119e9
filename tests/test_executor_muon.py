"""Muon against torch's own and a float64 Newton-Schulz; owners; and bit-identical application on unlike kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elsewhere import both
from executor.mechanisms import muon_state_bf16
from executor.optim.muon import COEFFICIENTS, EPS, Muon, lr_scale, orthogonalise
from executor.optim.schedule import factor
from planner.passes.cost import stacks

SHAPES = ((48, 32), (32, 48), (48, 32), (32, 32), (4, 32))
Named = list[tuple[str, nn.Parameter]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrices() -> Named:
    torch.manual_seed(0)
    return [(f"m{i}", nn.Parameter(torch.randn(shape) * shape[1] ** -0.5)) for i, shape in enumerate(SHAPES)]


def set_gradients(named: Named, step: int) -> None:
    generator = seeded(step)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=generator)


def run(named: Named, muon: Muon, steps: int, lr: float = 0.02) -> None:
    for step in range(steps):
        set_gradients(named, step)
        muon.apply(muon.updates(), lr)


def newton_schulz_64(x: Tensor, steps: int) -> Tensor:
    """One matrix in float64, written apart from the code under test: x <- a x + (b g + c g g) x, g = x x^T."""
    a, b, c = COEFFICIENTS
    x = x.double()
    x = x / max(float(x.norm()), EPS)
    for _ in range(steps):
        if x.shape[0] <= x.shape[1]:
            g = x @ x.T
            x = a * x + (b * g + c * g @ g) @ x
        else:
            g = x.T @ x
            x = a * x + x @ (b * g + c * g @ g)
    return x


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_fp32_newton_schulz_equals_float64(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    batch = torch.randn(3, *shape)
    found = orthogonalise(batch, 5, torch.float32)
    for matrix, update in zip(batch, found, strict=True):
        exact = newton_schulz_64(matrix, 5)
        assert float((update.double() - exact).norm() / exact.norm()) < 2e-5
        assert float((update.double() - newton_schulz_64(matrix, 4)).norm() / exact.norm()) > 1e-2  # a lost step shows


def test_bf16_newton_schulz_equals_torchs_muon_up_to_the_rounding_of_batched_products() -> None:
    named, reference = matrices(), matrices()
    own = Muon(named, [0] * len(named), 0, weight_decay=0.1, ns_dtype=torch.bfloat16)
    torchs = torch.optim.Muon([p for _, p in reference], lr=0.02, momentum=0.95, weight_decay=0.1)
    for step in range(5):
        set_gradients(named, step)
        set_gradients(reference, step)
        own.apply(own.updates(), 0.02)
        torchs.step()
    for (_, p), (_, r), (_, s) in zip(named, reference, matrices(), strict=True):
        way = float((r - s).detach().norm())
        assert float((p - r).detach().norm()) < 4e-3 * way  # one rounding to bf16 is 2^-9


def test_momentum_and_the_look_ahead_are_those_of_torchs_muon_bit_for_bit() -> None:
    named, reference = matrices(), matrices()
    own = Muon(named, [0] * len(named), 0)
    torchs = torch.optim.Muon([p for _, p in reference], lr=0.02, momentum=0.95)
    for step in range(3):
        set_gradients(named, step)
        set_gradients(reference, step)
        own.updates()
        torchs.step()
    for name, p in reference:
        index = int(name[1:])
        assert torch.equal(own.state_dict()[f"m{index}"], torchs.state[p]["momentum_buffer"])


def applied(steps: int, fused: bool = False) -> bytes:
    """Weights after applying given updates: run in other processes."""
    # Uniform values: torch.randn itself differs by CPU kernels.
    named = [(f"m{i}", nn.Parameter(torch.rand(s, generator=seeded(i)) - 0.5)) for i, s in enumerate(SHAPES)]
    muon = Muon(named, [1] * len(named), 0, weight_decay=0.1)
    for step in range(steps):
        updates = [(torch.rand(p.shape, generator=seeded(step)) - 0.5).bfloat16() for _, p in named]
        if fused:
            with torch.no_grad():
                for (_, p), update in zip(named, updates, strict=True):
                    p.mul_(1 - 0.002).add_(update.float(), alpha=-0.02 * lr_scale(p))
        else:
            muon.apply(updates, 0.02)
    return b"".join(p.detach().numpy().tobytes() for _, p in named)


def test_applying_updates_is_bit_identical_on_cpu_kernels_that_round_differently() -> None:
    plain, vectors = both("test_executor_muon.applied(20)")
    assert plain == vectors


def test_the_pair_of_processes_does_tell_a_fused_application_apart() -> None:
    plain, vectors = both("test_executor_muon.applied(20, fused=True)")
    assert plain != vectors, "these CPU kernels no longer round differently: the test above proves nothing here"


def test_owners_together_give_what_one_owner_gives() -> None:
    alone, first, second = matrices(), matrices(), matrices()
    owners = [0, 1, 1, 0, 1]
    one = Muon(alone, [0] * len(owners), 0)
    a, b = Muon(first, owners, 0), Muon(second, owners, 1)
    for step in range(3):
        for named in (alone, first, second):
            set_gradients(named, step)
        one.apply(one.updates(), 0.02)
        mine, theirs = iter(a.updates()), iter(b.updates())
        together = [next(mine) if owner == 0 else next(theirs) for owner in owners]
        a.apply(together, 0.02)
        b.apply(together, 0.02)
    for (_, p), (_, q), (_, r) in zip(alone, first, second, strict=True):
        assert torch.equal(q, r)
        assert float((p - q).detach().norm() / p.detach().norm()) < 1e-6
    state = a.state_bytes()["muon_momentum"] + b.state_bytes()["muon_momentum"]
    assert state == one.state_bytes()["muon_momentum"] == 4 * sum(p.numel() for _, p in alone)


def test_a_stack_of_matrices_is_updated_as_its_matrices_one_by_one() -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 16, 24))
    single = [(f"s{i}", nn.Parameter(stack.detach()[i].clone())) for i in range(3)]
    gradient = torch.randn(3, 16, 24)
    stack.grad = gradient
    for i, (_, p) in enumerate(single):
        p.grad = gradient[i].clone()
    a, b = Muon([("stack", stack)], [0], 0), Muon(single, [0] * 3, 0)
    a.apply(a.updates(), 0.02)
    b.apply(b.updates(), 0.02)
    assert torch.equal(stack, torch.stack([p for _, p in single]))


def test_stacks_of_any_size_give_the_same_updates_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = matrices(), matrices()
    a = Muon(whole, [0] * 5, 0)
    monkeypatch.setattr("executor.optim.muon.STACK_BYTES", 48 * 32 * 4)
    b = Muon(split, [0] * 5, 0)
    assert (len(a._groups), len(b._groups)) == (4, 5)
    run(whole, a, 3)
    run(split, b, 3)
    assert a.state_dict().keys() == b.state_dict().keys()
    for (_, p), (_, q) in zip(whole, split, strict=True):
        assert float((p - q).detach().norm() / p.detach().norm()) < 1e-6


def test_momentum_in_bf16_halves_its_bytes_and_stays_within_its_rounding() -> None:
    exact, rounded = matrices(), matrices()
    options: dict[str, torch.dtype] = {}
    muon_state_bf16.apply(options)
    a, b = Muon(exact, [0] * 5, 0), Muon(rounded, [0] * 5, 0, state_dtype=options["state_dtype"])
    run(exact, a, 20)
    run(rounded, b, 20)
    assert 2 * b.state_bytes()["muon_momentum"] == a.state_bytes()["muon_momentum"]
    start = matrices()
    worst = max(
        float((q - p).detach().norm() / (p - s).detach().norm())
        for (_, p), (_, q), (_, s) in zip(exact, rounded, start, strict=True)
    )
    assert 1e-5 < worst < 2e-2, f"after 20 steps the weights' way differs by {worst:.1e} of its length"


def test_a_missing_gradient_is_named_before_momentum_moves() -> None:
    named = matrices()
    set_gradients(named, 0)
    named[2][1].grad = None
    muon = Muon(named, [0] * 5, 0)
    with pytest.raises(RuntimeError, match="no gradient for m2"):
        muon.updates()
    assert all(not part.any() for part in muon.state_dict().values())


def test_a_saved_momentum_goes_on_exactly() -> None:
    named = matrices()
    muon = Muon(named, [0, 1, 0, 0, 1], 0)
    run_once = [set_gradients(named, 0), muon.updates()][1]
    other = Muon(named, [0, 1, 0, 0, 1], 0)
    other.load_state_dict(muon.state_dict())
    assert len(run_once) == 3
    assert all(torch.equal(a, b) for a, b in zip(muon.updates(), other.updates(), strict=True))


@pytest.mark.parametrize(
    ("step", "steps", "warmup", "final", "expected"),
    [(0, 60, 5, 0.1, 0.2), (4, 60, 5, 0.1, 1.0), (5, 60, 5, 0.1, 1.0), (59, 60, 5, 0.1, 0.1), (32, 60, 5, 0.1, 0.55),
     (0, 1, 0, 0.1, 1.0), (9, 10, 0, 0.0, 0.0), (2, 3, 10, 0.5, 0.3)],
)  # fmt: skip
def test_the_schedule_warms_up_and_decays_along_straight_lines(
    step: int, steps: int, warmup: int, final: float, expected: float
) -> None:
    assert factor(step, steps, warmup, final) == pytest.approx(expected)


def test_a_stack_of_matrices_with_inputs_first_is_updated_as_its_transpose_is() -> None:
    torch.manual_seed(0)
    rows_first = nn.Parameter(torch.randn(3, 6, 4))
    inputs_first = nn.Parameter(rows_first.detach().mT.clone())
    inputs_first.inputs_first = True  # type: ignore[attr-defined]
    for parameter in (rows_first, inputs_first):
        gradient = torch.linspace(-1, 1, 72).view(3, 6, 4).sin()
        parameter.grad = gradient if parameter is rows_first else gradient.mT.clone()
        muon = Muon([("stack", parameter)], [0], 0)
        muon.apply(muon.updates(), 0.1)
    assert torch.allclose(inputs_first.mT, rows_first, rtol=1e-5, atol=1e-6)
    assert lr_scale(inputs_first) == lr_scale(rows_first) == 1.5**0.5


def test_the_planner_knows_the_stacks_that_are_iterated() -> None:
    shapes = [(3, 4000, 3000), (4000, 3000), (8, 8), (4000, 3000), (2, 4000, 3000), (8, 8), (6, 4000, 3000)]
    with torch.device("meta"):
        named = [(str(place), nn.Parameter(torch.empty(shape))) for place, shape in enumerate(shapes)]
        muon = Muon(named, [0, 0, 0, 1, 0, 0, 0], 0)
    planned = stacks([{"shape": list(shape)} for shape in shapes], muon.owned)
    assert [members for _, members in planned] == muon._groups == [[0, 1], [2, 5], [4], [6]]
