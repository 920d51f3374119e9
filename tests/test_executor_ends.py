"""How a run ends: by a signal, a rank that is gone or hangs, a closed pipe, or a plan that takes it no more. Each time
there is one message, the right code, and a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

import plans
from executor import checkpoint, launch, resume, training
from executor.entry import keep
from executor.hold import Hold
from executor.pulse import Pulse
from executor.reporter import METRICS
from executor.run import Places, execute
from executor.stopping import ECHO_SECONDS
from processes import environment
from schemas.form import render
from schemas.store import load, write
from test_executor_command import befallen, command, consent, written
from worlds import compiled, run_of

PYTHON, TORCHRUN = ["-m", "executor"], ["-m", "torch.distributed.run", "-m", "executor"]


def said(stderr: str) -> list[str]:
    """Dormouse's lines after those of the steps, and whatever is no line of Dormouse."""
    passed_by = ("step", "starting", "the plan's", "the model is in", "a checkpoint of step", "the link between")
    lines = [line for line in stderr.splitlines() if "CPUAllocator" not in line]
    return [line for line in lines if not line.startswith(tuple(f"dormouse: {words}" for words in passed_by))]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kill 0", "rank 0: is gone and left no word"),
        ("kill 1", "rank 1: is gone and left no word"),
        ("freeze 1", "rank 1: did not come to step 4's exchange within 2 s: its process is stopped (SIGSTOP)"),
        ("hang 0", "rank 0: did not come to step 4's exchange within 2 s: it hangs in befall (befallen.py:41)"),
        (
            "memory 1",
            "rank 1: OutOfMemoryError: out of memory: raised by hand, as a CPU has no limit to give; make the plan "
            "anew with a smaller --fit, a smaller --batch or a mechanism more (--mechanisms)",
        ),
        ("nan 1", "rank 1: loss is not finite at step 4"),
        ("late 1", "rank 1: came to the ranks' exchange only after another had waited 2 s for it"),
        ("late 0", "rank 0: came to the ranks' exchange only after another had waited 2 s for it"),
    ],
)
def test_a_rank_that_is_gone_or_does_not_come_is_named_and_recorded(tmp_path: Path, fault: str, cause: str) -> None:
    path, data = befallen(tmp_path, 2)
    done = command(tmp_path, path, "--data", data, FAULT=fault)
    assert said(done.stderr) == [f"dormouse: failed: {cause}"]
    (run,) = load(path)["runs"]
    assert (done.returncode, run["outcome"], run["reason"], run["steps"]) == (4, "failed", cause, 3)
    metrics = next(tmp_path.glob("runs/*/metrics.jsonl"))
    assert time.time() - metrics.stat().st_mtime < 25  # torchrun waits 30 s for a rank that hears no SIGTERM
    lines = metrics.read_text().splitlines()
    assert {json.loads(line)["run"] for line in lines} == {run["id"]}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("evaluation 0", "rank 0: the evaluation after step 4 has not moved for 2 s: it hangs in befall (befallen.py:"),
        ("save 1", "rank 1: the checkpoint of step 4 has not moved for 2 s: it hangs in settle (befallen.py:"),
    ],
)
def test_a_rank_that_hangs_where_others_wait_without_a_deadline_is_named_and_recorded(
    tmp_path: Path, fault: str, cause: str
) -> None:
    path, data = befallen(tmp_path, 2, settings={"checkpoint_every": 2, "eval_every": 4})
    done = command(tmp_path, path, "--data", data, FAULT=fault)
    first, second = [line for line in said(done.stderr) if "held-out" not in line]
    assert first.startswith(f"dormouse: failed: {cause}") and second == "dormouse: --resume goes on after step 2"
    (run,) = load(path)["runs"]
    assert (done.returncode, run["outcome"], run["steps"]) == (4, "failed", 4) and run["reason"].startswith(cause)
    assert {"@0", "@1"} <= {label[-2:] for label in run["measured"]}
    found = resume.newest(next(tmp_path.glob("runs/*")))
    assert (found["passed"], found["chosen"]["steps"]) == ([], 2)
    assert time.time() - path.stat().st_mtime < 25


@pytest.mark.parametrize(
    ("ranks", "number", "start"),
    [
        (1, signal.SIGINT, PYTHON),
        (1, signal.SIGTERM, PYTHON),
        (2, signal.SIGINT, PYTHON),
        (2, signal.SIGTERM, PYTHON),
        (1, signal.SIGHUP, PYTHON),
        (2, signal.SIGINT, TORCHRUN),
    ],
)
def test_a_run_that_is_stopped_says_so_and_no_more(
    tmp_path: Path, ranks: int, number: signal.Signals, start: list[str]
) -> None:
    path, data = befallen(tmp_path, ranks, steps=200, settings={"log_every": 1})
    process = _started(tmp_path, path, data, start, FAULT="slow")
    before = _until(process, "step   2/200")
    if number != signal.SIGTERM:  # as the terminal does: to all at once
        os.killpg(process.pid, number)
    else:
        process.terminate()
    rest = process.communicate(timeout=60)[1]
    (run,) = load(path)["runs"]
    assert (process.returncode, run["outcome"]) == (4 if start == PYTHON else 1, "stopped"), before + rest
    if start == TORCHRUN:  # which has words of its own
        rest = "\n".join(line for line in rest.splitlines() if line.startswith("dormouse: "))
    on = f"after {run['steps']} steps; --resume goes on after step {run['steps']}"
    assert said(rest) == [f"dormouse: stopped: {number.name} {on}"]
    (kept,) = tmp_path.glob("runs/*/checkpoints/*")
    assert kept.name == f"{run['id']}-{run['steps']:010}"
    if number == signal.SIGTERM and ranks == 2:
        done = command(tmp_path, path, "--data", data, "--resume")
        assert done.returncode == 0, done.stderr
        assert f"going on after step {run['steps']} from {kept.relative_to(tmp_path)}" in done.stderr
        again = load(path)["runs"][1]
        assert (again["outcome"], again["steps"]) == ("finished", 200)
        assert again["resumed"] == {"id": run["id"], "steps": run["steps"]}


@pytest.mark.parametrize(("ranks", "steps", "newest"), [(1, 4, 4), (2, 3, 2)])
def test_a_second_ctrl_c_leaves_at_once_though_a_rank_hangs(
    tmp_path: Path, ranks: int, steps: int, newest: int
) -> None:
    path, data = befallen(tmp_path, ranks, steps=200, settings={"log_every": 1, "checkpoint_every": 2})
    process = _started(tmp_path, path, data, FAULT=f"deaf {ranks - 1}", PATIENT="1")
    _until(process, f"step   {steps}/200")
    start = time.monotonic()
    for wait in (0.5, ECHO_SECONDS + 0.3):
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert time.monotonic() - start < 14  # the exchange has 15 s
    (run,) = load(path)["runs"]
    assert said(rest) == [f"dormouse: stopped: SIGINT after {steps} steps; --resume goes on after step {newest}"]
    assert (process.returncode, run["outcome"], run["steps"]) == (4, "stopped", steps)


def test_a_rank_that_hears_nothing_is_ended_too_when_another_is_killed(tmp_path: Path) -> None:
    """As a card's queue holds its rank up: no signal and no exception comes through."""
    path, data = befallen(tmp_path, 2)
    done = command(tmp_path, path, "--data", data, FAULT="apart 1", PATIENT="1")
    assert said(done.stderr) == ["dormouse: failed: rank 1: is gone and left no word"]
    (run,) = load(path)["runs"]
    assert (done.returncode, run["outcome"], run["steps"]) == (4, "failed", 3)
    assert "in forward" in next(tmp_path.glob("runs/*/rank-0.traceback")).read_text()


def test_ranks_that_are_stopped_before_they_met_are_told_of_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher stands for itself here: it is stopped, and ends as torch's does, with a traceback."""
    ends = "import os, signal; os.kill(os.getppid(), signal.SIGINT); raise SystemError('a traceback')"
    assert launch._wait([sys.executable, "-c", ends], {}, tmp_path) == 4
    assert capfd.readouterr().err == "dormouse: stopped: SIGINT before the run began\n"


def test_what_the_launcher_says_is_shown_where_no_rank_told_a_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch._wait([sys.executable, "-c", "raise SystemError('no port is free')"], {}, tmp_path) == 4
    said = capfd.readouterr().err
    assert said.startswith("dormouse: failed: the ranks ended and told no cause; their launcher says:\n")
    assert "SystemError: no port is free" in said


def _started(
    folder: Path, path: Path, data: Path, start: list[str] | None = None, **environ: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *(start or PYTHON), str(path), "--data", str(data), *consent(path)], cwd=folder, text=True,
        env=environment(OMP_NUM_THREADS="1", **environ),
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _until(process: subprocess.Popen[str], words: str) -> str:
    """What it writes up to the line with ``words``."""
    assert process.stderr is not None
    read = ""
    while words not in read:
        line = process.stderr.readline()
        assert line, f"ended before {words!r}:\n{read}"
        read += line
    return read


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_when_no_one_listens_any_more(tmp_path: Path, ranks: int) -> None:
    path, data = befallen(tmp_path, ranks, settings={"log_every": 1})
    process = _started(tmp_path, path, data)
    _until(process, "step 1/8")
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == 0
    assert load(path)["runs"][0]["outcome"] == "finished"


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_is_cut_during_the_run_kills_no_rank(tmp_path: Path, ranks: int) -> None:
    path, data = befallen(tmp_path, ranks)
    done = command(tmp_path, path, "--data", data, FAULT="cut 0")
    assert done.returncode == 0, done.stderr
    run, planned = load(path)["runs"][0], load(path)["workload"]["data"]["sources"][0]
    assert run["data"][0]["sha256"] == planned["sha256"]["value"]


def test_a_run_whose_plan_was_replaced_is_kept_whole_beside_it(tmp_path: Path) -> None:
    path, data = befallen(tmp_path, 1)
    sealed = load(path)["seal"]["digest"]
    write(tmp_path / "other.json", plans.plan(data, 1, seed=9))
    done = command(tmp_path, path, "--data", data, FAULT="remove 0")
    (kept,) = tmp_path.glob("runs/*/record-*.json")
    assert done.returncode == 4
    (message,) = [line for line in said(done.stderr) if "held-out" not in line]
    assert message.startswith("dormouse: finished, but the run could not be recorded in ")
    assert f"{kept.relative_to(tmp_path)}; to add it: cp" in message
    assert load(path)["runs"] == []
    assert (load(kept)["seal"]["digest"], load(kept)["runs"][0]["outcome"]) == (sealed, "finished")


def test_a_second_run_of_a_plan_or_in_its_folder_is_refused_while_one_goes_on(tmp_path: Path) -> None:
    path, data = befallen(tmp_path, 1, steps=400, settings={"log_every": 1})
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    process = _started(tmp_path, path, data, FAULT="slow")
    _until(process, "step   1/400")
    for words in ([path, "--run-dir", "elsewhere"], [copy]):
        done = command(tmp_path, *words, "--data", data)
        assert done.returncode == 3 and "refused (already-running)" in done.stderr, done.stderr
        assert f"another run (process {process.pid}) holds " in done.stderr
    with Hold() as other:
        assert other.take(copy) is None and other.take(tmp_path / "elsewhere" / METRICS) is None
    process.terminate()
    process.communicate(timeout=60)
    assert load(path)["runs"][0]["outcome"] == "stopped" and load(copy)["runs"] == []


def test_every_window_and_every_piece_of_a_file_that_is_on_the_disk_is_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plans.plan(plans.corpus(tmp_path), steps=2, settings={"eval_windows": 7, "checkpoint_every": 1})
    seen: list[str] = []

    def beat(pulse: Pulse) -> None:
        seen.append("" if pulse.work is None else pulse.work.what)

    def settle(handle: int, settled: Callable[[int], None] = os.fsync) -> None:
        seen.append("on the disk")
        settled(handle)

    monkeypatch.setattr(Pulse, "beat", beat)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(os, "fsync", settle)
    done = execute(made, Places(None, tmp_path / "run", (tmp_path / plans.CORPUS,)))
    assert done.outcome == "finished" and done.notice is None
    assert [seen.count(what) for what in ("step 1", "step 2", "the evaluation after step 2", "")] == [1, 1, 1 + 3, 0]
    pieces = bytes_of(tmp_path / "run" / "final") // 10_000
    for what in ("the checkpoint of step 1", "the trained model's file"):
        at = [place for place, word in enumerate(seen) if word == what]
        assert len(at) > 2 * pieces
        assert max(late - early for early, late in pairwise(at)) == 2  # at most one sync between two


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_run_that_is_found_only_in_its_folder_ends_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data = plans.plan(plans.corpus(tmp_path), steps=4), plans.corpus(tmp_path)
    opened = training.Teller

    def late(folder: Path, *more: object) -> object:  # both found nothing there to hold
        folder.mkdir()
        other.enter_context(first)
        (folder / METRICS).touch()
        assert first.take(folder / METRICS) is None
        return opened(folder, *more)

    monkeypatch.setattr(training, "Teller", late)
    with ExitStack() as other:
        first = Hold()
        done = execute(made, Places(None, tmp_path / "run", (data,)))
    assert done.outcome == "failed" and f"rank 0: another run (process {os.getpid()}) holds" in str(done.reason)


def test_no_entry_that_was_kept_is_written_over(tmp_path: Path) -> None:
    base, plan = compiled(), tmp_path / "plan.json"
    plan.mkdir()
    for name in ("run-1", "run-2"):
        message = keep(base, plan, tmp_path / "run", run_of(base, id=name))
        assert message is not None and f"record-{name}.json" in message
    kept = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in kept] == ["record-run-1.json", "record-run-2.json"]
    assert [[run["id"] for run in load(path)["runs"]] for path in kept] == [["run-1"], ["run-2"]]
    assert kept[0].read_bytes() == render(load(kept[0]))


def test_a_run_that_can_be_kept_nowhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = compiled()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file" / "tmp"))
    (tmp_path / "file").touch()
    message = keep(base, tmp_path / "file" / "plan.json", tmp_path / "file" / "run", run_of(base))
    assert message is not None and "kept in no file at all" in message


@pytest.mark.parametrize(
    ("there", "code", "words"),
    [("another plan", 3, "refused (record-unwritable)"), ("no plan", 2, "dormouse: "), ("nothing", 0, "finished")],
)
def test_what_lies_at_the_place_of_the_record_is_looked_at_first(
    tmp_path: Path, there: str, code: int, words: str
) -> None:
    path, data = written(tmp_path, 1, steps=1)
    place = tmp_path / "record.json"
    if there == "another plan":
        write(place, plans.plan(data, 1, seed=9))
    elif there == "no plan":
        place.write_text("a letter to my aunt")
    before = place.read_bytes() if place.exists() else None
    done = command(tmp_path, path, "--data", data, "--record", place)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert load(path)["runs"] == [] and "Traceback" not in done.stderr
    if there == "nothing":
        assert load(place)["seal"] == load(path)["seal"] and len(load(place)["runs"]) == 1
    else:
        assert place.read_bytes() == before and not (tmp_path / "runs").exists()


def test_a_model_whose_code_ends_the_process_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, data = plans.plan(plans.corpus(tmp_path), steps=4), plans.corpus(tmp_path)

    def leaves(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("executor.loop._update", leaves)
    done = execute(plan, Places(None, tmp_path / "run", (data,)))
    assert done.outcome == "failed" and "SystemExit" in str(done.reason)
