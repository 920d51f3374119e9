"""Names to workloads, text to typed keys; every fault of the user is one message that names the key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from executor.models.presets import TINY
from executor.optim.routing import route, split
from executor.workloads import RUNTIME, configure, resolve, values
from planner.door import BadWorkload, Key, Workload

USERS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, width: int = 16, rate: float = 0.5, kind: str = "plain"):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.head(self.embed(inputs)).flatten(0, 1), targets.flatten())

class Undecided(nn.Module):
    def __init__(self, width):
        super().__init__()

number = 3
"""

KERNELS = {"kda": "chunk_torch", "grouped": "grouped_loop"}


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_model.py").write_text(USERS)
    (tmp_path / "broken_model.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)


def test_tiny_is_found_by_its_entry_point_and_keeps_the_protocol() -> None:
    assert resolve("tiny") == TINY
    assert isinstance(TINY, Workload)


def test_a_users_module_stands_behind_the_door_with_its_parameters_as_keys(users: None) -> None:
    before = list(sys.path)
    workload = resolve("users_model:Small")
    assert sys.path == before
    rows = configure(workload, {"width": "24", "muon_lr": "0.01"})
    assert rows["width"] == {"asked": 24, "chosen": 24, "why": "--set width=24"}
    assert rows["rate"]["chosen"] == 0.5
    model = workload.build(values(rows), {})
    assert model.embed.weight.shape == (256, 24)
    assert workload.depth is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tinny", r"no model 'tinny' \(did you mean tiny\?\); known: .*tiny"),
        ("users_model:Smal", "has no attribute 'Smal'"),
        ("nowhere:Model", "cannot import 'nowhere'"),
        ("broken_model:Model", "ZeroDivisionError"),
        ("users_model:number", "is a int; it must be a workload"),
    ],
)
def test_a_model_that_is_not_there_is_told(users: None, spec: str, message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        resolve(spec)


def test_a_parameter_without_default_is_told(users: None) -> None:
    with pytest.raises(BadWorkload, match="'width' needs a default"):
        configure(resolve("users_model:Undecided"), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": "3"}, r"no key 'layer' to set \(did you mean layers\?\); known: .*adamw_lr.*width"),
        ({"layers": "three"}, "layers=three: must be a whole number"),
        ({"layers": "2.0"}, "layers=2.0: must be a whole number"),
        ({"layers": "0"}, "layers=0: must be within 1 and 1024"),
        ({"layers": "1_0"}, "must be a whole number"),
        ({"muon_lr": "nan"}, "muon_lr=nan: must be within 0 and 10"),
        ({"muon_lr": "-1"}, "must be within 0 and 10"),
        ({"adamw_lr": "fast"}, "adamw_lr=fast: must be a number"),
        ({"ns_dtype": "fp16"}, "ns_dtype=fp16: must be one of auto, fp32, bf16"),
        ({"kda": "triton"}, "kda=triton: must be one of auto, chunk_fla, chunk_torch, recurrent_torch"),
    ],
)
def test_a_bad_setting_names_its_key_and_what_is_allowed(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        configure(TINY, settings)


def test_both_halves_are_resolved_with_typed_values_and_reasons() -> None:
    rows = configure(TINY, {"layers": "6", "ns_dtype": "fp32"})
    assert list(rows) == [key.name for key in (*TINY.keys, *RUNTIME)]
    assert rows["layers"] == {"asked": 6, "chosen": 6, "why": "--set layers=6"}
    assert rows["width"] == {"asked": None, "chosen": 128, "why": "preset tiny"}
    assert values(rows)["muon_lr"] == 0.02


def test_a_models_key_that_belongs_to_the_runtime_is_an_error() -> None:
    class Clashing:
        name, sizes, kernels, depth = "clashing", TINY.sizes, {}, None
        keys = (Key("muon_lr", "float", 1.0, ""),)

        def build(self, *_: object) -> None: ...

    with pytest.raises(BadWorkload, match="belong to the runtime: muon_lr"):
        configure(Clashing(), {})


def test_heads_that_do_not_divide_the_width_are_told() -> None:
    with pytest.raises(BadWorkload, match="width=128 is not a multiple of heads=3"):
        TINY.build(values(configure(TINY, {"heads": "3"})), KERNELS)


def test_tiny_has_under_a_million_parameters_and_routes_its_block_matrices_to_muon() -> None:
    with torch.device("meta"):
        model = TINY.build(values(configure(TINY, {})), KERNELS)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    routed = split(model, "muon")
    assert {name.split(".", 2)[2] for name, _ in routed.muon} == {
        *(f"mix.{m}.weight" for m in ("q", "k", "v", "out", "beta", "decay_down", "decay_up", "gate_down", "gate_up")),
        *(f"ffn.{m}.weight" for m in ("gate", "up", "down")),
    }
    assert {name for name, _ in routed.adamw} >= {"embedding.weight", "head.weight", "blocks.0.mix.conv.weight"}
    everything = split(model, "adamw")
    assert not everything.muon
    assert len(everything.adamw) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="known: muon, adamw"):
        split(model, "sgd")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.3.experts", (8, 32, 64), "muon"),
        ("layers.3.attn.wq.weight", (32, 64), "muon"),
        ("layers.3.attn.wq.bias", (32,), "adamw"),
        ("layers.3.conv1d.weight", (32, 1, 4), "adamw"),
        ("layers.3.norm.weight", (32, 32), "adamw"),
        ("wte.weight", (256, 32), "adamw"),
        ("h.0.position_embedding.weight", (256, 32), "adamw"),
        ("lm_head.weight", (256, 32), "adamw"),
        ("layers.0.gain", (1, 32), "adamw"),
    ],
)
def test_the_route_follows_from_name_and_shape(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert route(name, torch.nn.Parameter(torch.empty(shape, device="meta"))) == expected
