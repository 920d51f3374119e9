"""Ranks for tests: three processes started once, with torch loaded, that run jobs together over gloo.

The third computes with the plainest CPU kernels (ATEN_CPU_CAPABILITY=default), which can only be chosen at start.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from processes import free_port

ENVIRONMENTS: tuple[dict[str, str], ...] = ({}, {}, {"ATEN_CPU_CAPABILITY": "default"})
_DEADLINE_SECONDS = 100


def run(plan: dict[str, Any], data: Path, run_dir: Path, *, on: Sequence[int] = (0, 1), **job: Any) -> list[Any]:
    """Run ``plan`` on the processes ``on``, one a rank; gives each rank's result, in order. See `_train`."""
    return _served({"plan": plan, "data": str(data), "run_dir": str(run_dir), **job}, on)


def gate(arguments: Sequence[str], fault: str | None = None) -> list[Any]:
    """The command ``executor.gate`` on two ranks; gives each rank's code and words. See `_gate`."""
    return _served({"arguments": list(arguments), "fault": fault}, (0, 1))


def commands(words: Sequence[Sequence[str]]) -> list[Any]:
    """The executor's command, on a rank for each row of ``words``; gives each rank's code and words."""
    return _served({"words": [list(row) for row in words]}, range(len(words)))


def _served(job: dict[str, Any], on: Sequence[int]) -> list[Any]:
    workers, port = _workers(), free_port()
    for rank, worker in enumerate(on):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(on)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers[worker].send((world, job))
    results = []
    for worker in on:
        if not workers[worker].poll(_DEADLINE_SECONDS):
            raise TimeoutError(f"the process of rank {on.index(worker)} gave no result: a collective hangs")
        results.append(workers[worker].recv())
    return results


@cache
def _workers() -> list[Connection]:
    context = multiprocessing.get_context("spawn")
    connections = []
    for more in ENVIRONMENTS:
        ours, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update({"OMP_NUM_THREADS": "1", **more})
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        os.environ.clear()
        os.environ.update(before)
        atexit.register(process.kill)
        connections.append(ours)
    return connections


def _serve(connection: Connection) -> None:
    while True:
        world, job = connection.recv()
        os.environ.update(world)
        job_of = _gate if "arguments" in job else partial(_command if "words" in job else _train, int(world["RANK"]))
        connection.send(job_of(**job))


def _train(
    rank: int,
    plan: dict[str, Any],
    data: str,
    run_dir: str,
    fault: str | None = None,
    plain_products_on: int | None = None,
    poison: tuple[int, int] | None = None,
    stop: tuple[int, int] | None = None,
    resume: bool = False,
    path: str | None = None,
) -> dict[str, Any]:
    """Train, and give what this rank saw.

    Args:
        fault: the planted fault of this name.
        plain_products_on: the rank that computes without mkldnn.
        poison: (rank, step) whose loss becomes NaN.
        stop: (rank, step) after which the rank gets SIGTERM.
        resume: go on from the newest whole checkpoint in ``run_dir``.
        path: where modules of one's own lie.
    """
    import torch

    import faults
    from executor.fleet import abandon
    from executor.gates.bench import Poison
    from executor.gates.compare import Watch
    from executor.run import Places, execute
    from planner.refusals.rules import Refused

    watch = Poison(poison[1]) if poison is not None and poison[0] == rank else Watch()

    def observe(step: int, loss: float, model: Any) -> None:
        if stop == (rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        watch(step, loss, model)

    if path is not None:
        sys.path.insert(0, path)
    undo = faults.plant(fault) if fault else []
    products = torch.backends.mkldnn.flags(enabled=False) if rank == plain_products_on else nullcontext()
    try:
        with products:
            done = execute(
                plan, Places(None, Path(run_dir), (Path(data),), resume), observe=watch if stop is None else observe
            )
        end = {"outcome": done.outcome, "reason": done.reason, "entry": done.entry}
    except Refused as error:
        end = {"outcome": "refused", "reason": error.text(), "entry": None}
    finally:
        abandon()
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)
    seen = {key: getattr(watch, key) for key in ("losses", "fingerprints", "buffers", "weights", "gradients")}
    return seen | end


def _gate(arguments: list[str], fault: str | None) -> dict[str, Any]:
    """The code and the words of this rank's part in the command ``executor.gate``."""
    import faults
    from executor import gate

    undo = faults.plant(fault) if fault else []
    words = io.StringIO()
    try:
        with redirect_stdout(words), redirect_stderr(words):
            return {"code": gate.main(arguments), "words": words.getvalue()}
    finally:
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)


def _command(rank: int, words: list[list[str]]) -> dict[str, Any]:
    """The code and the words of this rank's part in the executor's command, on a torch without NCCL: which a CPU's is,
    and a card's is not."""
    from torch import distributed

    from executor import __main__ as runner

    said, before = io.StringIO(), {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        without = mock.patch.object(distributed, "is_nccl_available", lambda: False)
        with redirect_stdout(said), redirect_stderr(said), without:
            return {"code": runner.main(words[rank]), "words": said.getvalue()}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
