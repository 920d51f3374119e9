"""How a card's memory grows: one decision, from the command line to torch's own setting, and what stands beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor import launch
from executor.peaks import allocator
from planner.door import ALLOCATORS
from planner.refusals.rules import judge


def planned(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "planner", "--set", "layers=1", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_card_on_linux_has_expandable_segments_and_the_other_way_reserves_more() -> None:
    first, other = planned("--devices", "H200"), planned("--devices", "H200", "--set", "allocator=segments")
    memory, wider = (plan["ranks"][0]["memory"] for plan in (first, other))
    assert first["workload"]["config"]["allocator"]["chosen"] == "expandable"
    assert other["workload"]["config"]["allocator"]["outcome"] == "granted"
    assert "rounding" not in memory
    assert memory["peak"]["value"] <= wider["peak"]["value"]
    assert memory["peak"]["value"] <= memory["reserved"]["value"] < wider["reserved"]["value"]


def test_a_cpu_has_neither_and_reserves_nothing() -> None:
    plan = planned("--devices", "cpu")
    assert plan["workload"]["config"]["allocator"]["chosen"] == "none"
    assert "reserved" not in plan["ranks"][0]["memory"]


@pytest.mark.parametrize(("devices", "chosen"), [("cpu", "segments"), ("H200", "none")])
def test_an_allocator_that_the_devices_cannot_have_is_refused(devices: str, chosen: str) -> None:
    words = [sys.executable, "-m", "planner", "--devices", devices, "--set", f"allocator={chosen}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "allocator-unfit" in done.stderr


@pytest.mark.parametrize("chosen", ALLOCATORS)
def test_a_rank_on_a_card_tells_torch_before_it_begins(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launch.confine("GPU-0", "cuda", chosen)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATORS[chosen]


def test_a_rank_on_a_cpu_tells_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    launch.confine("cpu-0", "cpu", "none")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("text", "refused"),
    [("expandable_segments:True", False), ("expandable_segments:False", True), ("max_split_size_mb:64", True)],
)
def test_another_setting_in_the_environment_is_refused_before_the_run(tmp_path: Path, text: str, refused: bool) -> None:
    path = tmp_path / "plan.json"
    words = [sys.executable, "-m", "planner", "--set", "layers=1", "--devices", "H200"]
    path.write_bytes(subprocess.run(words, capture_output=True, check=True).stdout)
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(
        [sys.executable, "-m", "executor", str(path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3  # on this machine without a card, in any case
    assert ("allocator-set" in done.stderr) == refused


def test_memory_that_grows_otherwise_than_planned_is_refused_after_the_smoke_launch() -> None:
    plan = planned("--devices", "H200")
    row = {"rank": 0, "error": None, "nonfinite": [], "unused": [], "dtype": "bf16"}
    row["kernels"] = {name: item["chosen"] for name, item in plan["ranks"][0]["kernels"].items()}
    for found, codes in (("segments", ["allocator-differs"]), ("expandable", [])):
        assert [item.code for item in judge("running", plan, {"smoke": [{**row, "allocator": found}]})] == codes


def test_a_cpus_memory_grows_by_neither() -> None:
    assert allocator("cpu") is None


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ALLOCATORS)
def test_a_cards_memory_grows_as_it_was_told(chosen: str) -> None:
    code = "import torch; from executor.peaks import allocator; kept = torch.ones(9, device='cuda')"
    code += "; print(allocator('cuda'))"
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[chosen]}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == chosen
