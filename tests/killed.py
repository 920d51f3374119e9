"""Ranks that die at a chosen moment: processes forked from one that has torch loaded, each killed by itself (SIGKILL)
at its Nth moment. By hand: ``python tests/killed.py 60``.

Moments are the calls at which something is half done: a forward, a gradient handed to the exchange, a step applied, a
file of a checkpoint or of the record begun, synced, renamed, or removed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from processes import free_port

MOMENTS = (
    "executor.models.kda:KdaModel.forward", "executor.exchange:sum_over_ranks", "executor.fleet:Ranks.share",
    "executor.loop:_update", "executor.checkpoint:write", "executor.checkpoint:_parts", "os:fsync", "os:replace",
    "pathlib:Path.rename", "shutil:rmtree",
)  # fmt: skip
KINDS = ("forward", "exchange", "update", "save", "record")
_KIND_OF = {"forward": "forward", "sum_over_ranks": "exchange", "share": "exchange", "_update": "update"}
_DEADLINE_SECONDS = 100


@dataclass(frozen=True)
class Job:
    """One run of the plan at ``plan``. ``dies``: (rank, moment), counted from 1, of the rank that is killed."""

    plan: Path
    data: Path
    run_dir: Path
    resume: bool = False
    dies: tuple[int, int] = (0, 0)


def start(job: Job, count: int) -> list[dict[str, Any] | None]:
    """Run ``job`` on ``count`` ranks; gives how each ended (outcome, reason, the kinds of its moments in their order),
    None of one that was killed."""
    context = _loaded()
    port, started = free_port(), []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(job, rank, count, port, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    if any(job.dies):
        started[job.dies[0]][0].join(_DEADLINE_SECONDS)
        for process, _ in started:  # as torchrun does
            process.terminate()
    found: list[dict[str, Any] | None] = []
    for process, ours in started:
        process.join(_DEADLINE_SECONDS)
        assert process.exitcode is not None, "a rank hangs"
        found.append(ours.recv() if ours.poll() and process.exitcode == 0 else None)
    return found


@cache
def _loaded() -> Any:
    """The server that ranks are forked from. It looks for what it loads where its environment says, not where we do."""
    context, before = multiprocessing.get_context("forkserver"), dict(os.environ)
    context.set_forkserver_preload(["plans", "torch._dynamo", "executor.run", "executor.models.presets", "killed"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    return context


def _run(job: Job, rank: int, count: int, port: int, connection: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from executor import causes, peaks, stopping
    from executor.run import Places, execute
    from schemas.store import load

    stopping.GRACE_SECONDS = causes.CULPRIT_SECONDS = 1.0
    peaks.LEAST_STEPS = 10**9  # no step under the profiler, which takes longer than all the others
    moments = _count(job.dies[1] if job.dies[0] == rank else 0)
    done = execute(load(job.plan), Places(job.plan, job.run_dir, (job.data,), job.resume))
    connection.send({"outcome": done.outcome, "reason": done.reason, "moments": moments})


def _kind(name: str) -> str:
    """Of the KINDS, that of a call of ``name``: files are of the record where the run's entry is being kept."""
    frame, modules = sys._getframe(2), set()
    while frame.f_back is not None:
        frame = frame.f_back
        modules.add(frame.f_globals.get("__name__"))
    return _KIND_OF.get(name, "record" if "executor.entry" in modules else "save")


def _count(last: int) -> list[str]:
    """Note the kinds of the moments of this process from now on; at the ``last`` it dies (0: never)."""
    import importlib

    noted: list[str] = []

    def marked(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def moment(*words: Any, **more: Any) -> Any:
            noted.append(_kind(call.__name__))
            if len(noted) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*words, **more)

        return moment

    for place in MOMENTS:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, marked(getattr(owner, name)))
    return noted


def trials(folder: Path, count: int, number: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Kill a rank of ``count`` at ``number`` random moments, one run each, of each kind in turn.

    After each: the plan verifies, the newest checkpoint is whole (or there is none), and a run that goes on from it, or
    from the start, leaves the very bytes of the run that was never disturbed. So does one that was recorded as finished
    when it was killed, of which nothing is left to do.

    Returns:
        What went wrong, and how many of each kind of moment there were.
    """
    import plans
    from executor import resume
    from executor.checkpoint import MODEL
    from schemas.store import load, write

    data, chosen, wrong = plans.corpus(folder), random.Random(seed), list[str]()
    made = plans.plan(data, count, steps=7)
    made = plans.with_values(made, {"/workload/config/checkpoint_every": 2})
    write(folder / "straight.json", made)
    straight = start(Job(folder / "straight.json", data, folder / "straight"), count)
    wanted = (folder / "straight" / "final" / MODEL).read_bytes()
    assert all(row is not None and row["outcome"] == "finished" for row in straight), straight
    places = {kind: _moments(straight, kind) for kind in KINDS}
    places = {kind: found for kind, found in places.items() if found}  # one rank exchanges nothing
    tally = dict.fromkeys(places, 0)
    for trial in range(number):
        kind = list(places)[trial % len(places)]
        rank, moment = chosen.choice(places[kind])
        tally[kind] += 1
        plan, run_dir = folder / f"{trial}.json", folder / str(trial)
        write(plan, made)
        killed = start(Job(plan, data, run_dir, dies=(rank, moment)), count)
        ended = any(run["outcome"] == "finished" for run in load(plan)["runs"])
        found = resume.newest(run_dir)
        again = [] if ended else start(Job(plan, data, run_dir, resume=found["chosen"] is not None), count)
        recorded = load(plan)["runs"]
        same = (run_dir / "final" / MODEL).read_bytes() == wanted
        fine = killed[rank] is None and not found["passed"] and recorded[-1]["outcome"] == "finished"
        if not (same and fine and all(row is not None and row["outcome"] == "finished" for row in again)):
            wrong.append(f"rank {rank} of {count} at moment {moment} ({kind}): {found}, {killed}, {again}")
    return wrong, tally


def _moments(rows: list[dict[str, Any] | None], kind: str) -> list[tuple[int, int]]:
    """(rank, moment counted from 1) of every moment of ``kind``."""
    return [
        (rank, place + 1)
        for rank, row in enumerate(rows)
        if row is not None
        for place, found in enumerate(row["moments"])
        if found == kind
    ]


if __name__ == "__main__":
    for ranks in (1, 2):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            bad, kinds = trials(Path(place), ranks, int(sys.argv[1]), seed=0)
        told = ", ".join(f"{number} in {kind}" for kind, number in kinds.items())
        print(f"{ranks} ranks, {sys.argv[1]} kills ({told}), {time.monotonic() - began:.0f} s:", flush=True)
        print(f"{len(bad)} went wrong", *bad, sep="\n", flush=True)
