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
from executor.launch import Terminated
from executor.meeting import RankFailed, Word
from executor.state import Given, Made
from executor.watch import keep_stacks, main_is_at

_LATE = re.compile("timed out|timeout", re.I)  # words of a collective whose deadline passed
_LOST = re.compile(f"gloo|nccl|connection|{_LATE.pattern}", re.I)  # and of one whose other end is gone
_WITHIN = "make the plan anew with a smaller --fit, a smaller --batch or a mechanism more (--mechanisms)"
CULPRIT_SECONDS = 3.0
"""A rank that fails by itself says so before its connections close."""


def stopped(given: Given, made: Made, stop: BaseException) -> tuple[str, str]:
    """(outcome, reason) by a signal: the user's to every rank, or torchrun's to those that are left when one fails."""
    name = given.stopping.name or ("SIGTERM" if isinstance(stop, Terminated) else "SIGINT")
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


def hung(given: Given, made: Made, insisted: str | None) -> tuple[str, str]:
    """(outcome, reason) of a run whose own thread hangs on this rank; ``insisted`` is the signal that asked twice."""
    assert made.fleet is not None  # it is watched from then on
    keep_stacks(_traceback_file(given))
    given.meeting.end(Word(made.fleet.waited(), made.fleet.came(), main_is_at(), insisted))
    silence = None if made.peers.gone() else _late(made, made.fleet)
    reason = given.meeting.culprit(CULPRIT_SECONDS, silence)
    if (name := given.meeting.stopped()) is not None and (reason is None or insisted):
        return "stopped", halted(made, name)
    if reason is not None:
        return "failed", reason
    return "failed", (
        f"all ranks: step {made.progress.steps + 1}'s exchange did not end within {made.fleet.deadline:g} s, "
        "though every rank came to it: a device or the link between two hangs (NCCL_P2P_DISABLE=1 may help)"
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
    still = ": its process is stopped (SIGSTOP)" if made.peers.stopped() else ""
    return f"did not come to step {made.progress.steps + 1}'s exchange within {fleet.deadline:g} s{still}"


def _keep_traceback(given: Given, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # the message and the record have the cause
        given.places.run_dir.mkdir(parents=True, exist_ok=True)
        _traceback_file(given).write_text(text, encoding="utf-8")


def _traceback_file(given: Given) -> Path:
    return given.places.run_dir / f"rank-{given.rank.rank}.traceback"
