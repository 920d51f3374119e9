"""Which row of each kernel a rank runs: the first that it can, or of those timed on its card the fastest; and whether
tuned configurations are kept for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planner.door import reachable
from planner.passes.layout import device_pointer, per_rank
from planner.passes.ledger import Ledger
from planner.passes.legality import kernel_veto
from planner.views.words import seconds
from schemas.document import reading, resolve
from schemas.form import Json

TUNING_MINUTES = 3  # for each dtype and number of heads, forward and backward, seen on an H200


class _Timing(NamedTuple):
    """Seconds of rows by name, all timed on one card at one shape and in one dtype."""

    shape: str
    seconds: dict[str, float]


def put_kernel(ledger: Ledger, place: int, name: str, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """Decide the row of kernel ``name`` for entry ``place``, and read what is kept for it."""
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    device = device_pointer(ledger.draft, entry)
    found, dtype = resolve(ledger.draft, device), entry["dtype"]["chosen"]
    rows, asked = account["kernels"][name], account["config"].get(name, {}).get("asked")
    shape = _shape(request, account, name, entry["members"][0])
    inputs = [f"{base}/dtype", f"{device}/{'sm' if found['kind'] == 'cuda' else 'kind'}"]
    if asked not in (None, "auto"):
        row = next(row for row in rows if row["name"] == asked)
        ledger.decide(f"{base}/kernels/{name}", asked, asked, f"asked for: {row['why']}", inputs=inputs)
    else:
        row = _auto(ledger, f"{base}/kernels/{name}", (rows, asked), (found, dtype, shape), inputs)
    if found["kind"] == "cuda" and "tuned" in row:
        ledger.put(
            f"{base}/tuned/{name}", _tuned(row["tuned"], ledger.draft["toolchain"], (device, dtype), found, shape)
        )


def _auto(
    ledger: Ledger,
    pointer: str,
    choice: tuple[Sequence[Mapping[str, Json]], Json],
    rank: tuple[Mapping[str, Json], str, Mapping[str, int]],
    inputs: Sequence[str],
) -> Mapping[str, Json]:
    (rows, asked), (device, dtype, shape) = choice, rank
    capability = device["sm"]["value"] if device["kind"] == "cuda" else None
    vetoes = {
        row["name"]: kernel_veto(row, device["kind"], capability, dtype, ledger.draft["toolchain"]) for row in rows
    }
    able = [row for row in reachable(rows) if vetoes[row["name"]] is None]
    chosen = able[0] if able else rows[0]
    why, timing = chosen["why"], _timing(able, device["name"]["value"], dtype, shape)
    if timing is not None:
        chosen = min(
            (row for row in able if row["name"] in timing.seconds), key=lambda row: timing.seconds[row["name"]]
        )
        why = f"the fastest of those timed on this card ({timing.shape}): {_said(timing, chosen)}; {chosen['why']}"
    rejected = []
    for row in rows:
        if row is not chosen:
            rejected.append({"option": row["name"], "why": vetoes[row["name"]] or f"{chosen['name']} comes before it"})
            if timing is not None and row["name"] in timing.seconds:
                slower = timing.seconds[row["name"]] - timing.seconds[chosen["name"]]
                rejected[-1] |= {"why": f"slower as timed: {_said(timing, row)}", "costs_seconds": slower}
    outcome = "default" if chosen is rows[0] or timing is not None else "fallback"
    ledger.decide(pointer, asked, chosen["name"], why, outcome=outcome, inputs=inputs, rejected=rejected)
    return chosen


def _shape(request: Mapping[str, Json], account: Mapping[str, Json], name: str, rank: int) -> dict[str, int]:
    """What the kernel is called with on ``rank``, before the batch is split over unequal ranks."""
    sizes = account["defaults"]
    declared = per_rank(request["capacity"], rank) if isinstance(request["capacity"], list) else (None, None)
    batch = declared[0] or request["batch"] or sizes["batch"]
    return {
        **account["kernel_shapes"].get(name, {}),
        "batch": batch,
        "seq": declared[1] or request["seq"] or sizes["seq"],
    }


def _timing(
    able: Sequence[Mapping[str, Json]], card: str | None, dtype: str, shape: Mapping[str, int]
) -> _Timing | None:
    """The kept timings of two ``able`` rows or more at the nearest shape; None where there are none for the card."""
    shapes: dict[tuple[tuple[str, int], ...], dict[str, float]] = {}
    for row in able:
        for item in row.get("timed", ()):
            if item["card"] == card and item["dtype"] == dtype:
                best = shapes.setdefault(tuple(sorted(item["shape"].items())), {})
                best[row["name"]] = min(item["seconds"], best.get(row["name"], math.inf))
    known = {timed: by_row for timed, by_row in shapes.items() if len(by_row) > 1}
    if not known:
        return None

    def apart(timed: tuple[tuple[str, int], ...]) -> float:
        return sum(abs(math.log(size / shape[key])) for key, size in timed if key in shape)

    nearest = min(known, key=apart)
    return _Timing(" ".join(f"{key}={size}" for key, size in nearest), known[nearest])


def _said(timing: _Timing, row: Mapping[str, Json]) -> str:
    return f"{row['name']} {seconds(timing.seconds[row['name']])}"


def _tuned(
    kept: Sequence[Mapping[str, Any]],
    toolchain: Mapping[str, Json],
    rank: tuple[str, str],
    device: Mapping[str, Json],
    shape: Mapping[str, int],
) -> dict[str, Json]:
    """exact: kept for this card, toolchain, channels and heads; near: for another number of heads; none: neither."""
    (pointer, dtype), versions = rank, [toolchain.get(name, {}).get("value") for name in ("triton", "fla-core")]
    inputs = [f"{pointer}/name", *(f"/toolchain/{name}" for name in ("triton", "fla-core") if name in toolchain)]
    alike = [
        item
        for item in kept
        if item["card"] == device["name"]["value"]
        and [item["triton"], item["fla"]] == versions
        and item["head"] == shape.get("head")
        and dtype in item["dtypes"]
    ]
    if any(shape.get("heads") in item["heads"] for item in alike):
        return reading("exact", "", "computed", "tuned configurations are kept for this card and shape", inputs=inputs)
    if alike:
        why = f"tuned configurations are kept for this card, but not for {shape.get('heads')} heads: the nearest serve"
        return reading("near", "", "computed", why, inputs=inputs)
    why = (
        f"none are kept for this card and toolchain: the first run will tune for about {TUNING_MINUTES} minutes a dtype"
    )
    return reading("none", "", "computed", why, inputs=inputs)
