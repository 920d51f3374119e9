"""A run's entry in its plan: put together, and kept whatever happens to the plan meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from executor.loop import Progress
from schemas.form import Json, Unfaithful, render, six
from schemas.store import record, write


def now() -> str:
    """This moment as the schema's date-time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def compose(
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
) -> dict[str, Json]:
    """The entry, without what chains it to the plan. ``rows`` are the ranks' facts; toolchain and data are rank 0's."""
    evaluations = [{"step": step, "bits_per_byte": six(bits)} for step, bits in progress.evaluations]
    return {
        "id": f"{start.replace('-', '').replace(':', '')}-{secrets.token_hex(3)}",
        "start": start,
        "end": now(),
        "outcome": outcome,
        "reason": reason,
        "steps": progress.steps,
        "final_loss": None if progress.final_loss is None else six(progress.final_loss),
        "bits_per_byte": evaluations[-1]["bits_per_byte"] if evaluations else None,
        "evaluations": evaluations,
        "fingerprint": fingerprint,
        "fingerprints_compared": progress.compared,
        "skipped_steps": progress.skipped,
        "toolchain": dict(rows[0]["toolchain"]) if rows else {},
        "source": source,
        "data": list(rows[0]["data"]) if rows else [],
        "conditions": dict(conditions),
        "measured": dict(measured),
        "absent": dict(absent),
    }


def keep(plan: Mapping[str, Json], path: Path, run_dir: Path, entry: Mapping[str, Json]) -> str | None:
    """Record ``entry`` into the plan at ``path``, which is made of ``plan`` where there is none.

    Where that cannot be done, the entry goes to ``run_dir``/record.json; then gives a message that says so and why.
    """
    try:
        if not path.exists():
            write(path, plan)
        record(path, plan["seal"]["digest"], entry)
    except (OSError, Unfaithful) as error:
        aside = run_dir / "record.json"
        run_dir.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(render(entry))
        return f"the run could not be recorded in {path} ({error}); its entry is kept in {aside}"
    return None
