"""Recurrent layers of a user's own: what their fused kernels keep is counted, and told as what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plans
from executor.measure import SAVED, measure
from executor.phantom import phantoms
from executor.recurrent import CUDNN_NUMBERS, PLACE, onednn_bytes
from executor.run import Places, execute

Layer = Callable[[], nn.Module]
LAYERS: dict[str, Layer] = {
    "lstm": lambda: nn.LSTM(32, 48, 2, batch_first=True),
    "lstm of both directions": lambda: nn.LSTM(32, 16, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(32, 48, 2, batch_first=True),
    "rnn, length first": lambda: nn.RNN(32, 32),
}


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(256, 32), layer()
        self.head = nn.Linear(self._width(), 256)

    def _width(self) -> int:
        layer: Any = self.layer
        return int(layer.hidden_size * (1 + layer.bidirectional))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        found, _ = self.layer(self.embedding(inputs))
        return nn.functional.cross_entropy(self.head(found).flatten(0, 1), targets.flatten())


class Kept(TorchDispatchMode):
    """Bytes of the workspace of each layer that oneDNN ran."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::mkldnn_rnn_layer":
            self.bytes.append(result[3].nbytes)
        return result


@pytest.mark.parametrize(
    ("dtype", "length", "batch", "inputs", "hidden", "apart"),
    [
        (torch.float32, 64, 4, 64, 64, 0.02),
        (torch.float32, 100, 3, 256, 64, 0.02),
        (torch.float32, 64, 4, 64, 256, 0.02),
        (torch.float32, 33, 5, 100, 100, 0.03),
        (torch.float32, 64, 4, 8, 8, 0.08),
        (torch.float32, 128, 8, 512, 128, 0.02),
        (torch.bfloat16, 64, 4, 128, 128, 0.1),
        (torch.bfloat16, 64, 4, 512, 64, 0.1),
    ],
)
def test_the_workspace_of_an_lstm_on_a_cpu_is_as_large_as_onednn_makes_it(
    dtype: torch.dtype, length: int, batch: int, inputs: int, hidden: int, apart: float
) -> None:
    layer, data = nn.LSTM(inputs, hidden, batch_first=True), torch.randn(batch, length, inputs)
    with Kept() as seen, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        layer(data)
    if not seen.bytes:
        pytest.skip("this processor's LSTM is not oneDNN's")
    assert onednn_bytes(length, batch, inputs, hidden, dtype.itemsize) == pytest.approx(seen.bytes[0], rel=apart)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_counted_without_memory_is_what_a_real_run_keeps(name: str, dtype: str) -> None:
    def counted(made: nn.Module) -> dict[str, int]:
        return measure(made, 3, 40, dtype).counts

    torch.manual_seed(0)
    real = counted(Model(LAYERS[name]))
    with phantoms():
        found = counted(Model(LAYERS[name]))
    assert found.keys() == real.keys()
    assert ((SAVED + PLACE) in real) == ("lstm" in name)
    for count, value in real.items():
        loose = 0.11 if count in (SAVED + PLACE, "bytes") else 0.0
        assert found[count] == pytest.approx(value, rel=loose), count


@pytest.mark.parametrize(("name", "kind", "directions"), [("lstm", "lstm", 1), ("gru", "gru", 1),
                         ("lstm of both directions", "lstm", 2), ("rnn, length first", "rnn", 1)])  # fmt: skip
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_on_a_card_all_layers_are_one_kernel_that_keeps_so_many_numbers(
    name: str, kind: str, directions: int, dtype: str, width: int
) -> None:
    with phantoms("cuda"):
        made = Model(LAYERS[name])
        layer: Any = made.layer
        counts = measure(made, 3, 40, dtype).counts
        assert all(parameter.grad is not None for parameter in made.parameters())
    tokens, layers = 3 * 40, layer.num_layers * directions
    assert counts[SAVED + PLACE] == CUDNN_NUMBERS[kind] * layer.hidden_size * layers * tokens * width
    matrices = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    head = 2 * tokens * made.head.weight.numel()
    assert counts["flops"] == 3 * (2 * tokens * matrices + head)


MINE = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(256, 64), nn.LSTM(64, 256, batch_first=True)
        self.head = nn.Linear(256, 256)

    def forward(self, inputs, targets):
        found, _ = self.layer(self.embedding(inputs))
        return nn.functional.cross_entropy(self.head(found).flatten(0, 1), targets.flatten())
"""


def test_a_plan_tells_what_kernels_keep_apart_as_assumed_and_a_run_finds_it_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recurrent_model.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = plans.corpus(tmp_path)
    plan = plans.plan(data, model="recurrent_model:Model", opt="adamw", steps=6, batch=4, seq=64)
    kept = plan["ranks"][0]["memory"]["alive"][PLACE]
    assert kept["weakest"] == "assumed" and kept["low"] < kept["value"] < kept["high"]
    outcome = execute(plan, Places(None, tmp_path / "run", (data,)))
    assert outcome.entry is not None, outcome.reason
    measured = outcome.entry["measured"]
    found = measured[f"/ranks/0/memory/alive/{PLACE} @0"]["value"]
    assert kept["low"] <= found <= kept["high"]
    peak = measured["/ranks/0/memory/backward_peak @0"]
    assert peak["predicted"] == pytest.approx(peak["value"], rel=0.04)  # what backward takes within itself included


def test_a_tensor_transposed_in_place_has_its_new_form() -> None:
    with phantoms():
        x = torch.zeros(4, 6)
        view = x[1:]
        x.transpose_(0, 1)
        assert x.shape == (6, 4) and x.stride() == (1, 6) and view.shape == (3, 6)
        assert (x @ torch.zeros(4, 2)).shape == (6, 2)
