"""What a run has on one rank: what it is given, what comes of that, and how it ended. The rooms of a run pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from executor.build import Optimizers
from executor.clock import Clock
from executor.data import Reader
from executor.fleet import Fleet
from executor.hold import Hold
from executor.loop import Observe, Progress, Training
from executor.meeting import Meeting
from executor.models.presets import TINY
from executor.pulse import Pulse
from executor.reporter import Mute, Reporter
from executor.resume import Keeper
from executor.slices import DataSlice, ExchangeSlice, RankSlice, WorkSlice
from executor.stopping import Stopping
from executor.watch import Peers
from planner.door import Workload
from schemas.form import Json


@dataclass(frozen=True)
class Places:
    """Where a run records (None: nowhere), puts its metrics and checkpoints (or with ``resume`` goes on from those),
    and finds the plan's data. Never what it does."""

    record: Path | None
    run_dir: Path
    data: tuple[Path, ...] = ()
    resume: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``agreed``: all ranks know it. ``speaks``: this rank is the one that recorded the end and tells
    it, rank 0 as long as it lives; ``entry`` is its record, ``notice`` a fault in that. ``newest``: the step after
    which a failed run can go on. ``store`` is where the ranks met: other ranks may read it until the end is told."""

    outcome: str
    reason: str | None
    agreed: bool
    speaks: bool
    model: nn.Module
    entry: dict[str, Json] | None = None
    notice: str | None = None
    newest: int | None = None
    store: Any = None


@dataclass(frozen=True)
class Given:
    """What a rank has from its first moment on: the plan and its slices of it, its places, and what it meets others by
    (in ``store``, None alone). ``observe`` and ``leave`` are as `execute` is told; ``new_record``: nothing lies yet
    where the run is to be recorded."""

    plan: Mapping[str, Json]
    places: Places
    observe: Observe | None
    leave: Callable[[Outcome], NoReturn] | None
    start: str
    rank: RankSlice
    work: WorkSlice
    data: DataSlice
    exchange: ExchangeSlice
    clock: Clock
    meeting: Meeting
    store: Any
    stopping: Stopping
    hold: Hold
    new_record: bool

    @property
    def sharded(self) -> bool:
        """Whether ranks share one model."""
        return self.exchange.shard == "fsdp"


@dataclass
class Made:
    """What has come of a run so far: an end, whenever it comes, finds here what there is.

    ``name`` is the run's id, ``rows`` the ranks' facts, ``ran`` the smoke launch's row. ``failed``: this rank was the
    fault. ``print`` is the trained model's fingerprint, where no rank alone could tell it, and ``unkept`` why that
    model could not be kept.
    """

    name: str
    peers: Peers
    progress: Progress = field(default_factory=Progress)
    reporter: Reporter = field(default_factory=Mute)
    rows: list[Json] = field(default_factory=list)
    ran: dict[str, Json] = field(default_factory=dict)
    workload: Workload = TINY
    model: nn.Module = field(default_factory=nn.Module)
    fleet: Fleet | None = None
    training: Training | None = None
    keeper: Keeper | None = None
    pulse: Pulse = field(default_factory=Pulse)
    conditions: dict[str, Json] = field(default_factory=dict)
    failed: bool = False
    print: str | None = None
    unkept: str | None = None


@dataclass(frozen=True)
class Built:
    """What trains: data and model opened, and the optimizers on their device."""

    reader: Reader
    device: torch.device
    optimizers: Optimizers

    def first_batch(self, data: DataSlice) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's windows of step 0, each [B, T], on its device."""
        inputs, targets = self.reader.batch(0, data.global_batch, data.offset, data.batch, data.seq)
        return inputs.to(self.device), targets.to(self.device)
