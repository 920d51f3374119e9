"""Ranks for tests: three processes started once, with torch loaded, that run jobs together over gloo.

The third computes with the plainest CPU kernels (ATEN_CPU_CAPABILITY=default), which can only be chosen at start.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENTS: tuple[dict[str, str], ...] = ({}, {}, {"ATEN_CPU_CAPABILITY": "default"})
_DEADLINE_SECONDS = 100


def run(plan: dict[str, Any], data: Path, run_dir: Path, *, on: Sequence[int] = (0, 1), **job: Any) -> list[Any]:
    """Run ``plan`` on the processes ``on``, one a rank; gives each rank's result, in order. See `_train`."""
    workers, port = _workers(), _free_port()
    for rank, worker in enumerate(on):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(on)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers[worker].send((world, {"plan": plan, "data": str(data), "run_dir": str(run_dir), **job}))
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Connection) -> None:
    while True:
        world, job = connection.recv()
        os.environ.update(world)
        connection.send(_train(int(world["RANK"]), **job))


def _train(
    rank: int,
    plan: dict[str, Any],
    data: str,
    run_dir: str,
    fault: str | None = None,
    plain_products_on: int | None = None,
    poison: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train, and give what this rank saw.

    Args:
        fault: the planted fault of this name.
        plain_products_on: the rank that computes without mkldnn.
        poison: (rank, step) whose loss becomes NaN.
    """
    import torch

    import faults
    from executor.fleet import abandon, fingerprint
    from executor.run import Places, execute
    from planner.refusals.rules import Refused

    seen: dict[str, Any] = {"losses": [], "fingerprints": [], "weights": None, "gradients": None, "buffers": []}

    def observe(step: int, loss: float, model: Any) -> None:
        seen["losses"].append(loss)
        seen["fingerprints"].append(fingerprint(model))
        seen["buffers"].append({n: b.numpy().copy() for n, b in model.named_buffers()})
        if step == 0:
            seen["weights"] = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
            seen["gradients"] = {n: p.grad.double().numpy().copy() for n, p in model.named_parameters()}

    undo = faults.plant(fault) if fault else []
    undo += _poison(rank, poison)
    products = torch.backends.mkldnn.flags(enabled=False) if rank == plain_products_on else nullcontext()
    try:
        with products:
            done = execute(plan, Places(None, Path(run_dir), (Path(data),)), observe=observe)
        seen |= {"outcome": done.outcome, "reason": done.reason, "entry": done.entry}
    except Refused as error:
        seen |= {"outcome": "refused", "reason": error.text(), "entry": None}
    finally:
        abandon()
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)
    return seen


def _poison(rank: int, poison: tuple[int, int] | None) -> list[tuple[Any, str, Any]]:
    """Make one rank's loss NaN at one step (the first forward through DDP is the discarded one, before step 0)."""
    from executor.fleet import Ranks

    prepare = Ranks.prepare

    def tripped(self: Any, *parts: Any) -> Any:
        forward, calls = prepare(self, *parts), [-2]

        def call(*batch: Any) -> Any:
            calls[0] += 1
            loss = forward(*batch)
            return loss * float("nan") if poison == (rank, calls[0]) else loss

        return call

    Ranks.prepare = tripped  # type: ignore[method-assign]
    return [(Ranks, "prepare", prepare)]
