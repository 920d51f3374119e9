"""The end of a run, whatever its cause: what the ranks measured is gathered, one of them speaks for all, and the run is
recorded, undisturbed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from executor import causes, conditions, kept, measured
from executor.account import source_digest
from executor.checkpoint import FINAL
from executor.entry import aside, compose, keep
from executor.fingerprints import fingerprint
from executor.fleet import patience
from executor.meeting import Meeting, RankFailed
from executor.peaks import pressure
from executor.state import Given, Made, Outcome
from executor.stopping import undisturbed
from executor.watch import PATIENCE_SECONDS, Stall, while_it_moves, within
from schemas.form import Json

_GATHER_SECONDS = 20.0  # ranks that left the loop together come within a moment, or not at all
_GIVEN_SECONDS = PATIENCE_SECONDS + 1.5  # and those that end each by itself leave what they measured, or not at all
_CONDITIONS = "conditions"  # beside what a rank measured
_READ_SECONDS = 2.0  # what a card whose queue hangs has to answer
_RECORD_SECONDS = 6.0  # for a file of some hundred thousand bytes


def finish(given: Given, made: Made, outcome: str, reason: str | None, agreed: bool, hangs: bool = False) -> Outcome:
    """Gather what every rank measured (where they are still there), and record it on one rank, undisturbed.

    ``hangs``: this rank's own thread does, and its device may.
    """
    given.stopping.take()  # signals do not disturb what comes after the recording either: what trained is freed then
    with undisturbed():
        mine = within(_READ_SECONDS, lambda: _measured(given, made)) if hangs else _measured(given, made)
        gathered = _gathered(given.meeting, mine) if agreed else None
        keeps = outcome == "finished" and kept.keeps_model(given) and not given.sharded
        notice = _keep_model(given, made) if keeps else made.unkept
        within(_READ_SECONDS, made.reporter.close)  # a disk that hangs was not to be waited for
        if gathered is None:
            given.meeting.give(mine)
        speaks = given.rank.rank == 0 if gathered is not None else given.meeting.speaks(causes.CULPRIT_SECONDS)
        entry = None
        if speaks:
            ranks = {**_left(given, made), given.rank.rank: mine} if gathered is None else gathered
            entry = _entry(given, made, outcome, reason, ranks)
            if given.places.record is not None:
                unkept = _keep(given, given.places.record, entry, outcome)
                notice = "; it ".join(filter(None, (notice, unkept))) or None
            if gathered is None and given.leave is not None:
                made.peers.kill(given.meeting.silent())
        newest = made.keeper.newest if made.keeper is not None and outcome == "failed" else None
        return Outcome(outcome, reason, gathered is not None, speaks, made.model, entry, notice, newest, given.store)


def _keep_model(given: Given, made: Made) -> str | None:
    """Leave the trained model, as long as that goes on; why it could not be left."""
    seconds = patience(given.exchange)
    found = while_it_moves(Stall(made.pulse, lambda _: seconds), lambda: (kept.keep_model(given, made),))
    folder = given.places.run_dir / FINAL
    return f"left no model in {folder} (nothing of it was written for {seconds:g} s)" if found is None else found[0]


def _keep(given: Given, record: Path, entry: dict[str, Json], outcome: str) -> str | None:
    """Record ``entry``; what has to be told of that. A run that failed may have failed by a disk that hangs."""
    job = partial(keep, given.plan, record, given.places.run_dir, entry, given.new_record)
    if outcome != "failed":
        return job()
    found = within(_RECORD_SECONDS, lambda: (job(),))
    if found is not None:
        return found[0]
    elsewhere = [Path(tempfile.gettempdir())]
    kept = within(_READ_SECONDS, lambda: aside(given.plan, record, elsewhere, entry)) or "nor elsewhere"
    return f"could not be recorded in {record} within {_RECORD_SECONDS:g} s; {kept}"


def _gathered(meeting: Meeting, mine: Json) -> dict[int, Json] | None:
    """What each rank measured; None where a rank is gone that had agreed on the end."""
    try:
        found = meeting.gather(mine, _GATHER_SECONDS)
    except RankFailed:
        meeting.end()
        return None
    meeting.leave()
    return dict(enumerate(found))


def _left(given: Given, made: Made) -> dict[int, Json]:
    """What the other ranks measured that end each by itself; those that hear of it late where this one failed."""
    living = made.peers.living() if made.failed and given.leave is not None else ()
    return given.meeting.given(_GIVEN_SECONDS, living)


def _measured(given: Given, made: Made) -> dict[str, Json] | None:
    if made.training is None:
        return None
    parts = made.training
    seen = measured.Seen(
        given.rank,
        given.data,
        parts.meter.samples,
        given.clock.instrument,
        parts.meter.probe.peaks,
        measured.state_bytes(parts.model, parts.optimizers),
        made.ran,
        parts.fleet.tried(),
    )
    return {**measured.of_rank(seen), _CONDITIONS: made.conditions}


def _entry(given: Given, made: Made, outcome: str, reason: str | None, ranks: Mapping[int, Json]) -> dict[str, Json]:
    seen = {rank: {**rows} for rank, rows in ranks.items() if rows is not None}
    found = conditions.of_ranks({rank: rows.pop(_CONDITIONS) for rank, rows in seen.items()})
    lines = measured.lines(given.plan, seen, f"the run {outcome} before the rank gave its measurements")
    # Before the plan's workload is known, the digest is of the executor alone, as a preset's is.
    return compose(
        made.name, given.start, outcome, reason, made.progress,
        (made.print or fingerprint(made.model)) if outcome == "finished" else None,
        made.rows, source_digest(made.workload), found | pressure(given.rank.kind), *lines, _resumed(made.rows),
    )  # fmt: skip


def _resumed(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json] | None:
    found = rows[0]["resume"] if rows else None
    return None if found is None else {key: found["chosen"][key] for key in ("id", "steps")}
