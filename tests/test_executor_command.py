"""The command, as a person meets it: ranks started, one message, the exit code, the record."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import plans
from executor import launch
from processes import ROOT, environment
from schemas.store import load, write


def command(folder: Path, *words: Any, torchrun: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    """``python -m executor`` (or torchrun's) in ``folder``, with what torch's launcher left behind removed."""
    start = ["-m", "torch.distributed.run", "--standalone", "-m"] if torchrun else ["-m"]
    return subprocess.run(
        [sys.executable, *start, "executor", *map(str, words), *consent(folder / words[0])],
        cwd=folder, capture_output=True, text=True, timeout=100,
        env=environment(OMP_NUM_THREADS="1", **environ), check=False,
    )  # fmt: skip


def consent(path: Path) -> list[str]:
    """What the command says of the model of the plan at ``path``, where that is a test's own."""
    model = re.search(r'^    "model": "(.*:.*)"', path.read_text("utf-8", "replace") if path.is_file() else "", re.M)
    return [] if model is None else ["--model", model[1]]


def written(folder: Path, ranks: int = 1, **more: Any) -> tuple[Path, Path]:
    """(plan, data) lying in ``folder``."""
    values = more.pop("values", {})
    data, path = plans.corpus(folder), folder / "plan.json"
    write(path, plans.with_values(plans.plan(data, ranks, **more), values))
    return path, data


def befallen(folder: Path, ranks: int = 1, **more: Any) -> tuple[Path, Path]:
    """(plan, data) lying in ``folder`` beside the model that a fault can befall."""
    shutil.copy(ROOT / "tests" / "befallen.py", folder)
    return written(folder, ranks, model="befallen:Model", **{"steps": 8, **more})


def test_the_ranks_of_a_plan_are_started_run_and_recorded(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2, steps=5, settings={"eval_every": 2})
    sealed = load(path)["seal"]
    done = command(tmp_path, path, "--data", data)
    assert done.returncode == 0, done.stderr
    assert "starting the plan's 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    plan = load(path)
    (run,) = plan["runs"]
    assert plan["seal"] == sealed
    assert (run["outcome"], run["steps"], run["fingerprints_compared"]) == ("finished", 5, 1)
    assert [row["step"] for row in run["evaluations"]] == [2, 4, 5]
    assert run["data"][0]["sha256"] == plan["workload"]["data"]["sources"][0]["sha256"]["value"]
    lines = (tmp_path / "runs" / sealed["digest"][:12] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert {json.loads(line)["run"] for line in lines} == {run["id"]}


def test_torchrun_with_its_default_of_one_process_is_relaunched(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2, steps=2)
    done = command(tmp_path, path, "--data", data, torchrun=True)
    assert done.returncode == 0, done.stderr
    assert load(path)["runs"][0]["outcome"] == "finished"


def test_a_failing_rank_ends_the_run_soon_is_named_and_recorded(tmp_path: Path) -> None:
    path, data = befallen(tmp_path, 2)
    start = time.monotonic()
    done = command(tmp_path, path, "--data", data, FAULT="raise 1", PATIENT="1")
    assert done.returncode == 4, done.stderr
    assert time.monotonic() - start < 30
    cause = "rank 1: ValueError: this card fell out of its slot"
    assert f"dormouse: failed: {cause}" in done.stderr
    (run,) = load(path)["runs"]
    assert (run["outcome"], run["reason"], run["steps"]) == ("failed", cause, 3)
    kept = tmp_path / "runs" / load(path)["seal"]["digest"][:12] / "rank-1.traceback"
    assert "befallen.py" in kept.read_text()


def test_a_refusal_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2, values={"/toolchain/torch": "1.0.0"})
    done = command(tmp_path, path, "--data", data)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("refused (toolchain-changed): torch 1.0.0 on rank 0") == 1
    assert done.stderr.count("refused (toolchain-changed): torch 1.0.0 on rank 1") == 1
    assert "Traceback" not in done.stderr
    assert load(path)["runs"] == []


def test_another_number_of_processes_is_refused_by_one_of_them(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 1)
    first = command(tmp_path, path, RANK="0", WORLD_SIZE="2")
    second = command(tmp_path, path, RANK="1", WORLD_SIZE="2")
    assert (first.returncode, second.returncode) == (3, 3)
    assert "refused (world-mismatch)" in first.stderr and f"start it as: python -m executor {path}" in first.stderr
    assert second.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--record", "nowhere/plan.json"], 3, "refused (record-unwritable)"),
        (["--data", "other.txt"], 3, "refused (data-changed)"),
        (["--data", "missing.txt"], 2, "missing.txt: no such file"),
        (["--run-dir", "corpus.txt/run"], 2, "--run-dir corpus.txt/run: "),
        (["--data", "corpus.txt,other.txt"], 2, "2 places; the plan trains on corpus.txt (100000 bytes, SHA-256 "),
    ],
)
def test_places_that_do_not_serve_are_told_in_one_message(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    path, data = written(tmp_path, 1)
    (tmp_path / "other.txt").write_bytes(data.read_bytes()[::-1])
    given = [] if "--data" in words else ["--data", data]
    done = command(tmp_path, path, *given, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert load(path)["runs"] == []


def test_a_plan_with_a_changed_byte_is_unfaithful_before_torch_is_loaded(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 1)
    path.write_bytes(path.read_bytes().replace(b'"chosen": "fp32"', b'"chosen": "bf16"', 1))
    done = command(tmp_path, path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("dormouse:")]
    assert len(said) == 1 and "changed after sealing" in said[0]
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize("name", ["schemas", "planner"])
def test_a_package_of_the_working_folder_that_shadows_ours_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = written(tmp_path, 1)
    shadow = tmp_path / name / "__init__.py"
    shadow.parent.mkdir()
    shadow.write_text("raise SystemExit('a stranger ran')\n")
    done = command(tmp_path, path)
    assert done.returncode == 2
    assert f"{shadow} shadows Dormouse's own {name}" in done.stderr


@pytest.mark.parametrize("name", ["json", "torch", "argparse"])
def test_a_file_of_the_working_folder_shadows_no_module(tmp_path: Path, name: str) -> None:
    path, data = written(tmp_path, 1, steps=1)
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')\n")
    done = command(tmp_path, path, "--data", data)
    assert (done.returncode, "a stranger ran" in done.stderr) == (0, False), done.stderr


def test_a_plan_over_several_nodes_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2)
    made = load(path)
    (name,) = made["fleet"]["nodes"]
    made["fleet"]["nodes"]["node-ffffffff"] = made["fleet"]["nodes"][name]
    write(path, plans.with_values(made, {}))
    done = command(tmp_path, path, "--data", data)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("dormouse: refused (multi-node)") and "starting" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forged_plan_is_refused_for_what_planning_refuses(tmp_path: Path, ranks: int) -> None:
    path, data = written(tmp_path, ranks)
    write(path, plans.with_values(load(path), {"/workload/config/adamw": "fused"}))
    done = command(tmp_path, path, "--data", data)
    assert done.returncode == 3, done.stderr
    assert "refused (adamw-fused)" in done.stderr and "starting" not in done.stderr


def test_the_ranks_environment_has_nothing_of_another_launcher_and_no_working_folder() -> None:
    found = launch.environment(
        {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "x",
            "PET_NNODES": "1",
            "HOME": "/h",
        },
        4,
        ROOT,
    )
    assert {key: found[key] for key in found if key != "PYTHONPATH"} == {
        "HOME": "/h", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "4", launch.GUARD: "1",
        "TORCH_LOGS": "-torch.distributed.elastic",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("GPU-aaaa", "1,0", "GPU-aaaa"),
        ("MIG-bbbb", None, "MIG-bbbb"),
        ("cuda-0", None, "0"),  # no UUID is told: its place in the order of the bus
        ("cuda-3", "2,3", "3"),
        ("card-0", None, "1"),  # of the catalogue: the visible card of the rank's own place
        ("card-0", "3,2", "2"),
    ],
)
def test_a_rank_sees_its_own_card_by_a_name_that_cuda_takes(
    device: str, visible: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    launch.confine(device, "cuda")
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (seen, "PCI_BUS_ID")


def test_ranks_are_started_once_only() -> None:
    assert launch.is_due(2, {})
    assert launch.is_due(2, {"WORLD_SIZE": "1"})
    assert not launch.is_due(2, {launch.GUARD: "1"})
    assert not launch.is_due(2, {"WORLD_SIZE": "2"})
    assert not launch.is_due(1, {})
