"""Runs of small plans on the ranks that are here, by the executor's own `execute`, one after another in one process a
rank; each is watched, and what matters of it is told to every rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.fleet import abandon
from executor.gates import Lost
from executor.gates.compare import Watch
from executor.honour import BadRank
from executor.meeting import Meeting
from executor.run import Places, execute
from planner.refusals.rules import Refused
from schemas.form import Json

_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Run:
    """What this rank saw of a run, and in ``rows`` what every rank tells of it: outcome, reason, refusals (codes),
    losses, fingerprints."""

    watch: Watch
    outcome: str
    reason: str | None = None
    refusals: tuple[str, ...] = ()
    entry: dict[str, Json] | None = None
    rows: list[dict[str, Json]] = field(default_factory=list)

    def row(self) -> dict[str, Json]:
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "refusals": list(self.refusals),
            "losses": self.watch.losses,
            "fingerprints": self.watch.fingerprints,
        }

    @property
    def ended(self) -> str | None:
        """How the run ended, where any rank did not finish it; None where all did."""
        told = [row["reason"] or row["outcome"] for row in self.rows if row["outcome"] != "finished"]
        return None if not told else str(told[0]).splitlines()[0]


class Poison(Watch):
    """A watch that makes this rank's loss NaN at one step, counted from 0, by a hook on the model."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def __call__(self, step: int, loss: float, model: nn.Module) -> None:
        super().__call__(step, loss, model)
        if step == self._step - 1:

            def once(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                handle.remove()
                return output * float("nan")

            handle = model.register_forward_hook(once)


class Bench:
    """One rank's part in the gate's runs.

    Args:
        meeting: where the ranks of the gate meet between runs.
        folder: takes the runs' metrics and logs; ``text`` is the file that they train on.
    """

    def __init__(self, meeting: Meeting, folder: Path, text: Path) -> None:
        self.rank, self.size, self.meeting = meeting.rank, meeting.size, meeting
        self._folder, self.text = folder, text

    def together(self, plan: Mapping[str, Json], watch: Watch | None = None, *, plain_products: bool = False) -> Run:
        """``plan`` on every rank; each may have a watch of its own, or compute its products by other CPU kernels.

        Raises Lost.
        """
        (port, *_) = self.meeting.gather(_free_port())
        found = self._execute(plan, self.rank, self.size, port, watch or Watch(), plain_products)
        found.rows = self.meeting.gather(found.row())
        return found

    def alone(self, plan: Mapping[str, Json]) -> Run | None:
        """``plan``, of one rank, on the first rank; None on the others."""
        if self.rank:
            return None
        found = self._execute(plan, 0, 1, 0, Watch(), False)
        found.rows = [found.row()]
        return found

    def _execute(
        self, plan: Mapping[str, Json], rank: int, size: int, port: int, watch: Watch, plain_products: bool
    ) -> Run:
        before = {name: os.environ.get(name) for name in _WORLD}
        os.environ |= dict(zip(_WORLD, (str(rank), str(size), "127.0.0.1", str(port)), strict=True))
        places = Places(None, self._folder / plan["seal"]["digest"][:12], (self.text,))
        products: AbstractContextManager[Any] = (
            torch.backends.mkldnn.flags(enabled=False) if plain_products else nullcontext()
        )
        try:
            with (self._folder / f"rank-{rank}.log").open("a") as log, redirect_stderr(log), products:
                done = execute(plan, places, observe=watch)
            # Who is gone would be waited for; and a stop is of the gate, whose runs no one goes on with.
            if not done.agreed or done.outcome == "stopped":
                raise Lost(f"{done.outcome}: {done.reason}".partition("; --resume")[0])
            return Run(watch, done.outcome, done.reason, entry=done.entry)
        except Refused as error:
            return Run(watch, "refused", error.text(), tuple(item.code for item in error.refusals))
        except BadRank as error:
            return Run(watch, "failed", str(error))
        finally:
            abandon()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _free_port() -> int:
    """A port that is free now; every run gets one of its own, since a store keeps what a run before left in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
