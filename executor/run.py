"""One run of a plan on one rank: meet, honour, build, smoke, train, record."""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn

from executor import build, checkpoint, conditions, early, honour, measured, resume, smoke, trial
from executor.account import source_digest
from executor.clock import Clock
from executor.entry import compose, identity, keep, now
from executor.files import DataChanged
from executor.fleet import Alone, Fleet, Forward, Ranks, abandon, fingerprint
from executor.hold import Hold, InUse
from executor.launch import Terminated
from executor.loop import Observe, Progress, RunFailed, Stopped, Training, train
from executor.meeting import RankFailed, Word, meet
from executor.meter import Meter
from executor.models.presets import TINY
from executor.optim.routing import Routed, rows_of, split
from executor.parts import own
from executor.peaks import pressure, probe, storage_bytes
from executor.reporter import METRICS, Mute, Reporter, Teller
from executor.slices import data_slice, exchange_slice, rank_slice, work_slice
from executor.stopping import Stopping
from executor.watch import PATIENCE_SECONDS, Peers, Watch, keep_stacks, main_is_at, within
from executor.watch import identity as own_process
from planner.door import BadWorkload
from planner.refusals.rules import Refused
from schemas.form import Json, Unfaithful
from schemas.store import unrecordable_reason

if TYPE_CHECKING:
    from executor.sharded import Sharded

AnyRanks = TypeVar("AnyRanks", bound=Ranks)

_LATE = re.compile("timed out|timeout", re.I)  # words of a collective whose deadline passed
_LOST = re.compile(f"gloo|nccl|connection|{_LATE.pattern}", re.I)  # and of one whose other end is gone
_CULPRIT_SECONDS = 3.0  # a rank that fails by itself says so before its connections close
_GATHER_SECONDS = 20.0  # ranks that left the loop together come within a moment, or not at all
_GIVEN_SECONDS = PATIENCE_SECONDS + 1.5  # and those that end each by itself leave what they measured, or not at all
_CONDITIONS = "conditions"  # beside what a rank measured
_READ_SECONDS = 2.0  # what a card whose queue hangs has to answer


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
    which a failed run can go on."""

    outcome: str
    reason: str | None
    agreed: bool
    speaks: bool
    model: nn.Module
    entry: dict[str, Json] | None = None
    notice: str | None = None
    newest: int | None = None


def execute(
    plan: Mapping[str, Json],
    places: Places,
    *,
    observe: Observe | None = None,
    leave: Callable[[Outcome], NoReturn] | None = None,
) -> Outcome:
    """Run this process's rank of ``plan``, by RANK and WORLD_SIZE of the environment.

    Args:
        observe: told (step, the fleet's loss, the model) after each step.
        leave: ends the process. With it, a rank of several that hangs is ended from beside, in another thread, and
            the one that tells the end ends those that no longer hear.

    Raises:
        Refused: the plan cannot be honoured here; every rank raises it.
        BadRank: a fault of the user (data, model); every rank raises it.
    """
    found = int(os.environ.get("WORLD_SIZE", "1"))
    refusals = early.refusals(plan, found)
    if refusals:
        raise Refused(refusals)
    return _Run(plan, places, int(os.environ.get("RANK", "0")), observe, leave).run()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without signals: torchrun sends SIGTERM to the ranks that are left as soon as one of a failed run has gone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """The parts of one run as they come to be; each is made from its slice of the plan."""

    def __init__(
        self,
        plan: Mapping[str, Json],
        places: Places,
        rank: int,
        observe: Observe | None,
        leave: Callable[[Outcome], NoReturn] | None,
    ) -> None:
        self.plan, self.places, self.observe, self.leave, self.start = plan, places, observe, leave, now()
        self.name = identity(self.start)
        self.rank, self.work = rank_slice(plan, rank), work_slice(plan)
        self.data, self.exchange = data_slice(plan, rank), exchange_slice(plan)
        self.progress, self.clock = Progress(), Clock(self.rank.kind)
        self.reporter: Reporter = Mute()
        self.rows: list[Json] = []
        self.ran: dict[str, Json] = {}
        self.meter: Meter | None = None
        self.conditions: dict[str, Json] = {}
        self.meeting, self.store = meet(rank, self.rank.size)
        self.stopping = Stopping(self.meeting.anyone_ended)
        self.keeper: resume.Keeper | None = None
        self.hold = Hold()
        self.new_record = places.record is not None and not os.path.lexists(places.record)
        self.peers = Peers(rank, [])
        self.failed = False
        self.sharded = self.exchange.shard == "fsdp"
        self.print: str | None = None  # the trained model's fingerprint, where no rank alone could tell it
        self.unkept: str | None = None  # why the trained model could not be kept

    def run(self) -> Outcome:
        with self.hold, self.stopping.listening():
            return self._run()

    def _run(self) -> Outcome:
        outcome, reason, agreed = "finished", None, True
        try:
            self._honour()
            self._train()
        except (Refused, honour.BadRank):
            self.meeting.leave()
            abandon()
            raise
        except RunFailed as error:
            with _undisturbed():
                outcome, reason, agreed = "failed", str(error), self._closed()
        except Stopped:
            with _undisturbed():
                outcome, reason, agreed = "stopped", self._halted(self.stopping.name or "a signal"), self._closed()
        except (KeyboardInterrupt, Terminated) as stop:
            with _undisturbed():
                outcome, reason, agreed = self._stopped(stop)
        except (Exception, SystemExit) as error:  # told, recorded, kept with its traceback: nothing is swallowed
            with _undisturbed():
                (outcome, reason), agreed = self._ended_by(error), False
        return self._finish(outcome, reason, agreed)

    def _honour(self) -> None:
        """Gather facts, judge, build, smoke, judge. No process group yet: it comes when the plan is honoured."""
        row = honour.own_facts(self.plan["seal"]["digest"], self.rank, self._open)
        mine = {**row, "run": self.name, "process": own_process(), "held": self._held(), **self._lying()}
        self.rows = honour.agree(self.plan, self.meeting, mine, self._unrecordable())
        self.peers = Peers(self.rank.rank, [row["process"] for row in self.rows])
        self.name = self.rows[0]["run"]  # one name, whichever rank records it
        self.ran = self._smoke()
        honour.agree_on_smoke(self.plan, self.meeting, self.ran)

    def _held(self) -> str | None:
        """Why another run is under way where this one would be recorded or leave its metrics; rank 0 asks for all."""
        if self.rank.rank != 0:
            return None
        places = [self.places.run_dir / METRICS]
        places += [] if self.places.record is None else [self.places.record]
        return next(filter(None, map(self.hold.take, places)), None)

    def _lying(self) -> dict[str, Json]:
        """What rank 0 finds in the run's folder: a checkpoint to go on from, where that is asked for, and the room for
        those to come, where any are planned."""
        if self.rank.rank != 0:
            return {"resume": None, "room": None}
        found = resume.newest(self.places.run_dir) if self.places.resume else None
        line = found["chosen"]["line"] if found is not None and found["chosen"] is not None else None
        room = resume.room(self.places.run_dir, line) if self.work.config.get("checkpoint_every", 0) else None
        return {"resume": found, "room": room}

    def _unrecordable(self) -> str | None:
        try:
            return None if self.places.record is None else unrecordable_reason(self.places.record, self.plan)
        except Unfaithful as error:
            return str(error)

    def _smoke(self) -> dict[str, Json]:
        self.device = build.device_of(self.rank.kind)
        try:
            build.settle(self.model, self.rank, self.sharded)
            sharing = self._sharing() if self.sharded else None
            rows = None if sharing is None else self._share(sharing)
            self.optimizers = build.optimizers(self.model, self.work, self.rank, self.exchange.owners, rows)
        except (BadWorkload, torch.OutOfMemoryError) as error:
            self.meeting.stumble()
            return smoke.failed(self.rank.rank, error)
        if sharing is not None:
            return self._launch_together(sharing)
        return smoke.launch(self.rank.rank, self.model, *self._first_batch(), self.rank.dtype)

    def _sharing(self) -> Sharded:
        """The fleet of ranks that share the model: it comes before the smoke launch, which needs it."""
        from executor.sharded import Sharded  # FSDP2's import takes a second

        sharing = self._met(Sharded)
        self.fleet: Fleet = sharing
        return sharing

    def _share(self, sharing: Sharded) -> Routed:
        """Shard the model over the ranks; gives this rank's rows by route."""
        try:
            return rows_of(split(self.model, self.work.opt), lambda: sharing.shard(self.model))
        except ValueError as error:
            raise BadWorkload(f"the plan's model {self.work.model}: {error}") from None

    def _launch_together(self, sharing: Sharded) -> dict[str, Json]:
        """The smoke launch of ranks that compute together: one that fails lets the others know, which would wait."""
        with sharing.launching(self.meeting.anyone_stumbled) as arrive:
            row = smoke.launch(self.rank.rank, self.model, *self._first_batch(), self.rank.dtype, arrive)
        if row["error"] is not None:
            self.meeting.stumble()
        return {**row, "lost": sharing.lost}

    def _open(self) -> dict[str, Json]:
        """Open the data and build the model: this rank's facts of both. Raises BadPlace, BadData and BadWorkload."""
        if self.rank.rank == 0:
            build.require_folder(self.places.run_dir)
        corpora = build.open_corpora(self.data.sources, self.places.data)
        self.reader = build.reader(corpora, self.data)
        self.workload, self.model = build.model(self.work, dict(self.rank.kernels))
        if self._keeps_model():
            self._require_room()
        digest = honour.workload_facts(self.workload, self.model, self.work.opt)
        return {"data": honour.data_facts(corpora), "workload_digest": digest}

    def _require_room(self) -> None:
        """Raises BadPlace or BadWorkload where the trained model could not be kept: better now than after the run."""
        try:
            reason = checkpoint.no_room_reason(self.places.run_dir, self.model)
        except checkpoint.BadCheckpoint as error:
            raise BadWorkload(f"the plan's model {self.work.model}: {error}") from None
        if reason is not None:
            raise build.BadPlace(f"--run-dir {self.places.run_dir}: {reason}")

    def _first_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.reader.batch(0, self.data.global_batch, self.data.offset, self.data.batch, self.data.seq)
        return inputs.to(self.device), targets.to(self.device)

    def _train(self) -> None:
        if not self.sharded:
            self.fleet = self._fleet()
        forward: Forward = self.fleet.prepare(self.model, self.optimizers)
        if self.rank.size > 1 and not self.sharded:
            self.fleet.begin()
            smoke.build_buckets(forward, self.model, *self._first_batch(), self.rank.dtype)
        if self.rank.size > 1:
            self._check_reduced()
        if self.rank.rank == 0:
            self.reporter = Teller(self.places.run_dir, self.work.config["log_every"], self.name, self.start)
            held = self._held()  # the metrics are there only now where this is the folder's first run
            if held is not None:
                raise InUse(held)
            if self.rank.size > 1:
                self.reporter.say(self._rungs())
            found = self.fleet.tried()
            slow = None if found is None else trial.crawl(found, self.exchange)
            if slow is not None:
                self.reporter.say(slow)
        self.keeper = self._go_on()
        done = self.progress.steps
        watch = probe(self.rank.kind, self.work.steps - done, self._alive)
        first = self.work.config["warmup_steps_unmeasured"]
        self.meter = Meter(self.clock, watch, first, self.fleet.exchanged, done)
        parts = Training(
            self.model, forward, self.optimizers, self.fleet, self.reader, self.meter, self.reporter,
            self.rank.dtype, self.device, self.stopping, self.keeper.save,
        )  # fmt: skip
        self.fleet.wait()
        with self.stopping.training(), self._watched(self.meter):
            train(parts, self.work, self.data, self.progress, self._after)
        if self.sharded:
            self._leave_together()
        self.fleet.close()

    def _after(self, step: int, loss: float, model: nn.Module) -> None:
        """What is done after each step."""
        if step == self.work.steps // 2:  # under load: when the run is over a card's clocks have fallen
            self.conditions = conditions.seen(self.rank.kind, self.rank.device)
        if self.observe is not None:
            self.observe(step, loss, model)

    def _watched(self, meter: Meter) -> AbstractContextManager[Any]:
        if self.leave is None:
            return nullcontext()
        deadline = self.fleet.deadline if self.rank.kind == "cuda" and self.rank.size > 1 else None
        return Watch(
            self.meeting, self.peers, lambda: meter.under_way, self.stopping.insisted, deadline, self._taken
        )  # fmt: skip

    def _taken(self, stopped: str | None) -> None:
        """End this rank, whose own thread hangs, from beside; ``stopped`` is the signal that asked for it twice."""
        assert self.leave is not None
        keep_stacks(self._traceback_file())
        self.meeting.end(Word(self.fleet.waited(), self.fleet.came(), main_is_at(), stopped))
        silence = None if self.peers.gone() else self._late()
        outcome, reason = "failed", self.meeting.culprit(_CULPRIT_SECONDS, silence)
        if (name := self.meeting.stopped()) is not None and (reason is None or stopped):
            outcome, reason = "stopped", self._halted(name)
        elif reason is None:
            reason = (
                f"all ranks: step {self.progress.steps + 1}'s exchange did not end within {self.fleet.deadline:g} s, "
                "though every rank came to it: a device or the link between two hangs (NCCL_P2P_DISABLE=1 may help)"
            )
        self.leave(self._finish(outcome, reason, False, hangs=True))

    def _leave_together(self) -> None:
        """What the end of a run takes of the whole model, while all ranks that hold parts of it are there."""
        self.print = fingerprint(self.model)
        if self._keeps_model():
            self.unkept = self._keep_model()
        elif self.work.config.get("keep_model", "final") == "final":
            checkpoint.accompany(checkpoint.tensors_of(self.model))

    def _go_on(self) -> resume.Keeper:
        """From the checkpoint that rank 0 chose, where one was asked for; gives what keeps those to come."""
        found = self.rows[0]["resume"]
        chosen = None if found is None else found["chosen"]
        line, steps = (self.name, None) if chosen is None else (chosen["line"], chosen["steps"])
        keeper = resume.Keeper(
            self.places.run_dir, line, self.work.config.get("keep_checkpoints", 2), self.rank.rank, self.meeting,
            self.stopping, self.model, self.optimizers, self.device, {**self._facts(), "ranks": self.rank.size},
            self.sharded, steps,
        )  # fmt: skip
        if chosen is None:
            lying = resume.lying(self.places.run_dir) if self.rank.rank == 0 else None
            if lying is not None:
                self.reporter.say(f"starting anew; --resume would go on from {lying}")
            return keeper
        folder = self.places.run_dir / resume.FOLDER / chosen["name"]
        for passed in found["passed"]:
            self.reporter.say(f"passing over a checkpoint that is not whole: {passed}")
        self.reporter.say(f"going on after step {chosen['steps']} from {folder}")
        self.progress = resume.restore(folder, self.rank.rank, self.model, self.optimizers, self.device, self.sharded)
        return keeper

    def _fleet(self) -> Fleet:
        return Alone() if self.rank.size == 1 else self._met(Ranks)

    def _met(self, kind: type[AnyRanks]) -> AnyRanks:
        """The ranks together over their link, which is tried. Raises LinkFailed."""
        watched = self.leave is not None
        return trial.made(
            trial.SECONDS,
            lambda: kind(self.rank, self.data.token_weight, self.exchange, self.clock, self.store, watched),
        )

    def _rungs(self) -> str:
        """What each rank computes in, alike ones together, and what gradients are reduced in."""
        alike: dict[str, list[str]] = {}
        for rank, row in enumerate(self.rows):
            name = row["device"].get("name") or "a device that tells no name"
            alike.setdefault(f"{rank_slice(self.plan, rank).dtype} on {name}", []).append(str(rank))
        each = (f"rank{'s' * (len(found) > 1)} {', '.join(found)} in {what}" for what, found in alike.items())
        return f"starting: {'; '.join(each)}; gradients are reduced in {self.exchange.reduce_dtype}"

    def _check_reduced(self) -> None:
        """The bytes reduced and their dtype are the planned ones, on every rank or on none. Raises RunFailed."""
        seen, planned = self.fleet.exchanged(), self.exchange
        assert seen is not None
        if seen.dtypes != {planned.reduce_dtype} or planned.payload not in (None, seen.bytes):
            found = f"{seen.bytes} bytes in {', '.join(sorted(seen.dtypes))}"
            wanted = f"{planned.payload} bytes in {planned.reduce_dtype}"
            raise RunFailed(f"rank {self.rank.rank}: a step reduced {found}; the plan says {wanted}")
        if planned.gathered not in (None, seen.gathered):
            found, wanted = f"{seen.gathered} bytes", f"{planned.gathered}"
            raise RunFailed(f"rank {self.rank.rank}: a step gathered {found} of parameters; the plan says {wanted}")

    def _alive(self) -> int:
        """Bytes that live from step to step on this rank's device. A CPU's own memory is the host's."""
        parameters = [own(p) for p in self.model.parameters()]
        gradients = [own(p.grad) for p in self.model.parameters() if p.grad is not None]
        state = [tensor for tensors in self.optimizers.state().values() for tensor in tensors]
        tables = self.optimizers.tables
        hosted = 0 if tables is None or self.rank.kind != "cpu" else tables.state_bytes().get("tables_host", 0)
        return hosted + storage_bytes([*parameters, *gradients, *self.model.buffers(), *state, *self.fleet.held()])

    def _stopped(self, stop: BaseException) -> tuple[str, str, bool]:
        """A signal: the user's to every rank, or torchrun's to those that are left when one fails."""
        name = self.stopping.name or ("SIGTERM" if isinstance(stop, Terminated) else "SIGINT")
        self.meeting.end(Word(stopped=name))
        self._abandon()
        culprit = self.meeting.culprit(_CULPRIT_SECONDS)
        if culprit is not None:
            return "failed", culprit, False
        return "stopped", self._halted(name), False

    def _halted(self, name: str) -> str:
        """Why and where the run stopped, and from where it can go on."""
        kept = None if self.keeper is None else self.keeper.newest
        on = "" if kept is None else f"; --resume goes on after step {kept}"
        return f"{name} after {self.progress.steps} steps{on}"

    def _ended_by(self, error: BaseException) -> tuple[str, str]:
        """(outcome, reason) of a run that ended by ``error`` on this rank: the cause of the rank that failed first,
        where this one only lost its connection, or the signal that another one left at."""
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
        own = f"rank {self.rank.rank}: {text}"
        if isinstance(error, trial.LinkFailed):
            self.meeting.fail(str(error).partition(": ")[2])
            return "failed", str(error)  # to take a group down whose connections hang would hang too
        if isinstance(error, RankFailed):
            own = str(error)
            self.meeting.end()
        elif isinstance(error, DataChanged | InUse):
            own = f"rank {self.rank.rank}: {error}"
            self._fail(str(error))
        elif self.rank.size > 1 and isinstance(error, RuntimeError) and _LOST.search(text):
            culprit, name = self._who_was_lost(text), self.meeting.stopped()
            if culprit is None and name is not None:
                return "stopped", self._halted(name)
            own = culprit or own
        elif (first := self._first_to_fail()) is not None:
            own = first
            self.meeting.end()
            self._keep_traceback(error)
        else:
            self._fail(text)
            self._keep_traceback(error)
        self._abandon()
        return "failed", own

    def _fail(self, cause: str) -> None:
        self.failed = True
        self.meeting.fail(cause)

    def _first_to_fail(self) -> str | None:
        """The rank that failed before this one did, which may be why: a card whose peer is gone raises errors of its
        own."""
        gone = self.peers.gone()
        return self.meeting.culprit() or (f"rank {gone[0]}: is gone and left no word" if gone else None)

    def _abandon(self) -> None:
        if self.rank.kind != "cuda":  # there it could wait for a peer that is gone; the process ends soon anyway
            abandon()

    def _who_was_lost(self, text: str) -> str | None:
        """The rank that another end of a broken collective (its error is ``text``) belonged to."""
        self.meeting.end(Word(self.fleet.waited(), self.fleet.came()) if hasattr(self, "fleet") else Word())
        return self.meeting.culprit(_CULPRIT_SECONDS, self._late() if _LATE.search(text) else None)

    def _late(self) -> str:
        still = ": its process is stopped (SIGSTOP)" if self.peers.stopped() else ""
        return f"did not come to step {self.progress.steps + 1}'s exchange within {self.fleet.deadline:g} s{still}"

    def _closed(self) -> bool:
        """Leave the fleet after a failure that all ranks agreed on; whether all were still there to."""
        try:
            self.fleet.close()
        except RuntimeError:
            self.meeting.end()
            return False
        return True

    def _keep_traceback(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the message and the record have the cause
            self.places.run_dir.mkdir(parents=True, exist_ok=True)
            self._traceback_file().write_text(text, encoding="utf-8")

    def _traceback_file(self) -> Path:
        return self.places.run_dir / f"rank-{self.rank.rank}.traceback"

    def _finish(self, outcome: str, reason: str | None, agreed: bool, hangs: bool = False) -> Outcome:
        """Gather what every rank measured (where they are still there), and record it on one rank, undisturbed.

        ``hangs``: this rank's own thread does, and its device may.
        """
        with _undisturbed():
            mine = within(_READ_SECONDS, self._measured) if hangs else self._measured()
            gathered = self._gathered(mine) if agreed else None
            keeps = outcome == "finished" and self._keeps_model() and not self.sharded
            lost = self._keep_model() if keeps else self.unkept
            self.reporter.close()
            if gathered is None:
                self.meeting.give(mine)
            speaks = self.rank.rank == 0 if gathered is not None else self.meeting.speaks(_CULPRIT_SECONDS)
            entry, notice = None, lost
            if speaks:
                entry = self._entry(
                    outcome, reason, {**self._given(), self.rank.rank: mine} if gathered is None else gathered
                )
                if self.places.record is not None:
                    unkept = keep(self.plan, self.places.record, self.places.run_dir, entry, self.new_record)
                    notice = "; it ".join(filter(None, (notice, unkept))) or None
                if gathered is None and self.leave is not None:
                    self.peers.kill(self.meeting.silent())
            model = getattr(self, "model", nn.Module())
            newest = self.keeper.newest if self.keeper is not None and outcome == "failed" else None
            return Outcome(outcome, reason, gathered is not None, speaks, model, entry, notice, newest)

    def _given(self) -> dict[int, Json]:
        """What the other ranks measured that end each by itself; those that hear of it late where this one failed."""
        return self.meeting.given(_GIVEN_SECONDS, self.peers.living() if self.failed and self.leave is not None else ())

    def _keeps_model(self) -> bool:
        """Whether this rank leaves the trained model. A plan from before there was the choice always does."""
        return self.rank.rank == 0 and self.work.config.get("keep_model", "final") == "final"

    def _keep_model(self) -> str | None:
        """Leave the trained model in the run's folder; why it could not be, where it could not."""
        folder = self.places.run_dir / checkpoint.FINAL
        try:
            checkpoint.save(folder, self.model, {**self._facts(), "steps": self.progress.steps})
        except Exception as error:  # told with the outcome: whatever it is, the run must still be recorded
            return f"left no model in {folder} ({type(error).__name__}: {error})"
        self.reporter.say(f"the model is in {folder}")
        return None

    def _facts(self) -> dict[str, Json]:
        """What a checkpoint says of its model, its plan and its run."""
        return {
            "model": self.work.model,
            "opt": self.work.opt,
            "seed": self.work.seed,
            "config": dict(self.work.config),
            "kernels": dict(self.rank.kernels),
            "dtype": self.rank.dtype,
            "plan": self.plan["seal"]["digest"],
            "id": self.name,
            "data": self.rows[0]["data"],
        }

    def _gathered(self, mine: Json) -> dict[int, Json] | None:
        """What each rank measured; None where a rank is gone that had agreed on the end."""
        try:
            found = self.meeting.gather(mine, _GATHER_SECONDS)
        except RankFailed:
            self.meeting.end()
            return None
        self.meeting.leave()
        return dict(enumerate(found))

    def _entry(self, outcome: str, reason: str | None, ranks: Mapping[int, Json]) -> dict[str, Json]:
        seen = {rank: {**rows} for rank, rows in ranks.items() if rows is not None}
        found = conditions.of_ranks({rank: rows.pop(_CONDITIONS) for rank, rows in seen.items()})
        lines = measured.lines(self.plan, seen, f"the run {outcome} before the rank gave its measurements")
        return compose(
            self.name, self.start, outcome, reason, self.progress,
            (self.print or fingerprint(self.model)) if outcome == "finished" else None,
            self.rows, self._source(), found | pressure(self.rank.kind), *lines, self._resumed(),
        )  # fmt: skip

    def _resumed(self) -> dict[str, Json] | None:
        found = self.rows[0]["resume"] if self.rows else None
        return None if found is None else {key: found["chosen"][key] for key in ("id", "steps")}

    def _measured(self) -> dict[str, Json] | None:
        if self.meter is None:
            return None
        state = measured.state_bytes(self.model, self.optimizers)
        seen = measured.Seen(
            self.rank,
            self.data,
            self.meter.samples,
            self.clock.instrument,
            self.meter.probe.peaks,
            state,
            self.ran,
            self.fleet.tried(),
        )
        return {**measured.of_rank(seen), _CONDITIONS: self.conditions}

    def _source(self) -> str:
        # Before the plan's workload is known, the digest is of the executor alone, as a preset's is.
        return source_digest(getattr(self, "workload", TINY))
