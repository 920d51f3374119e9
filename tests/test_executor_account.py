"""The account against reality: real runs, torch's own FLOP counter, the allocator's events, FakeTensorMode."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from executor.account import account, measure, workload_digest
from executor.count import Tally, bilinear, evaluate
from executor.mechanisms import recompute
from executor.models.presets import TINY
from executor.optim.routing import split
from executor.workloads import configure, values
from planner.door import BadWorkload

SIZES = [(3, 80), (4, 128), (5, 208)]


@cache
def tiny() -> dict[str, Any]:
    return account({"model": "tiny"})


def model(layers: str = "4", variant: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = TINY.build(
        values(configure(TINY, {"layers": layers})), {"kda": "chunk_torch", "grouped": "grouped_loop"}
    )
    if variant == "recompute":
        recompute.apply(made)
    return made


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["plain", "recompute"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_count_equals_that_of_a_real_run_at_full_depth(dtype: str, variant: str, size: tuple[int, int]) -> None:
    real = measure(model(variant=variant), *size, dtype)
    forms = tiny()["compute"]["kda=chunk_torch"][dtype][variant]
    for count, value in real.items():
        found = evaluate(forms[count], *size) if count in forms else 0
        assert found == pytest.approx(value, rel=0.01), count


def test_flops_equal_torchs_own_counter_without_the_depthwise_convolutions() -> None:
    real = model()
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        real(tokens, tokens).backward()
    by_operator = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = sum(n for name, n in by_operator.items() if "convolution" not in name)
    assert evaluate(tiny()["compute"]["kda=chunk_torch"]["fp32"]["plain"]["flops"], 4, 128) == products


def allocator(variant: str, batch: int, length: int) -> tuple[int, int]:
    """(bytes alive at the end of forward, peak) of a real run, from the CPU allocator's events in torch's profiler."""
    real = model(variant=variant)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    for _ in range(2):
        real(tokens, tokens).backward()  # gradients exist; buffers of libraries are warm
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward_profile:
        loss = real(tokens, tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward_profile:
        loss.backward()
    saved, _ = running(forward_profile)
    _, peak = running(backward_profile)
    return saved, saved + peak


def running(profiled: Any) -> tuple[int, int]:
    """(final, highest) sum of the allocator's events."""
    total = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return total, peak


@pytest.mark.parametrize("variant", ["plain", "recompute"])
def test_bytes_kept_for_backward_and_the_peak_equal_the_cpu_allocators(variant: str) -> None:
    saved, peak = allocator(variant, 3, 112)
    forms = tiny()["compute"]["kda=chunk_torch"]["fp32"][variant]
    assert evaluate(forms["saved"], 3, 112) == pytest.approx(saved, rel=0.01)
    assert evaluate(forms["peak"], 3, 112) == pytest.approx(peak, rel=0.05)


def test_tensors_without_memory_count_as_torchs_fake_tensors_do() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from executor.phantom import phantoms

    for dtype in ("fp32", "bf16"):
        with FakeTensorMode():
            fake = measure(model("2"), 2, 64, dtype)
        with phantoms():
            own = measure(model("2"), 2, 64, dtype)
        assert own == fake


def test_a_tally_follows_tensors_as_they_come_and_go() -> None:
    x = torch.zeros(1000)
    with Tally([x]) as tally:
        y = x + 1
        view = y[10:]
        del y
        assert (tally.live, tally.peak, tally.launches) == (4000, 4000, 1)
        z = view * 2
        del view
        assert (tally.live, tally.peak) == (3960, 7960)
        z.add_(1)
        assert (tally.live, tally.launches) == (3960, 3)
    assert tally.flops == 0


def test_a_bilinear_form_is_recovered_exactly_and_evaluated_anywhere() -> None:
    form = {"one": 7, "b": -3, "t": 5, "bt": 11}
    at = {(b, t): int(evaluate(form, b, t)) for b in (2, 4) for t in (128, 192)}
    assert bilinear(at) == form


def digest(settings: dict[str, str], opt: str = "muon") -> str:
    with torch.device("meta"):
        built = TINY.build(values(configure(TINY, settings)), {"kda": "chunk_torch", "grouped": "grouped_loop"})
    return workload_digest(split(built, opt), TINY.kernels)


def test_the_digest_follows_the_work_and_not_the_learning_rate() -> None:
    assert digest({}) == digest({"muon_lr": "0.5"}) == tiny()["digest"]
    assert len({digest({}), digest({"layers": "5"}), digest({"ffn": "360"}), digest({}, "adamw")}) == 4


def test_under_adamw_nothing_is_routed_to_muon_and_its_mechanism_is_not_offered() -> None:
    made = account({"model": "tiny", "opt": "adamw"})
    assert made["parameters"]["muon"] == made["tensors"]["muon"] == 0
    assert made["matrices"] == [] and made["shapes"] == {"fp32": {}, "bf16": {}}
    assert set(made["mechanisms"]) == {"act_ckpt", "optim_8bit", "recompute"}


def test_one_matrix_update_counts_its_newton_schulz_products() -> None:
    m, n, steps = 128, 352, 5
    assert tiny()["shapes"]["fp32"]["128x352"]["flops"] == steps * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def test_a_users_module_without_blocks_has_one_variant(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_model.py").write_text(
        "from torch import nn\n"
        "class Plain(nn.Module):\n"
        "    def __init__(self, width: int = 16):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)\n"
        "    def forward(self, inputs, targets):\n"
        "        return nn.functional.cross_entropy(self.head(self.embed(inputs)).flatten(0, 1), targets.flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    made = account({"model": "plain_model:Plain", "set": {"width": "32"}})
    assert set(made["compute"]["none"]["fp32"]) == {"plain"}
    assert "recompute" not in made["mechanisms"]
    assert made["parameters"] == {"muon": 0, "adamw": 256 * 32 * 2 + 256, "tables": 0}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "names no model"),
        ({"model": "tiny", "opt": "sgd"}, "opt=sgd"),
        ({"model": "tiny", "set": {"a": 1}}, "text"),
    ],
)
def test_a_request_that_is_none_is_told(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        account(request_)


def ask(request: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-P", "-m", "executor.account"], input=request.encode(), capture_output=True)


def test_the_command_gives_a_sealed_account_in_the_one_form() -> None:
    from schemas.form import parse, render
    from schemas.seal import verify

    done = ask('{"model": "tiny", "set": {}, "opt": "muon"}')
    assert done.returncode == 0, done.stderr.decode()
    document = parse(done.stdout, "account")
    assert render(document) == done.stdout
    verify(document, "account")
    assert {key: document[key] for key in tiny()} == json.loads(json.dumps(tiny()))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ('{"model": "tiny", "set": {"layer": "2"}, "opt": "muon"}', "did you mean layers?"),
        ('{"model": "tiny", "set": {"heads": "3"}, "opt": "muon"}', "not a multiple of heads=3"),
        ("[", "request: "),
    ],
)
def test_the_command_tells_a_users_mistake_in_one_line_with_exit_code_2(request_: str, message: str) -> None:
    done = ask(request_)
    assert done.returncode == 2
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
