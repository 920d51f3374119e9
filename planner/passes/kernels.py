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


class _Choice(NamedTuple):
    row: Mapping[str, Json]
    why: str
    outcome: str | None = None
    rejected: Sequence[Mapping[str, Json]] = ()


def put_kernel(ledger: Ledger, place: int, name: str, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """Decide the row of kernel ``name`` for entry ``place``, and read what is kept for it. The versions of what the row
    needs are among the decision's inputs: by them a start knows what must not have changed."""
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    device, dtype = device_pointer(ledger.draft, entry), entry["dtype"]["chosen"]
    found, toolchain = resolve(ledger.draft, device), ledger.draft["toolchain"]
    rows, asked = account["kernels"][name], account["config"].get(name, {}).get("asked")
    shape = _shape(request, account, name, entry["members"][0])
    if asked in (None, "auto"):
        choice = _auto(rows, found, toolchain, dtype, shape)
    else:
        row = next(row for row in rows if row["name"] == asked)
        choice = _Choice(row, f"asked for: {row['why']}")
    row = choice.row
    inputs = [f"{base}/dtype", f"{device}/{'sm' if found['kind'] == 'cuda' else 'kind'}"]
    inputs += [f"/toolchain/{package}" for package in row["toolchain"] if package in toolchain]
    where = f"{base}/kernels/{name}"
    ledger.decide(
        where, asked, row["name"], choice.why, outcome=choice.outcome, inputs=inputs, rejected=choice.rejected
    )
    if found["kind"] == "cuda" and "tuned" in row:
        ledger.put(f"{base}/tuned/{name}", _tuned(row["tuned"], toolchain, (device, dtype), found, shape))


def _auto(
    rows: Sequence[Mapping[str, Json]],
    device: Mapping[str, Json],
    toolchain: Mapping[str, Json],
    dtype: str,
    shape: Mapping[str, int],
) -> _Choice:
    """The fastest of the rows timed on the device's card, else the first that can run."""
    kind = device["kind"]
    capability = device["sm"]["value"] if kind == "cuda" else None
    vetoes = {row["name"]: kernel_veto(row, kind, capability, dtype, toolchain, shape) for row in rows}
    able = [row for row in reachable(rows) if vetoes[row["name"]] is None]
    chosen = able[0] if able else rows[0]
    why, timing = chosen["why"], _timing(able, (device["name"]["value"], dtype), toolchain, shape)
    if timing is not None:
        fastest = min(timing.seconds, key=lambda row: timing.seconds[row])
        chosen = next(row for row in able if row["name"] == fastest)
        why = f"the fastest of those timed on this card ({timing.shape}): {_said(timing, chosen)}; {chosen['why']}"
    rejected = [
        _passed_over(row, vetoes[row["name"]] or f"{chosen['name']} comes before it", chosen, timing)
        for row in rows
        if row is not chosen
    ]
    outcome = "default" if chosen is rows[0] or timing is not None else "fallback"
    return _Choice(chosen, why, outcome, rejected)


def _passed_over(
    row: Mapping[str, Json], why: str, chosen: Mapping[str, Json], timing: _Timing | None
) -> dict[str, Json]:
    if timing is None or row["name"] not in timing.seconds:
        return {"option": row["name"], "why": why}
    slower = timing.seconds[row["name"]] - timing.seconds[chosen["name"]]
    return {"option": row["name"], "why": f"slower as timed: {_said(timing, row)}", "costs_seconds": slower}


def _shape(request: Mapping[str, Json], account: Mapping[str, Json], name: str, rank: int) -> dict[str, int]:
    """What the kernel is called with on ``rank``, before the batch is split over unequal ranks."""
    sizes, capacity = account["defaults"], request["capacity"]
    batch, seq = per_rank(capacity, rank) if isinstance(capacity, list) else (request["batch"], None)
    called = account["kernel_shapes"].get(name, {})
    return {**called, "batch": batch or sizes["batch"], "seq": seq or request["seq"] or sizes["seq"]}


def _timing(
    able: Sequence[Mapping[str, Json]],
    where: tuple[str | None, str],
    toolchain: Mapping[str, Json],
    shape: Mapping[str, int],
) -> _Timing | None:
    """The kept timings of two ``able`` rows or more at the nearest shape; None where there are none for the card and
    dtype ``where``, under the toolchain's versions (of which a build's own suffix does not count)."""
    versions = {name: str(item["value"]).partition("+")[0] for name, item in toolchain.items()}
    shapes: dict[tuple[tuple[str, int], ...], dict[str, float]] = {}
    for row in able:
        for item in row.get("timed", ()):
            alike = all(versions.get(name) == version for name, version in item["toolchain"].items())
            if (item["card"], item["dtype"]) == where and alike:
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
        "no tuned configurations are kept for this card and toolchain: "
        f"the first run will tune for about {TUNING_MINUTES} minutes a dtype"
    )
    return reading("none", "", "computed", why, inputs=inputs)
