"""A run's entry in its plan: put together, and kept whatever happens to the plan meanwhile."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from shlex import quote

from executor.loop import Progress
from schemas.form import Json, Unfaithful, render, six
from schemas.store import record, with_run


def now() -> str:
    """This moment as the schema's date-time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def identity(start: str) -> str:
    """A run's id: the moment of its start and six random digits, since two may start in one second."""
    return f"{start.replace('-', '').replace(':', '')}-{secrets.token_hex(3)}"


def compose(
    name: str,
    start: str,
    outcome: str,
    reason: str | None,
    progress: Progress,
    fingerprint: str | None,
    rows: Sequence[Mapping[str, Json]],
    source: str,
    conditions: Mapping[str, Json],
    measured: Mapping[str, Json],
    absent: Mapping[str, Json],
    resumed: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """The entry named ``name``, without what chains it to the plan.

    ``rows`` are the ranks' facts; toolchain and data are rank 0's. An evaluation that was not finite has no number.
    ``resumed`` names the run and the step that this one went on from; what is counted is of both.
    """
    scored = [(step, six(bits) if isfinite(bits) else None) for step, bits in progress.evaluations]
    return {
        "id": name,
        "start": start,
        "end": now(),
        "outcome": outcome,
        "reason": reason,
        "steps": progress.steps,
        "final_loss": None if progress.final_loss is None else six(progress.final_loss),
        "bits_per_byte": scored[-1][1] if scored else None,
        "evaluations": [{"step": step, "bits_per_byte": bits} for step, bits in scored if bits is not None],
        "fingerprint": fingerprint,
        "fingerprints_compared": progress.compared,
        "skipped_steps": progress.skipped,
        "toolchain": dict(rows[0]["toolchain"]) if rows else {},
        "source": source,
        "data": list(rows[0]["data"]) if rows else [],
        "conditions": dict(conditions),
        "measured": dict(measured),
        "absent": dict(absent),
    } | ({} if resumed is None else {"resumed": dict(resumed)})


def keep(
    plan: Mapping[str, Json], path: Path, run_dir: Path, entry: Mapping[str, Json], new: bool = True
) -> str | None:
    """Record ``entry`` into the plan at ``path``; where a ``new`` one may be made there, of ``plan``.

    Where that cannot be done, the plan with its run goes to ``run_dir``/record-ID.json, or to the system's folder of
    temporary files; then gives a message that says so, why, and how to add it.
    """
    try:
        record(path, plan, entry, new)
    except (OSError, Unfaithful) as error:
        why = f"could not be recorded in {path} ({error})"
        other = os.path.lexists(path) and isinstance(error, Unfaithful)
        return f"{why}; {aside(plan, path, (run_dir, Path(tempfile.gettempdir())), entry, other)}"
    return None


def aside(
    plan: Mapping[str, Json], path: Path, folders: Iterable[Path], entry: Mapping[str, Json], other: bool = False
) -> str:
    """Keep the plan with its run in the first of ``folders`` that takes it, and say where and what to do with it.
    ``other``: something else lies at ``path``, which must not be lost."""
    document: Mapping[str, Json]
    try:
        document, what = with_run(plan, entry, str(path)), "the plan with this run is kept in"
    except Unfaithful as error:
        document, what = entry, f"its entry alone ({error}) is kept in"
    for folder in folders:
        kept = folder / f"record-{entry['id']}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with kept.open("xb") as file:
                file.write(render(document))
        except OSError as error:
            what = f"{folder} takes no file ({error.strerror}); {what}"
            continue
        if document is entry:
            return f"{what} {kept}"
        add = f"cp {quote(str(kept))} {quote(str(path))}"
        moved = f" (what lies there is another document: move it away first, or read {kept} as it is)" if other else ""
        return f"{what} {kept}; to add it: {add}{moved}"
    return f"{what} no file at all: free some space before the next run"
