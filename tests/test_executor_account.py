"""The account against reality: real runs, torch's own FLOP counter, the allocator's events, FakeTensorMode."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from executor.account import account, workload_digest
from executor.card import IN_FP32
from executor.count import WEIGHTS, Tally, bilinear
from executor.envelope import envelope
from executor.kernels.offload import CARRIED
from executor.measure import SAVED, measure
from executor.mechanisms import recompute
from executor.models.presets import TINY
from executor.optim.routing import split
from executor.phantom import phantoms, storage_of
from executor.places import LOSS
from executor.workloads import configure, values
from planner.door import BadWorkload
from planner.passes.cost import polynomial

SIZES = [(3, 80), (4, 128), (5, 208)]


@cache
def tiny() -> dict[str, Any]:
    return account({"model": "tiny"})


def predicted(forms: dict[str, Any], batch: int, length: int) -> dict[str, float]:
    """Every count of a form set, named as measured, with ``saved`` and ``peak`` in all."""
    alone = ("saved", "beyond", "first")
    found = {name: polynomial(form, batch, length, 1) for name, form in forms.items() if name not in alone}
    found |= {f"{SAVED}{part}": polynomial(form, batch, length, 1) for part, form in forms["saved"].items()}
    found["saved"] = sum(polynomial(form, batch, length, 1) for form in forms["saved"].values())
    beyond, first = (
        max((line["one"] + line["bt"] * batch * length for line in forms.get(name, ())), default=0.0)
        for name in ("beyond", "first")
    )
    return {**found, "peak": max(found["saved"] + beyond, first)}


def counted(made: nn.Module, batch: int, length: int, dtype: str, recomputed: bool = False) -> dict[str, float]:
    """What a measured pass holds, named alike."""
    counts = dict(measure(made, batch, length, dtype, recompute.HOOKED * recomputed).counts)
    counts["saved"] = sum(n for name, n in counts.items() if name.startswith(SAVED))
    counts["peak"] = counts["saved"] + counts.pop("beyond")
    return dict(counts)


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
    real = counted(model(variant=variant), *size, dtype, variant == "recompute")
    found = predicted(tiny()["compute"]["cpu"]["kda=chunk_torch"][dtype][variant], *size)
    for count, value in real.items():
        assert found.get(count, 0) == pytest.approx(value, rel=0.01), count


def test_flops_equal_torchs_own_counter_without_the_depthwise_convolutions() -> None:
    real = model()
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        real(tokens, tokens).backward()
    by_operator = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = sum(n for name, n in by_operator.items() if "convolution" not in name)
    assert polynomial(tiny()["compute"]["cpu"]["kda=chunk_torch"]["fp32"]["plain"]["flops"], 4, 128, 1) == products


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
    found = predicted(tiny()["compute"]["cpu"]["kda=chunk_torch"]["fp32"][variant], 3, 112)
    assert found["saved"] == pytest.approx(saved, rel=0.01)
    assert found["peak"] == pytest.approx(peak, rel=0.05)


def test_tensors_without_memory_count_as_torchs_fake_tensors_do() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in ("fp32", "bf16"):
        with FakeTensorMode():
            fake = measure(model("2"), 2, 64, dtype)
        with phantoms():
            own = measure(model("2"), 2, 64, dtype)
        assert own == fake


def kept(kind: str, dtype: torch.dtype) -> tuple[str, int]:
    """(backward's node, bytes saved beside the input) of an RMSNorm of 6 rows of 32 numbers."""
    with phantoms(kind):
        norm, x = nn.RMSNorm(32, dtype=dtype), torch.zeros(6, 32, dtype=dtype, requires_grad=True)
        with Tally([x, norm.weight]) as tally:
            node = norm(x).grad_fn  # the output is let go, what is saved is not
            return node.name(), tally.live


def test_a_cards_norm_keeps_a_number_a_row_and_a_cpus_a_copy_of_its_input() -> None:
    assert kept("cuda", torch.float32) == ("FusedRmsNormBackward0", 6 * 4)
    assert kept("cuda", torch.bfloat16) == ("FusedRmsNormBackward0", 6 * 4)
    node, nbytes = kept("cpu", torch.float32)
    assert node != "FusedRmsNormBackward0" and nbytes >= 6 * 4 + 6 * 32 * 4
    real = nn.RMSNorm(32)
    given = torch.randn(6, 32, requires_grad=True)
    assert real(given).grad_fn.name() == node  # outside of the mode nothing is registered any more


def test_what_autocast_widens_as_on_a_card_stands_in_torchs_own_list() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(encoding="utf-8")
    listed = {
        ".".join(name.strip() for name in entry.split(","))
        for part in ("AT_FORALL_FP32(_)", "AT_FORALL_FP32_SET_OPT_DTYPE(_)")
        for entry in re.findall(r"_\(([^)]*)\)", header.split(f"#define {part}")[1].split("#define")[0])
    }
    assert set(IN_FP32) <= listed
    with phantoms("cuda"), torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = torch.zeros(4, 8) @ torch.zeros(8, 8)
        assert narrow.dtype == torch.bfloat16
        for function in (lambda x: x.softmax(-1), lambda x: nn.functional.layer_norm(x, (8,)), torch.exp):
            assert function(narrow).dtype == torch.float32
    with phantoms(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.zeros(4, 8) @ torch.zeros(8, 8)).softmax(-1).dtype == torch.bfloat16


def test_views_of_phantoms_share_what_stands_for_memory_and_nothing_else_does() -> None:
    with phantoms():
        x = torch.zeros(4, 6)
        halves, copy = x.view(2, 12).chunk(2, -1), x.clone()
        assert {id(storage_of(part)) for part in (*halves, x.t(), x[1:])} == {id(storage_of(x))}
        assert storage_of(copy) is not storage_of(x)
        assert halves[1].storage_offset() == 6 and halves[1].add_(1) is halves[1]
        values, indices = x.sort()
        assert storage_of(values) is not storage_of(indices) and indices.dtype == torch.int64


def test_saved_bytes_are_told_by_part_of_the_model() -> None:
    parts = set(whole()["compute"]["cuda"]["grouped=grouped_loop,kda=chunk_fla"]["bf16"]["plain"]["saved"])
    assert parts == {"embedding", "block", "mix", "core", "norms", "moe", "engram", "head", LOSS, WEIGHTS} - {"head"}
    with phantoms("cuda"):
        made = TINY.build(values(configure(TINY, {})), {"kda": "chunk_fla", "grouped": "grouped_loop"})
        mix = made.get_submodule("blocks.0.mix")
        core, counts = mix.core, measure(made, 4, 64, "bf16").counts
    assert mix.core is core  # followed while it was measured, and no longer
    tokens, blocks = 4 * 64, 4
    assert counts["saved/norms"] == 4 * tokens * (2 * blocks + 1)  # a number a row, the input is another part's
    assert counts["saved/weights_cast"] == 2 * sum(
        p.numel() for name, p in made.named_parameters() if p.ndim > 1 and "embedding" not in name
    )


@pytest.mark.parametrize("shape", [(2, 128, 4, 64, 64), (1, 100, 2, 32, 64), (1, 64, 2, 128, 128)], ids=str)
def test_what_flas_kernels_take_within_themselves_is_what_its_own_code_allocates(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("fla") is None:
        pytest.skip("fla-core is not installed")
    from triton.runtime.jit import KernelInterface

    from executor.kernels import kda_fla
    from executor.kernels.registry import costs

    kda_fla._fla(4, 64)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)  # launch nothing
    batch, length, heads, keys, channels = shape
    with phantoms():
        q, k, v, decay, beta = (
            torch.zeros(batch, length, heads, *size, dtype=torch.bfloat16)
            for size in ((keys,), (keys,), (channels,), (keys,), ())
        )
        given = (q, k, v, decay, beta, torch.zeros(heads), torch.zeros(heads * keys))
        with Tally(given) as forward:
            out = kda_fla._forward._init_fn(*given)
        saved = (out[1], out[2], *given[2:], *out[3:])
        gradient = torch.zeros_like(v)
        with Tally([gradient, *saved]) as backward:
            gradients = kda_fla._backward._init_fn(gradient, *saved)
        for name, tally, args, made in (
            ("dormouse::kda_chunk", forward, given, out),
            ("dormouse::kda_chunk_backward", backward, (gradient, *saved), gradients),
        ):
            assert costs[name].temporary(*args, out=made) == tally.peak - tally.live, name


lines = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 10**6)), min_size=1, max_size=8)


@given(lines, st.integers(0, 10**5))
def test_an_envelope_is_the_highest_of_all_lines_everywhere(lines: list[tuple[int, int]], tokens: int) -> None:
    courses = [(n, [(one + slope * n, 0) for slope, one in lines]) for n in (512, 2048)]
    found = envelope(*courses)
    assert max(line["one"] + line["bt"] * tokens for line in found) == max(one + slope * tokens for slope, one in lines)
    assert len(found) <= len(set(lines))


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


def test_what_is_offloaded_lies_on_the_host_and_goes_over_the_link_twice() -> None:
    x = torch.zeros(1000)
    with Tally([x]) as tally:
        host = torch.ops.dormouse.offload(x)
        assert (tally.live, tally.host, tally.link, tally.bytes, tally.launches) == (0, 4000, 4000, 0, CARRIED)
        back = torch.ops.dormouse.restore(host, device=x.device)
        del host
        assert (tally.live, tally.peak, tally.host, tally.link) == (4000, 4000, 4000, 8000)
        again = torch.ops.dormouse.offload(back)
        assert (tally.host, tally.link, again.numel()) == (4000, 12000, 1000)


def test_a_tables_gradient_is_counted_apart_and_a_gather_reads_what_it_gives() -> None:
    table, rows = torch.zeros(5000, 4, requires_grad=True), torch.zeros(10, dtype=torch.int64)
    with Tally([table, rows], [table]) as tally:
        found = nn.functional.embedding(rows, table)
        assert (tally.live, tally.bytes, tally.tables_bytes) == (160, 160 + 80 + 160, 0)
        torch.autograd.backward(found, torch.ones_like(found))
    assert tally.tables_bytes >= 80000 and tally.bytes < 10000
    assert tally.live < 1000 and 160 <= tally.tables_peak < 1000


def test_an_opaque_operator_costs_what_is_entered_beside_it() -> None:
    from executor.kernels import registry

    x, w, ends = torch.zeros(8, 4), torch.zeros(2, 4, 6), torch.tensor([3, 8], dtype=torch.int32)
    with Tally([x, w, ends]) as tally:
        registry.lookup("grouped", "grouped_loop")(x, w, ends)
    assert (tally.flops, tally.launches) == (2 * 8 * 4 * 6, registry.costs["dormouse::grouped"].launches)


WHOLE = {"experts": "4", "topk": "2", "expert_ffn": "64", "engram_rows": "500", "engram_heads": "2", "engram_dim": "8"}


@cache
def whole() -> dict[str, Any]:
    """The account of tiny with experts and tables, of the fused kernel alone."""
    return account({"model": "tiny", "set": {**WHOLE, "kda": "chunk_fla", "layers": "5"}})


@pytest.mark.parametrize("engaged", [(), ("moe_offload",), ("act_ckpt",), ("recompute",), ("moe_offload", "act_ckpt")])
def test_every_variant_of_a_whole_model_is_counted_as_at_its_full_depth(engaged: tuple[str, ...]) -> None:
    from executor.mechanisms.table import ORDERED

    chosen = values(configure(TINY, {**WHOLE, "layers": "5"}))
    with phantoms("cuda"):
        made = TINY.build(chosen, {"kda": "chunk_fla", "grouped": "grouped_loop"})
        for mechanism in ORDERED:
            if mechanism.NAME in engaged:
                mechanism.apply(made)
        again = "recompute" in engaged
        measured = {size: counted(made, *size, "bf16", again) for size in ((4, 64), (8, 512), (64, 128))}
    by_set = whole()["compute"]["cuda"]["grouped=grouped_loop,kda=chunk_fla"]
    for size, real in measured.items():
        found = predicted(by_set["bf16"]["+".join(engaged) or "plain"], *size)
        for count, value in real.items():
            assert found.get(count, 0) == pytest.approx(value, rel=0.002), (size, count)
    assert (real["host"] > 0) == ("moe_offload" in engaged)


ATTENDING = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, block: int = 96):
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, 32), nn.Embedding(block, 32)
        self.mix, self.head = nn.Linear(32, 96), nn.Linear(32, 256)
        self.register_buffer("mask", torch.tril(torch.ones(block, block)))

    def forward(self, inputs, targets):
        length = inputs.shape[1]
        x = self.embedding(inputs) + self.places(torch.arange(length, device=inputs.device))
        q, k, v = self.mix(x).chunk(3, -1)
        seen = (q @ k.transpose(1, 2)).masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        logits = self.head(seen.softmax(-1) @ v)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.parametrize("length", [33, 96])
def test_a_module_of_ones_own_is_counted_at_the_length_that_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Attention keeps a matrix of length x length, and takes nothing longer than its places: no form from other lengths
    would hold."""
    (tmp_path / "attending.py").write_text(ATTENDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"model": "attending:Model", "opt": "adamw", "lengths": [length // 2, length], "kinds": ["cpu"]}
    made = account(asked)
    assert made["granule"] == 1
    (forms,) = made["compute"]["cpu"].values()
    real = counted(importlib.import_module("attending").Model(), 5, length, "fp32")
    found = predicted(forms["fp32"]["plain"], 5, length)
    assert real["saved"] > 4 * 5 * length * length
    for count, value in real.items():
        assert found.get(count, 0) == pytest.approx(value, rel=0.01), count


class Chain(nn.Module):
    """Blocks that save some tensors each, and how many in all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(3))
        self.saved = 0

    def _keep(self, tensor: Tensor) -> Tensor:
        self.saved += 1
        return tensor

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        value = inputs[..., None].float().expand(*inputs.shape, 8) + self.blocks[0][0].bias
        for block in self.blocks:
            with saved_tensors_hooks(self._keep, lambda tensor: tensor):
                value = value + block(value)
        return value.square().mean()


def test_each_tensor_that_recomputation_hooks_is_counted_as_host_work() -> None:
    plain, again = Chain(), Chain()
    recompute.apply(again)
    once, hooked = (measure(made, 2, 4, "fp32", hooked) for made, hooked in ((again, 0), (again, 3)))
    measure(plain, 2, 4, "fp32")
    detached = (hooked.counts["launches"] - once.counts["launches"]) / 3
    assert 0 < plain.saved <= detached <= 2 * plain.saved + len(plain.blocks)  # the input of each block is one, too


def test_a_deep_model_of_few_tokens_peaks_where_forward_ends_beside_the_weights_that_autocast_holds() -> None:
    deep = {"layers": "24", "kda": "chunk_fla"}
    with phantoms("cuda"):
        made = TINY.build(values(configure(TINY, deep)), {"kda": "chunk_fla", "grouped": "grouped_loop"})
        recompute.apply(made)
        real = counted(made, 4, 64, "bf16")
    forms = account({"model": "tiny", "set": deep, "kinds": ["cuda"]})["compute"]["cuda"]["kda=chunk_fla"]["bf16"]
    assert predicted(forms["recompute"], 4, 64)["peak"] == pytest.approx(real["peak"], rel=0.002)


def test_an_account_tells_each_set_of_kernels_that_auto_may_choose_and_each_mechanism_in_order() -> None:
    assert list(whole()["compute"]["cuda"]) == ["grouped=grouped_loop,kda=chunk_fla"]
    cpu, cuda = tiny()["compute"]["cpu"], tiny()["compute"]["cuda"]
    assert set(cpu) == {"kda=chunk_torch"} and set(cuda) == {"kda=chunk_fla", "kda=chunk_torch"}
    assert [set(cuda[name]) for name in sorted(cuda)] == [{"bf16"}, {"fp32", "bf16"}]
    assert set(account({"model": "tiny", "kinds": ["cpu"]})["compute"]) == {"cpu"}
    assert "grouped" not in tiny()["kernels"] and "grouped" not in tiny()["config"]
    rows = whole()["mechanisms"]
    order = ["moe_offload", "engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt", "recompute"]
    assert sorted(rows, key=lambda name: rows[name]["order"]) == order
    tables = whole()["parameters"]["tables"]
    assert polynomial(rows["engram_ram"]["host"], 0, 0, 1) == 12 * tables
    assert rows["optim_8bit"]["bytes"] < 8 * whole()["parameters"]["adamw"]


def test_what_is_kept_of_real_cards_is_no_part_of_what_the_work_is() -> None:
    rows = {"kda": [{**row, "tuned": [], "timed": []} for row in TINY.kernels["kda"]]}
    with torch.device("meta"):
        built = TINY.build(values(configure(TINY, {})), {"kda": "chunk_torch", "grouped": "grouped_loop"})
    routed = split(built, "muon")
    assert workload_digest(routed, {**TINY.kernels, **rows}) == tiny()["digest"]


def test_a_bilinear_form_is_recovered_exactly_and_evaluated_anywhere() -> None:
    form = {"one": 7, "b": -3, "t": 5, "bt": 11}
    at = {(b, t): int(polynomial(form, b, t, 1)) for b in (2, 4) for t in (128, 192)}
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
    assert set(made["compute"]["cuda"]["none"]["fp32"]) == {"plain"}
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
        ('{"model": "tiny", "set": {"grouped": "grouped_loop"}, "opt": "muon"}', "calls no kernel of that name"),
        ("[", "request: "),
    ],
)
def test_the_command_tells_a_users_mistake_in_one_line_with_exit_code_2(request_: str, message: str) -> None:
    done = ask(request_)
    assert done.returncode == 2
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("rows", "sums"), [(257, 5000 // 10 + 257), (9973, 5000 // 10 + 5000)])
def test_what_an_embeddings_gradient_takes_within_itself_is_counted_on_a_card_alone(rows: int, sums: int) -> None:
    found = {}
    for kind in ("cpu", "cuda"):
        with phantoms(kind):
            weight, taken = torch.zeros(rows, 64, requires_grad=True), torch.zeros(5000, dtype=torch.int64)
            with Tally([weight, taken]) as tally:
                embedded = nn.functional.embedding(taken, weight)
                torch.autograd.backward(embedded, embedded.detach())
        found[kind] = tally.peak
    assert found["cuda"] - found["cpu"] >= 4 * 64 * sums
    assert found["cuda"] - found["cpu"] <= 4 * 64 * sums + 8 * 5 * 5000 + 8 * sums + 100


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "count"), [(257, 768, 4096), (600_000, 64, 49_152), (257, 2048, 8192)])
def test_what_an_embeddings_gradient_takes_within_itself_is_what_a_card_gives_it(
    rows: int, width: int, count: int
) -> None:
    from executor.card import TEMPORARY

    weight = torch.zeros(rows, width, device="cuda", requires_grad=True)
    embedded = nn.functional.embedding(torch.randint(rows, (count,), device="cuda"), weight)
    gradient = torch.ones_like(embedded)
    torch.autograd.backward(embedded, gradient, retain_graph=True)  # libraries loaded
    weight.grad = None
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(embedded, gradient)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - 4 * weight.numel()
    indices = torch.empty(count, dtype=torch.int64)
    counted = TEMPORARY["aten::embedding_dense_backward"](gradient, indices, rows, -1, False, out=weight)
    assert counted == pytest.approx(taken, rel=1e-3)
