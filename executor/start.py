"""What comes before training: facts gathered and judged, data and model opened, the optimizers made, the smoke launch
judged. No process group yet, but where ranks share the model: it comes when the plan is honoured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from executor import build, honour, kept, smoke, trial
from executor.data import Reader
from executor.fleet import Ranks
from executor.optim.routing import Routed, rows_of, split
from executor.reporter import METRICS
from executor.slices import WorkSlice
from executor.state import Built, Given, Made
from executor.watch import Peers
from executor.watch import identity as own_process
from planner.door import BadWorkload
from schemas.form import Json, Unfaithful
from schemas.store import unrecordable_reason

if TYPE_CHECKING:
    from executor.sharded import Sharded

AnyRanks = TypeVar("AnyRanks", bound=Ranks)


def start(given: Given, made: Made) -> Built:
    """Gather facts, judge, build, smoke, judge; gives what trains.

    Raises:
        Refused: the plan cannot be honoured; every rank raises it.
        BadRank: a fault of the user; every rank raises it.
        LinkFailed: ranks that share the model cannot reach each other.
    """
    readers: list[Reader] = []
    row = honour.own_facts(given.plan["seal"]["digest"], given.rank, lambda: _open(given, made, readers))
    mine = {**row, "run": made.name, "process": own_process(), "held": held(given), **_lying(given)}
    made.rows = honour.agree(given.plan, given.meeting, mine, _unrecordable(given))
    made.peers = Peers(given.rank.rank, [row["process"] for row in made.rows])
    made.name = made.rows[0]["run"]  # one name, whichever rank records it
    made.ran, built = _smoke(given, made, readers[0])
    honour.agree_on_smoke(given.plan, given.meeting, made.ran)
    assert built is not None  # without it the launch had an error, and was refused
    return built


def held(given: Given) -> str | None:
    """Why another run is under way where this one would be recorded or leave its metrics; rank 0 asks for all."""
    if given.rank.rank != 0:
        return None
    files: list[Path] = [given.places.run_dir / METRICS]
    files += [] if given.places.record is None else [given.places.record]
    return next(filter(None, map(given.hold.take, files)), None)


def met(given: Given, kind: type[AnyRanks]) -> AnyRanks:
    """The ranks together over their link, which is tried. Raises LinkFailed."""
    watched = given.leave is not None
    return trial.made(
        trial.SECONDS,
        lambda: kind(given.rank, given.data.token_weight, given.exchange, given.clock, given.store, watched),
    )


def _lying(given: Given) -> dict[str, Json]:
    """What rank 0 finds in the run's folder: a checkpoint to go on from, and the room for those to come."""
    return kept.lying(given.places, given.work) if given.rank.rank == 0 else {"resume": None, "room": None}


def _unrecordable(given: Given) -> str | None:
    try:
        return None if given.places.record is None else unrecordable_reason(given.places.record, given.plan)
    except Unfaithful as error:
        return str(error)


def _open(given: Given, made: Made, readers: list[Reader]) -> dict[str, Json]:
    """Open the data (into ``readers``) and build the model: this rank's facts of both. Raises BadPlace, BadData and
    BadWorkload."""
    if given.rank.rank == 0:
        build.require_folder(given.places.run_dir)
    corpora = build.open_corpora(given.data.sources, given.places.data)
    readers.append(build.reader(corpora, given.data))
    made.workload, made.model = build.model(given.work, dict(given.rank.kernels))
    if kept.keeps_model(given):
        kept.require_room(given.places.run_dir, given.work, made.model)
    digest = honour.workload_facts(made.workload, made.model, given.work.opt)
    return {"data": honour.data_facts(corpora), "workload_digest": digest}


def _smoke(given: Given, made: Made, reader: Reader) -> tuple[dict[str, Json], Built | None]:
    """The smoke launch's row, and what trains, where it could be built."""
    rank, sharing, rows = given.rank, None, None
    try:
        build.settle(made.model, rank, given.sharded)
        if given.sharded:
            sharing = made.fleet = _sharing(given)
            rows = _share(sharing, made.model, given.work)
        optimizers = build.optimizers(made.model, given.work, rank, given.exchange.owners, rows)
    except (BadWorkload, torch.OutOfMemoryError) as error:
        given.meeting.stumble()
        return smoke.failed(rank.rank, error), None
    built = Built(reader, build.device_of(rank.kind), optimizers)
    if sharing is not None:
        return _launch_together(given, made.model, built, sharing), built
    return smoke.launch(rank.rank, made.model, *built.first_batch(given.data), rank.dtype), built


def _sharing(given: Given) -> Sharded:
    """The fleet of ranks that share the model: it comes before the smoke launch, which needs it."""
    from executor.sharded import Sharded  # FSDP2's import takes a second

    return met(given, Sharded)


def _share(sharing: Sharded, model: nn.Module, work: WorkSlice) -> Routed:
    """Shard the model over the ranks; gives this rank's rows by route."""
    try:
        return rows_of(split(model, work.opt), lambda: sharing.shard(model))
    except ValueError as error:
        raise BadWorkload(f"the plan's model {work.model}: {error}") from None


def _launch_together(given: Given, model: nn.Module, built: Built, sharing: Sharded) -> dict[str, Json]:
    """The smoke launch of ranks that compute together: one that fails lets the others know, which would wait."""
    with sharing.launching(given.meeting.anyone_stumbled) as arrive:
        row = smoke.launch(given.rank.rank, model, *built.first_batch(given.data), given.rank.dtype, arrive)
    if row["error"] is not None:
        given.meeting.stumble()
    return {**row, "lost": sharing.lost}
