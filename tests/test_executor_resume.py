"""Checkpoints of a run: what goes on from one is bit for bit what was never stopped; what is not whole is passed over
or refused; signals leave one."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plans
import ranks
from executor import checkpoint, loop
from executor.run import Outcome, Places, execute
from executor.stopping import ECHO_SECONDS, Stopping
from planner.refusals.of_runs import checkpoint_bytes
from planner.refusals.rules import Refused
from processes import environment
from schemas.form import render
from schemas.seal import append_run
from schemas.store import load, write
from test_executor_command import command, written

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes for all

STEPS, HALF = 20, 10
WHOLE = {"experts": 4, "topk": 2, "expert_ffn": 32, "moe_lb_coef": 0.01, "engram_rows": 100, "engram_heads": 2,
         "engram_dim": 8}  # fmt: skip
EVERY = ["engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt"]
CASES: dict[str, dict[str, Any]] = {
    "whole": {"eval_every": 4},
    "every mechanism of a CPU at once": {"mechanisms": EVERY},
    "recomputed": {"mechanisms": ["recompute"]},
    "fp16": {"loss_scale": 2.0**21, "loss_scale_growth": 4, "nonfinite": "skip"},
}


def planned(folder: Path, count: int = 1, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    """A plan of a whole model; of ``more`` what is no key of the request is one of the runtime (so that all plans here
    need one account)."""
    config = {key: more.pop(key) for key in list(more) if key not in ("mechanisms", "capacity", "batch", "seq", "seed")}
    plan = plans.plan(plans.corpus(folder), count, WHOLE, steps=steps, **more)
    return plans.with_values(plan, {f"/workload/config/{key}": value for key, value in config.items()})


def one(
    plan: dict[str, Any], folder: Path, stop: int | None = None, resume: bool = False
) -> tuple[Outcome, list[float]]:
    """A run of one rank, here; SIGTERM comes after ``stop`` steps. Gives how it ended, and its losses."""
    losses: list[float] = []

    def observe(step: int, loss: float, model: Any) -> None:
        losses.append(loss)
        if step + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    done = execute(plan, Places(None, folder, (folder.parent / plans.CORPUS,), resume), observe=observe)
    return done, losses


def left(folder: Path) -> str:
    """SHA-256 of the trained model's file, tables in host memory included."""
    return hashlib.sha256((folder / "final" / checkpoint.MODEL).read_bytes()).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def weight(folder: Path) -> int:
    """Bytes of the files of the one checkpoint there."""
    (name,) = names(folder)
    return sum(path.stat().st_size for path in (folder / "checkpoints" / name).iterdir())


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, case: str) -> None:
    plan = planned(tmp_path, **CASES[case])
    if case == "fp16":
        plan = plans.with_values(plan, {"/ranks/0/dtype": "fp16"})
    straight, losses = one(plan, tmp_path / "straight")
    first, before = one(plan, tmp_path / "run", stop=HALF - 1)
    assert (first.outcome, first.reason) == ("stopped", "SIGTERM after 10 steps; --resume goes on after step 10")
    assert 0 < checkpoint_bytes(plan) - weight(tmp_path / "run") < 2**16
    second, after = one(plan, tmp_path / "run", resume=True)
    assert (straight.outcome, second.outcome) == ("finished", "finished"), second.reason
    assert before + after == losses and len(before) == HALF
    assert left(tmp_path / "run") == left(tmp_path / "straight")
    one_, other = straight.entry, second.entry
    assert one_ is not None and other is not None and first.entry is not None
    for key in ("fingerprint", "evaluations", "final_loss", "steps", "skipped_steps", "bits_per_byte"):
        assert one_[key] == other[key], key
    assert other["resumed"] == {"id": first.entry["id"], "steps": HALF} and "resumed" not in one_
    if case == "fp16":
        assert 0 < one_["skipped_steps"] < STEPS
    if case == "whole":
        assert len(one_["evaluations"]) == 5


@pytest.mark.parametrize(
    ("on", "capacity", "stopped", "alike", "mechanisms"),
    [
        ((0, 1), [[4, 32], [1, 48]], 1, ["muon_state_bf16", "optim_8bit"], [["act_ckpt"], ["recompute"]]),
        ((0, 1, 2), [[3, 32], [1, 32], [2, 16]], 2, [], [["act_ckpt"], ["recompute"], []]),
    ],
)
def test_ranks_that_were_stopped_go_on_as_if_they_had_not_been(
    tmp_path: Path,
    on: tuple[int, ...],
    capacity: list[list[int]],
    stopped: int,
    alike: list[str],
    mechanisms: list[list[str]],
) -> None:
    """The third rank computes with other kernels; the signal comes to one rank only."""
    plan = planned(tmp_path, len(on), batch=None, seq=None, capacity=capacity, eval_every=4, mechanisms=alike)
    plan = plans.with_values(plan, {f"/ranks/{rank}/mechanisms": own for rank, own in enumerate(mechanisms)})
    data = plans.corpus(tmp_path)
    straight = ranks.run(plan, data, tmp_path / "straight", on=on)
    first = ranks.run(plan, data, tmp_path / "run", on=on, stop=(stopped, HALF - 2))
    assert [result["outcome"] for result in first] == ["stopped"] * len(on), first[0]["reason"]
    assert first[0]["entry"]["steps"] == HALF
    assert weight(tmp_path / "run") < checkpoint_bytes(plan) < 1.5 * weight(tmp_path / "run")
    second = ranks.run(plan, data, tmp_path / "run", on=on, resume=True)
    assert [result["outcome"] for result in second] == ["finished"] * len(on), second[0]["reason"]
    for rank in range(len(on)):
        for key in ("losses", "fingerprints"):
            assert first[rank][key] + second[rank][key] == straight[rank][key], (rank, key)
    for key in ("evaluations", "fingerprint", "fingerprints_compared"):
        assert second[0]["entry"][key] == straight[0]["entry"][key]
    assert left(tmp_path / "run") == left(tmp_path / "straight")


def run_apart(folder: Path, plan: dict[str, Any], name: str, *words: str) -> tuple[list[float], str]:
    """A run by the command, into ``folder``/``name``; gives the losses that it told, and what it left."""
    path = folder / f"{name}.json"
    write(path, plan)
    done = subprocess.run(
        [sys.executable, "-m", "executor", path, "--data", folder / plans.CORPUS, "--run-dir", name, *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], left(folder / name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cards", "mechanisms"),
    [(1, []), (1, ["moe_offload", "engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt"]), (2, [])],
)
def test_a_run_on_cards_goes_on_as_an_undisturbed_one_would_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: int, mechanisms: list[str]
) -> None:
    """The same bits, where two undisturbed runs of the plan have the same bits; else no further from one of them than
    the other is."""
    if torch.cuda.device_count() < cards:
        pytest.skip(f"{cards} cards are needed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cards))))
    asked = {"model": "small", "devices": "auto", "batch": 4, "seq": 256, "steps": STEPS}
    asked |= {"mechanisms": mechanisms} if mechanisms else {}
    settings = {"layers": 2, "experts": 4, "topk": 2, "expert_ffn": 256, "moe_lb_coef": 0.01, "checkpoint_every": HALF}
    report = goes_on(tmp_path, plans.plan(plans.corpus(tmp_path), cards, settings, **asked))
    print(f"\n{cards} card(s), {', '.join(mechanisms) or 'no mechanism'}: {report}")


def goes_on(folder: Path, plan: dict[str, Any]) -> str:
    """Run ``plan`` twice, and once more from the first's checkpoint in its middle; what came of it, in words."""
    one_, first = run_apart(folder, plan, "one")
    two, second = run_apart(folder, plan, "two")
    shutil.copytree(folder / "one" / "checkpoints", folder / "on" / "checkpoints")
    on, third = run_apart(folder, plan, "on", "--resume")
    assert len(on) == HALF and len(one_) == STEPS
    apart = max(abs(a - b) for a, b in zip(one_, two, strict=True))
    gone = max(abs(a - b) for a, b in zip(one_[HALF:], on, strict=True))
    if first == second:
        assert first == third and on == one_[HALF:]
        return "two undisturbed runs have the same bits, and so has the one that went on"
    assert gone <= 2 * apart, (one_, two, on)
    return (
        f"two undisturbed runs differ by up to {apart:.2g} in loss, the one that went on from the first by {gone:.2g}"
    )


def test_a_model_that_draws_random_numbers_draws_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dropping_model.py").write_text(DROPPING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = plans.plan(plans.corpus(tmp_path), model="dropping_model:Model", opt="adamw", steps=6)
    _, losses = one(plan, tmp_path / "straight")
    _, before = one(plan, tmp_path / "run", stop=2)
    _, after = one(plan, tmp_path / "run", resume=True)
    assert before + after == losses and left(tmp_path / "run") == left(tmp_path / "straight")


DROPPING = """
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, inputs, targets):
        logits = self.head(nn.functional.dropout(self.embedding(inputs)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("kept")
    plan = planned(folder, steps=9, checkpoint_every=2, keep_checkpoints=2)
    done, _ = one(plan, folder / "run")
    assert done.outcome == "finished" and done.entry is not None
    assert names(folder / "run") == [f"{done.entry['id']}-{step:010}" for step in (6, 8)]
    return plan, folder


@pytest.fixture
def kept(once: tuple[dict[str, Any], Path], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A plan of 9 steps with a checkpoint every second, the newest two kept, and the folder of its run."""
    shutil.copytree(once[1], tmp_path, dirs_exist_ok=True)
    return once[0], tmp_path / "run"


def test_a_run_that_goes_on_adds_to_the_record_the_metrics_and_its_line(kept: tuple[dict[str, Any], Path]) -> None:
    plan, folder = kept
    shutil.rmtree(folder / "checkpoints" / names(folder)[1])
    (folder / "checkpoints" / f".{names(folder)[0]}.new").mkdir()  # of a run that was killed while it saved
    done, losses = one(plan, folder, resume=True)
    assert done.entry is not None and len(losses) == 3
    line = names(folder)[0].rpartition("-")[0]
    assert names(folder) == [f"{line}-{step:010}" for step in (6, 8)] and line != done.entry["id"]
    told = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told if "loss" in row] == [*range(1, 10), 7, 8, 9]
    assert [row["step"] for row in told if row["run"] == done.entry["id"] and "loss" in row] == [7, 8, 9]
    times = [value["samples"] for label, value in done.entry["measured"].items() if "/step/total" in label]
    assert set(times) == {1}  # of its three steps two warm up
    recorded = append_run(plan, done.entry)
    (folder / "plan.json").write_bytes(render(recorded))
    assert load(folder / "plan.json")["runs"][0]["resumed"]["steps"] == 6


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file", ["checkpoint.json", "model.safetensors", "optimizer.safetensors", "rank-0.safetensors"]
)
@pytest.mark.parametrize("harm", [os.unlink, cut, flip])
def test_what_is_not_whole_is_passed_over_and_told(
    kept: tuple[dict[str, Any], Path], capfd: pytest.CaptureFixture[str], file: str, harm: Callable[[Path], None]
) -> None:
    plan, folder = kept
    harm(folder / "checkpoints" / names(folder)[1] / file)
    done, losses = one(plan, folder, resume=True)
    assert done.outcome == "finished" and len(losses) == 3
    told = capfd.readouterr().err
    assert f"passing over a checkpoint that is not whole: {folder}/checkpoints/" in told and file in told
    assert f"going on after step 6 from {folder}/checkpoints/" in told


def test_where_nothing_is_whole_or_there_is_nothing_it_is_refused(kept: tuple[dict[str, Any], Path]) -> None:
    plan, folder = kept
    for name in names(folder):
        flip(folder / "checkpoints" / name / "model.safetensors")
    for place, found in ((folder, "it was changed"), (folder.parent / "empty", "no checkpoint there")):
        with pytest.raises(Refused, match="nothing-to-resume") as refused:
            execute(plan, Places(None, place, (folder.parent / plans.CORPUS,), resume=True))
        text = refused.value.text()
        assert found in text and all(part in text for part in ("found:", "why:", "to fix:", "--run-dir"))


def test_another_plans_checkpoint_is_refused(kept: tuple[dict[str, Any], Path]) -> None:
    plan, folder = kept
    other = planned(folder.parent, steps=9, seed=2)
    with pytest.raises(Refused, match="resume-other-plan") as refused:
        execute(other, Places(None, folder, (folder.parent / plans.CORPUS,), resume=True))
    assert plan["seal"]["digest"][:12] in refused.value.text() and "of 1 rank" in refused.value.text()


def test_a_run_from_the_start_says_what_it_leaves_and_removes_none_of_it(
    kept: tuple[dict[str, Any], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    plan, folder = kept
    before = names(folder)
    one(plan, folder)
    assert f"starting anew; --resume would go on from {before[1]}" in capfd.readouterr().err
    assert set(before) < set(names(folder)) and len(names(folder)) == 4


@pytest.mark.parametrize("full", ["of one rank's part", "of a file in its middle"])
def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_last_whole_checkpoint(
    kept: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    plan, folder = kept
    straight, run_dir = left(folder), folder.parent / "full"
    write, limits, reason = checkpoint.write, resource.getrlimit(resource.RLIMIT_FSIZE), "File too large"

    def no_space(path: Path, tensors: Any, beat: Any) -> Any:
        if path.name == "rank-0.safetensors" and "-0000000004" in path.parent.name:
            raise OSError(28, "No space left on device")
        return write(path, tensors, beat)

    def observe(step: int, loss: float, model: Any) -> None:
        if step == 2 and full == "of a file in its middle":  # the system's own word, in the midst of a write
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    if full == "of one rank's part":
        monkeypatch.setattr(checkpoint, "write", no_space)
        reason = "No space left on device"
    try:
        done = execute(plan, Places(None, run_dir, (folder.parent / plans.CORPUS,)), observe=observe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
    assert done.reason == f"rank 0: {reason}: the checkpoint of step 4 could not be kept"
    assert (done.outcome, done.entry and done.entry["steps"]) == ("failed", 4)
    assert done.newest == 2
    assert [path.name[-3:] for path in (run_dir / "checkpoints").iterdir()] == ["002"]
    assert one(plan, run_dir, resume=True)[0].outcome == "finished" and left(run_dir) == straight


def test_a_disk_that_cannot_hold_the_planned_checkpoints_is_refused_at_the_start(tmp_path: Path) -> None:
    """Through the command: no disk here holds a million of them."""
    path, data = written(tmp_path, 1, settings={"checkpoint_every": 2, "keep_checkpoints": 10**6})
    done = command(tmp_path, path, "--data", data)
    assert done.returncode == 3 and "refused (checkpoints-no-room)" in done.stderr, done.stderr
    assert all(part in done.stderr for part in ("found:", "why:", "to fix:", "--run-dir DIR", "keep_checkpoints=N"))
    assert not list(tmp_path.glob("runs/*")) and load(path)["runs"] == []


@pytest.mark.parametrize(("spare", "resume"), [(0, False), (-1, False), (0, True), (-1, True)])
def test_room_for_one_checkpoint_more_than_are_kept_is_enough_and_those_there_already_count(
    kept: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, spare: int, resume: bool
) -> None:
    plan, folder = kept
    held = sum(file.stat().st_size for file in (folder / "checkpoints").glob("*/*")) if resume else 0
    free = 3 * checkpoint_bytes(plan) - held + spare
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    if spare:
        with pytest.raises(Refused, match="checkpoints-no-room"):
            one(plan, folder, resume=resume)
    else:
        assert one(plan, folder, resume=resume)[0].outcome == "finished"


def test_a_run_that_fails_keeps_its_newest_checkpoint_and_says_so(
    kept: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = kept
    straight = left(folder)
    update, calls = loop._update, [0]

    def breaks(*parts: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise ValueError("the card fell out of its slot")
        update(*parts)

    monkeypatch.setattr(loop, "_update", breaks)
    done, _ = one(plan, folder.parent / "failed")
    assert (done.outcome, done.entry and done.entry["steps"]) == ("failed", 5)
    assert done.newest == 4
    assert one(plan, folder.parent / "failed", resume=True)[0].outcome == "finished"
    assert left(folder.parent / "failed") == straight


def test_the_first_signal_waits_for_the_step_its_echo_is_one_and_the_second_leaves_at_once() -> None:
    stopping = Stopping()
    with stopping.listening(), stopping.training():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.asked and stopping.name == "SIGINT"
        time.sleep(ECHO_SECONDS)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # what is recorded now is not disturbed


@pytest.mark.parametrize("training", [False, True])
def test_a_signal_leaves_at_once_outside_of_training_and_where_another_rank_has_ended(training: bool) -> None:
    stopping = Stopping(lambda: training)
    with stopping.listening(), pytest.raises(KeyboardInterrupt):
        if training:
            with stopping.training():
                os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert not stopping.asked
