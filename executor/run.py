"""One run of a plan on one rank: meet, honour, build, smoke, train, record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NoReturn

from executor import causes, early
from executor.clock import Clock
from executor.entry import identity, now
from executor.finish import finish
from executor.fleet import abandon
from executor.hold import Hold
from executor.honour import BadRank
from executor.launch import Terminated
from executor.loop import Observe, RunFailed, Stopped
from executor.meeting import meet
from executor.pulse import Work
from executor.slices import data_slice, exchange_slice, rank_slice, work_slice
from executor.start import start
from executor.state import Given, Made, Outcome, Places
from executor.stopping import Stopping, undisturbed
from executor.training import train
from executor.watch import Peers
from planner.refusals.rules import Refused
from schemas.form import Json

__all__ = ["Outcome", "Places", "execute"]


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
    given = _given(plan, places, int(os.environ.get("RANK", "0")), observe, leave)
    with given.hold, given.stopping.listening():
        return _run(given, Made(identity(given.start), Peers(given.rank.rank, [])))


def _given(
    plan: Mapping[str, Json],
    places: Places,
    number: int,
    observe: Observe | None,
    leave: Callable[[Outcome], NoReturn] | None,
) -> Given:
    began, rank = now(), rank_slice(plan, number)
    work, data, exchange = work_slice(plan), data_slice(plan, number), exchange_slice(plan)
    meeting, store = meet(number, rank.size)
    return Given(
        plan, places, observe, leave, began, rank, work, data, exchange, Clock(rank.kind), meeting, store,
        Stopping(meeting.anyone_ended), Hold(),
        new_record=places.record is not None and not os.path.lexists(places.record),
    )  # fmt: skip


def _run(given: Given, made: Made) -> Outcome:
    outcome, reason, agreed = "finished", None, True
    try:
        built = start(given, made)
        train(given, made, built, lambda stopped, stalled: _taken(given, made, stopped, stalled))
    except (Refused, BadRank):
        given.meeting.leave()
        abandon()
        raise
    except RunFailed as error:
        with undisturbed():
            outcome, reason, agreed = "failed", str(error), causes.closed(given, made)
    except Stopped:
        with undisturbed():
            reason = causes.halted(made, given.stopping.name or "a signal")
            outcome, agreed = "stopped", causes.closed(given, made)
    except (KeyboardInterrupt, Terminated) as stop:
        with undisturbed():
            (outcome, reason), agreed = causes.stopped(given, made, stop), False
    except (Exception, SystemExit) as error:  # told, recorded, kept with its traceback: nothing is swallowed
        with undisturbed():
            (outcome, reason), agreed = causes.ended_by(given, made, error), False
    return finish(given, made, outcome, reason, agreed)


def _taken(given: Given, made: Made, stopped: str | None, stalled: Work | None) -> None:
    """End this rank, whose own thread hangs, from beside; ``stopped`` is the signal that asked for it twice."""
    assert given.leave is not None
    outcome, reason = causes.hung(given, made, stopped, stalled)
    given.leave(finish(given, made, outcome, reason, False, hangs=True))
