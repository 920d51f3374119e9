"""How large the buckets of the gradients' all-reduce are: as a sweep over the path found best, else a share of all.

A bucket that is small costs a start of its own and travels slowly; the last of large ones has nothing to hide behind.
Where the balance lies depends on path and payload: `buckets.json` holds what ``tests/benchmarks/buckets.py`` measured,
by path and payload (bytes that a step reduces) the best size, and the seconds of a step at every size that was tried.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from planner.passes import constants
from schemas.form import Json

_LARGEST = constants.LARGEST_BUCKET_BYTES

Row = Mapping[str, Json]


@cache
def swept() -> tuple[Row, ...]:
    """{"path", "payload", "bucket_bytes", "seconds": [[bucket bytes, seconds a step]], "origin"} of each sweep."""
    return tuple(json.loads(files("planner.passes").joinpath("buckets.json").read_text("utf-8")))


def bucket_bytes(path: str, payload: int) -> tuple[int, str, list[dict[str, Json]]]:
    """(bytes of gradients in fp32 that fill a bucket, why, the sizes that were slower) for ``payload`` bytes a step."""
    rows = sorted((row for row in swept() if row["path"] == path), key=lambda row: int(row["payload"]))
    if not rows:
        size = min(max(payload // constants.BUCKETS_WANTED, constants.SMALLEST_BUCKET_BYTES), _LARGEST)
        why = f"payload / {constants.BUCKETS_WANTED}, within {constants.SMALLEST_BUCKET_BYTES} and {_LARGEST} B"
        return size, f"{why}: no sweep over this path is kept", []
    nearest = min(rows, key=lambda row: abs(math.log(row["payload"] / payload)))
    why = f"the best of a sweep: {nearest['origin']}"
    if len(rows) > 1:
        why += f"; between the sweeps of this path, straight in logarithms; {len(rows)} are kept"
    return _between(rows, payload), why, _slower(nearest)


def _between(rows: Sequence[Row], payload: int) -> int:
    """The best size at ``payload``: outside of the payloads that were swept that of the nearest."""
    payloads = [int(row["payload"]) for row in rows]
    if payload <= payloads[0] or payload >= payloads[-1]:
        return int(rows[0 if payload <= payloads[0] else -1]["bucket_bytes"])
    place = bisect_left(payloads, payload)
    (p0, p1), (b0, b1) = payloads[place - 1 : place + 1], (row["bucket_bytes"] for row in rows[place - 1 : place + 1])
    share = math.log(payload / p0) / math.log(p1 / p0)
    size: float = b0 * (b1 / b0) ** share
    return round(size)


def _slower(row: Row) -> list[dict[str, Json]]:
    times = dict(row["seconds"])
    best = times[row["bucket_bytes"]]
    others = sorted(size for size in times if size != row["bucket_bytes"])
    return [
        {"option": size, "why": f"{1e3 * times[size]:.4g} ms a step in that sweep, and {1e3 * best:.4g} at the best"}
        for size in others
    ]
