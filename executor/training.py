"""What is done around the loop of an honoured plan: the ranks meet over their link, what they reduced is held to the
plan, and the run begins to tell, goes on from a checkpoint, and is watched while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from executor import conditions, kept, loop, smoke, trial
from executor.build import Optimizers
from executor.fingerprints import fingerprint
from executor.fleet import Alone, Fleet, Ranks, patience
from executor.hold import InUse
from executor.loop import RunFailed, Training
from executor.meeting import SETUP_SECONDS
from executor.meter import Meter
from executor.parts import own
from executor.peaks import probe, storage_bytes
from executor.pulse import Work
from executor.reporter import Teller
from executor.slices import ExchangeSlice, rank_slice
from executor.start import held, met
from executor.state import Built, Given, Made
from executor.watch import Stall, Watch, main_is_at
from schemas.form import Json

Take = Callable[[str | None, Work | None], None]
"""Ends this rank from beside; told the signal that asked for it twice, and the work that has stalled."""
LEEWAY_SECONDS = 5.0
"""What a rank's watch leaves to those that can tell more: to a collective's own deadline, and where ranks give rank 0
their parts of what it writes, to them."""


def train(given: Given, made: Made, built: Built, take: Take) -> None:
    """Every step of the plan, and the ranks' leaving. Raises what the loop raises, LinkFailed and InUse."""
    rank, model = given.rank, made.model
    if made.fleet is None:
        made.fleet = Alone() if rank.size == 1 else met(given, Ranks)
    fleet = made.fleet
    forward = fleet.prepare(model, built.optimizers)
    if rank.size > 1 and not given.sharded:
        for _ in range(2):  # the second makes the final buckets, so that no step does
            fleet.begin()
            smoke.build_buckets(forward, model, *built.first_batch(given.data), rank.dtype)
    if rank.size > 1:
        _check_reduced(rank.rank, fleet, given.exchange)
    if rank.rank == 0:
        _begin_to_tell(given, made, fleet)
    made.keeper, made.progress = kept.go_on(given, made, built)
    done = made.progress.steps
    watch = probe(rank.kind, given.work.steps - done, lambda: _alive(rank.kind, model, built.optimizers, fleet))
    first = given.work.config["warmup_steps_unmeasured"]
    meter = Meter(given.clock, watch, first, fleet.exchanged, done)
    made.training = Training(
        model, forward, built.optimizers, fleet, built.reader, meter, made.reporter, rank.dtype, built.device,
        given.stopping, made.keeper.save, made.pulse,
    )  # fmt: skip
    fleet.wait()
    with _watched(given, made, fleet, take):
        with given.stopping.training():
            loop.train(made.training, given.work, given.data, made.progress, _observer(given, made))
        if given.sharded:  # what the end takes of the whole model, while all ranks that hold parts of it are there
            made.print = fingerprint(model)
            with fleet.saving():
                made.unkept = kept.keep_together(given, made)
        fleet.close()


def _begin_to_tell(given: Given, made: Made, fleet: Fleet) -> None:
    """Open the run's metrics on rank 0, and tell what it starts with. Raises InUse."""
    made.reporter = Teller(given.places.run_dir, given.work.config["log_every"], made.name, given.start)
    other = held(given)  # the metrics are there only now where this is the folder's first run
    if other is not None:
        raise InUse(other)
    if given.rank.size > 1:
        made.reporter.say(starting_line(given.plan, made.rows, given.exchange.reduce_dtype))
    found = fleet.tried()
    slow = None if found is None else trial.crawl(found, given.exchange)
    if slow is not None:
        made.reporter.say(slow)


def starting_line(plan: Mapping[str, Json], rows: Sequence[Mapping[str, Json]], reduce_dtype: str) -> str:
    """What each rank computes in, alike ones together, and what gradients are reduced in."""
    alike: dict[str, list[str]] = {}
    for rank, row in enumerate(rows):
        name = row["device"].get("name") or "a device that tells no name"
        alike.setdefault(f"{rank_slice(plan, rank).dtype} on {name}", []).append(str(rank))
    each = (f"rank{'s' * (len(found) > 1)} {', '.join(found)} in {what}" for what, found in alike.items())
    return f"starting: {'; '.join(each)}; gradients are reduced in {reduce_dtype}"


def _check_reduced(rank: int, fleet: Fleet, planned: ExchangeSlice) -> None:
    """The bytes reduced and their dtype are the planned ones, on every rank or on none. Raises RunFailed."""
    seen = fleet.exchanged()
    assert seen is not None
    if seen.dtypes != {planned.reduce_dtype} or planned.payload not in (None, seen.bytes):
        found = f"{seen.bytes} bytes in {', '.join(sorted(seen.dtypes))}"
        wanted = f"{planned.payload} bytes in {planned.reduce_dtype}"
        raise RunFailed(f"rank {rank}: a step reduced {found}; the plan says {wanted}")
    if planned.gathered not in (None, seen.gathered):
        found, wanted = f"{seen.gathered} bytes", f"{planned.gathered}"
        raise RunFailed(f"rank {rank}: a step gathered {found} of parameters; the plan says {wanted}")


def _alive(kind: str, model: nn.Module, optimizers: Optimizers, fleet: Fleet) -> int:
    """Bytes that live from step to step on this rank's device. A CPU's own memory is the host's."""
    parameters = [own(p) for p in model.parameters()]
    gradients = [own(p.grad) for p in model.parameters() if p.grad is not None]
    state = [tensor for tensors in optimizers.state().values() for tensor in tensors]
    tables = optimizers.tables
    hosted = 0 if tables is None or kind != "cpu" else tables.state_bytes().get("tables_host", 0)
    return hosted + storage_bytes([*parameters, *gradients, *model.buffers(), *state, *fleet.held()])


def _observer(given: Given, made: Made) -> loop.Observe:
    """What is done after each step."""

    def after(step: int, loss: float, model: nn.Module) -> None:
        if step == given.work.steps // 2:  # under load: when the run is over a card's clocks have fallen
            made.conditions = conditions.seen(given.rank.kind, given.rank.device)
        if given.observe is not None:
            given.observe(step, loss, model)

    return after


def _watched(given: Given, made: Made, fleet: Fleet, take: Take) -> AbstractContextManager[Any]:
    if given.leave is None:
        return nullcontext()
    rank, seconds = given.rank, patience(given.exchange)

    def allowed(work: Work) -> float:
        if rank.kind == "cuda" and work.joint and work.compiles:
            return SETUP_SECONDS  # it may wait for another that compiles, and its collectives have no deadline
        later = rank.kind == "cpu" if work.joint else given.sharded and rank.rank == 0
        return seconds + LEEWAY_SECONDS * later

    def tell(work: Work) -> None:
        at = f"it is in {main_is_at()}; Ctrl-C stops the run after the step, a second one at once"
        made.reporter.say(f"{work.what} has not moved for {seconds:g} s: {at}")

    def excused(work: Work) -> bool:
        return work.compiles or (work.joint and rank.kind == "cpu")  # where ranks wait for each other without computing

    stall = Stall(made.pulse, allowed, excused)
    alone = tell if rank.size == 1 else None  # nobody waits for it, and slow may be what its user wants
    return Watch(given.meeting, made.peers, stall, given.stopping.insisted, take, alone)
