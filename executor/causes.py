"""Why a run ended: by a signal, by this rank's own fault, or by that of the rank that failed first, which is named.
What another rank needs to know of this one's end is left as its word."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from executor import trial
from executor.files import DataChanged
from executor.fleet import Fleet, abandon
from executor.guest import named
from executor.hold import InUse
from executor.launch import name_of
from executor.meeting import RankFailed, Word
from executor.pulse import Work
from executor.state import Given, Made
from executor.watch import keep_stacks, main_is_at, within

_LATE = re.compile("timed out|timeout", re.I)  # words of a collective whose deadline passed
_LOST = re.compile(f"gloo|nccl|connection|{_LATE.pattern}", re.I)  # and of one whose other end is gone
_WITHIN = "make the plan anew with a smaller --fit, a smaller --batch or a mechanism more (--mechanisms)"
_NO_PYTHON = ": it hangs where its Python cannot run"
_STACKS_SECONDS = 1.0
CULPRIT_SECONDS = 3.0
"""A rank that fails by itself says so before its connections close."""


def stopped(given: Given, made: Made, stop: BaseException) -> tuple[str, str]:
    """(outcome, reason) by a signal: the user's to every rank, or torchrun's to those that are left when one fails."""
    name = given.stopping.name or name_of(stop)
    given.meeting.end(Word(stopped=name))
    _abandon(given)
    culprit = given.meeting.culprit(CULPRIT_SECONDS)
    return ("stopped", halted(made, name)) if culprit is None else ("failed", culprit)


def halted(made: Made, name: str) -> str:
    """Why and where the run stopped, and from where it can go on."""
    newest = None if made.keeper is None else made.keeper.newest
    on = "" if newest is None else f"; --resume goes on after step {newest}"
    return f"{name} after {made.progress.steps} steps{on}"


def ended_by(given: Given, made: Made, error: BaseException) -> tuple[str, str]:
    """(outcome, reason) of a run that ended by ``error`` on this rank: the cause of the rank that failed first,
    where this one only lost its connection, or the signal that another one left at."""
    text = named(error)
    if isinstance(error, torch.OutOfMemoryError):
        text = f"{text.rstrip('.')}; {_WITHIN}"
    own = f"rank {given.rank.rank}: {text}"
    if isinstance(error, trial.LinkFailed):
        given.meeting.fail(str(error).partition(": ")[2])
        return "failed", str(error)  # to take a group down whose connections hang would hang too
    if isinstance(error, RankFailed):
        own = str(error)
        given.meeting.end()
    elif isinstance(error, DataChanged | InUse):
        own = f"rank {given.rank.rank}: {error}"
        _fail(given, made, str(error))
    elif given.rank.size > 1 and isinstance(error, RuntimeError) and _LOST.search(text):
        culprit, name = _who_was_lost(given, made, text), given.meeting.stopped()
        if culprit is None and name is not None:
            return "stopped", halted(made, name)
        own = culprit or own
    elif (first := _first_to_fail(given, made)) is not None:
        own = first
        given.meeting.end()
        _keep_traceback(given, error)
    else:
        _fail(given, made, text)
        _keep_traceback(given, error)
    _abandon(given)
    return "failed", own


def hung(given: Given, made: Made, insisted: str | None, stalled: Work | None) -> tuple[str, str]:
    """(outcome, reason) of a run whose own thread hangs on this rank; ``insisted`` is the signal that asked twice,
    ``stalled`` the work that does not go on: this rank's own fault where no other is in it."""
    assert made.fleet is not None  # it is watched from then on
    at, own = main_is_at(), stalled is not None and not stalled.joint and insisted is None
    if stalled is not None and own and _first_to_fail(given, made) is None:
        told = f"{stalled.what} has not moved for {made.fleet.deadline:g} s: it hangs in {at}"
        _fail(given, made, told)
        _keep_stacks(given)
        return "failed", f"rank {given.rank.rank}: {told}"
    given.meeting.end(Word(made.fleet.waited(), made.fleet.came(), at, insisted))
    _keep_stacks(given)
    late = _late(made, made.fleet)
    silence = late if made.pulse.work is not None else f"gives no sign of life{_stopped(made) or _NO_PYTHON}"
    reason = given.meeting.culprit(CULPRIT_SECONDS, None if made.peers.gone() else silence, late)
    if (name := given.meeting.stopped()) is not None and (reason is None or insisted):
        return "stopped", halted(made, name)
    if reason is not None:
        return "failed", reason
    return "failed", (
        f"all ranks: {_exchange(made)} did not end within {made.fleet.deadline:g} s, though every rank came as far: "
        f"a device or the link between two hangs (NCCL_P2P_DISABLE=1 may help); rank {given.rank.rank} is in {at}"
    )


def closed(given: Given, made: Made) -> bool:
    """Leave the fleet after a failure that all ranks agreed on; whether all were still there to."""
    assert made.fleet is not None  # by which they agreed
    try:
        made.fleet.close()
    except RuntimeError:
        given.meeting.end()
        return False
    return True


def _fail(given: Given, made: Made, cause: str) -> None:
    made.failed = True
    given.meeting.fail(cause)


def _first_to_fail(given: Given, made: Made) -> str | None:
    """The rank that failed before this one did, which may be why: a card whose peer is gone raises errors of its
    own."""
    gone = made.peers.gone()
    return given.meeting.culprit() or (f"rank {gone[0]}: is gone and left no word" if gone else None)


def _abandon(given: Given) -> None:
    if given.rank.kind != "cuda":  # there it could wait for a peer that is gone; the process ends soon anyway
        abandon()


def _who_was_lost(given: Given, made: Made, text: str) -> str | None:
    """The rank that another end of a broken collective (its error is ``text``) belonged to."""
    fleet = made.fleet
    given.meeting.end(Word() if fleet is None else Word(fleet.waited(), fleet.came()))
    silence = _late(made, fleet) if fleet is not None and _LATE.search(text) else None
    return given.meeting.culprit(CULPRIT_SECONDS, silence)


def _late(made: Made, fleet: Fleet) -> str:
    return f"did not come to {_exchange(made)} within {fleet.deadline:g} s{_stopped(made)}"


def _stopped(made: Made) -> str:
    return ": its process is stopped (SIGSTOP)" if made.peers.stopped() else ""


def _exchange(made: Made) -> str:
    """What the ranks have to come to; where this one is in no work, it waits for the others to be done with theirs."""
    return "where the others wait" if made.pulse.work is None else f"{made.pulse.work.what}'s exchange"


def _keep_traceback(given: Given, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # the message and the record have the cause
        given.places.run_dir.mkdir(parents=True, exist_ok=True)
        _traceback_file(given).write_text(text, encoding="utf-8")


def _keep_stacks(given: Given) -> None:
    within(_STACKS_SECONDS, lambda: keep_stacks(_traceback_file(given)))  # it may be the disk that hangs


def _traceback_file(given: Given) -> Path:
    return given.places.run_dir / f"rank-{given.rank.rank}.traceback"
