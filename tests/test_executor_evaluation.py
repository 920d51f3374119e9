"""Evaluating looks on: the model is in its mode of evaluation, and training goes on as if nobody had looked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plans
from executor import checkpoint
from executor.loop import looking_on
from executor.run import Places, execute

MINE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, inputs, targets):
        x = self.drop(self.norm(self.embedding(inputs).transpose(1, 2))).transpose(1, 2)
        if not self.training:
            torch.rand(3)  # even what draws numbers then
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 100 * self.training
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "looked_at.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(every: int) -> tuple[list[Any], str]:
        """The evaluations of a run that evaluates so often, and what it left."""
        data = plans.corpus(tmp_path)
        plan = plans.plan(data, model="looked_at:Model", opt="adamw", steps=6)
        plan = plans.with_values(plan, {"/workload/config/eval_every": every})
        folder = tmp_path / f"run-{every}"
        done = execute(plan, Places(None, folder, (data,)))
        assert done.outcome == "finished" and done.entry is not None, done.reason
        left = (folder / "final" / checkpoint.MODEL).read_bytes()
        return done.entry["evaluations"], hashlib.sha256(left).hexdigest()

    return run


def test_how_often_a_run_evaluates_changes_nothing_of_what_it_trains(ran: Any) -> None:
    (seldom, left), (often, same) = ran(100), ran(1)
    assert len(seldom) == 1 and len(often) == 6
    assert left == same and seldom[-1] == often[-1]


def test_held_out_bits_are_of_the_model_in_its_mode_of_evaluation(ran: Any) -> None:
    (row,) = ran(100)[0]
    assert 6 < row["bits_per_byte"] < 10  # in training it adds 144


def test_modules_are_left_in_the_mode_that_each_was_in() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()))
    model[1][0].eval()
    before = [module.training for module in model.modules()]
    torch.manual_seed(3)
    with pytest.raises(KeyError), looking_on(model, torch.device("cpu")):
        assert not any(module.training for module in model.modules())
        torch.rand(5)
        raise KeyError
    assert [module.training for module in model.modules()] == before == [True, True, True, False, True]
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
