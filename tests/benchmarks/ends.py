"""How runs end: faults befall one rank of real runs, and what the user sees and when is written down as a table.

    python tests/benchmarks/ends.py [--device cuda] [--ranks 2] [--jobs 3] [--out ends.md]

Each run is of a small module (``tests/befallen.py``), with a checkpoint every second step; at its eighth forward (the
sixth of a rank alone) the fault befalls one rank, which leaves the moment in a file. Memory runs out for real on a card
(the allocator is given a limit, then asked for more); a CPU has no limit to give, so there torch's error is raised.
After each run the plan must verify, and its newest checkpoint be whole.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

import psutil

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import plans  # noqa: E402  # what is imported lies beside
from executor import resume  # noqa: E402
from processes import ROOT, environment, free_port  # noqa: E402
from schemas.store import load  # noqa: E402

FAULTS = {
    "kill": "is killed (SIGKILL)",
    "freeze": "is stopped (SIGSTOP)",
    "hang": "hangs in Python",
    "deaf": "hangs in C, deaf to signals",
    "evaluation": "hangs in an evaluation",
    "save": "hangs in a save: its disk settles nothing more",
    "grip": "hangs in a save, in C that keeps Python's lock",
    "nan": "has a loss that is NaN",
    "memory": "runs out of memory",
}
TOLD_ALONE = ("nan", "memory")
SIGNALS = {
    "slow, INT": "Ctrl-C",
    "slow, TERM": "SIGTERM",
    "hang, INT twice": "Ctrl-C and again 1.5 s later, while the last rank hangs in Python",
    "deaf, INT twice": "Ctrl-C and again 1.5 s later, while the last rank hangs in C",
}
STARTS = {
    "python": ["-m", "executor"],
    "torchrun": ["-m", "torch.distributed.run", "-m", "executor"],
    "torchrun N": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node={ranks}", "-m", "executor"],
}

MODEL = "befallen:Model"
LAST_LINES = 4  # of what a run said that ended before its fault


@dataclass(frozen=True)
class Case:
    """A fault (a key of FAULTS or SIGNALS), the rank that it befalls, and how the run was started."""

    fault: str
    rank: int
    start: str

    @property
    def what(self) -> str:
        return self.fault.partition(" ")[0].rstrip(",")


@dataclass
class Seen:
    """``lines`` after the fault with the seconds at which they came; ``gone`` when the last process was."""

    lines: list[tuple[float, str]]
    gone: float
    code: int
    run: dict[str, Any]
    newest: int | None


def cases(ranks: int) -> list[Case]:
    """Every fault on the last rank and on the first; those that differ by how the run was started once more. Of a rank
    alone only those that it can tell itself."""
    faults = FAULTS if ranks > 1 else TOLD_ALONE
    found = [Case(fault, rank, "python") for fault in faults for rank in dict.fromkeys((ranks - 1, 0))]
    found = [case for case in found if case.fault != "evaluation" or case.rank == 0]  # which alone evaluates
    found += [Case(fault, ranks - 1, "torchrun") for fault in ("kill", "freeze", "memory") if ranks > 1]
    found += [Case("kill", ranks - 1, "torchrun N")] if ranks > 1 else []
    return found + [Case(fault, ranks - 1, start) for fault in SIGNALS for start in ("python", "torchrun")]


def measure(case: Case, ranks: int, device: str) -> Seen:
    """Run ``case`` in a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _plan(folder, ranks, device)
        words = [sys.executable, *(word.format(ranks=ranks) for word in STARTS[case.start])]
        more = {"FAULT": f"{case.what} {case.rank}", "PATIENT": "1", "OMP_NUM_THREADS": "1"}
        more["FORWARD"] = "8" if ranks > 1 else "6"  # of one rank the eighth is in an evaluation
        more["PET_MASTER_PORT"] = str(free_port())  # torch 2.11's torchrun takes one and the same where none is told
        process = subprocess.Popen(
            [*words, "plan.json", "--data", plans.CORPUS, "--run-dir", "run", "--model", MODEL],
            cwd=folder, text=True, env=environment(**more),
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        lines: list[tuple[float, str]] = []
        reader = Thread(target=_read, args=(process.stderr, lines))
        reader.start()
        moment = _until(folder, process, case, lines)
        if moment is None:
            reader.join(60)
            said = [text for _, line in lines if (text := line.strip(" ^"))]
            raise AssertionError(f"the run ended before its fault; it said last: {' / '.join(said[-LAST_LINES:])}")
        started = psutil.Process(process.pid).children(recursive=True)
        if case.fault in SIGNALS:
            moment = _signal(process, case)
        code = process.wait(300)
        reader.join(60)
        gone = _all_gone(started)
        found = resume.newest(folder / "run")
        assert not found["passed"], found
        after = [(at - moment, line) for at, line in lines if at >= moment]
        return Seen(
            after, gone - moment, code, load(folder / "plan.json")["runs"][-1], (found["chosen"] or {}).get("steps")
        )


def _plan(folder: Path, ranks: int, device: str) -> None:
    shutil.copy(ROOT / "tests" / "befallen.py", folder)
    plans.corpus(folder)
    asked = ["--devices", f"cpu:{ranks}" if device == "cpu" else "auto", "--model", MODEL]
    asked += ["--data", plans.CORPUS, "--steps", "400", "--batch", "3", "--seq", "64"]
    asked += ["--set", "checkpoint_every=2", "--set", "log_every=1", "--set", "eval_every=6"]
    with (folder / "plan.json").open("wb") as file:
        words = [sys.executable, "-m", "planner", *asked]
        environ = environment(OMP_NUM_THREADS="1")
        subprocess.run(words, cwd=folder, env=environ, stdout=file, stderr=subprocess.DEVNULL, check=True)
    found = sum(len(entry["members"]) for entry in load(folder / "plan.json")["ranks"])
    assert found == ranks, f"the plan is of {found} ranks: show as many cards as --ranks says"


def _read(stream: IO[str], lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.time(), line.rstrip("\n")))


def _until(folder: Path, process: subprocess.Popen[str], case: Case, lines: list[tuple[float, str]]) -> float | None:
    """The moment at which the fault befell its rank, or at which the run that is only signalled is in its midst; None
    where the run ended before."""
    while process.poll() is None:
        if case.what == "slow" and any("step   8/400" in line for _, line in lines):
            return time.time()
        for path in folder.glob("fault-*"):
            if case.what != "slow" and (text := path.read_text()):
                return float(text)
        time.sleep(0.02)
    return None


def _signal(process: subprocess.Popen[str], case: Case) -> float:
    """Send the signals of ``case``; the moment of the first."""
    moment = time.time()
    if "TERM" in case.fault:
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    if "twice" in case.fault:
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)
    return moment


def _all_gone(started: list[psutil.Process]) -> float:
    """When no process of the run is left."""
    while any(_lives(process) for process in started):
        time.sleep(0.05)
    return time.time()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def row(case: Case, seen: Seen) -> str:
    """The table's line of ``case``."""
    first = next(
        ((at, line) for at, line in seen.lines if line.startswith(("dormouse: failed", "dormouse: stopped"))), None
    )
    at, line = first or (float("nan"), "nothing")
    before = [text for when, text in seen.lines if when < at and text and not text.startswith("dormouse: ")]
    what = f"rank {case.rank} {FAULTS[case.fault]}" if case.fault in FAULTS else SIGNALS[case.fault]
    run = seen.run
    measured = len({label.rpartition("@")[2] for label in run["measured"] if "@" in label})
    cells = [
        what, case.start, f"`{line.removeprefix('dormouse: ')}`", f"{at:.1f}", f"{seen.gone:.1f}", len(before),
        seen.code, f"{run['outcome']}, {run['steps']}", f"{len(run['measured'])} of {measured} ranks", seen.newest,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = """| what befalls | started by | what is told | s | all gone, s | other lines before | code | record | \
measured | newest whole checkpoint |
|---|---|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make runs fail and stop, and write down what is told and when.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression: the faults that have it")
    parser.add_argument("--out", type=Path, help="takes the table (default: standard output)")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases(options.ranks) if re.search(options.only, case.fault)]
    lines = [HEAD]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = {case: pool.submit(measure, case, options.ranks, options.device) for case in chosen}
        for case, future in found.items():
            try:
                seen = future.result()
                lines.append(row(case, seen))
                foreign = [
                    f"    {at:5.1f} s  {text}" for at, text in seen.lines if not text.startswith("dormouse: step")
                ]
                print(case, *foreign[:12], sep="\n", file=sys.stderr)
            except Exception as error:  # the others still count
                lines.append(f"| {case} | {type(error).__name__}: {error} |")
            if options.out is not None:
                options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
