"""What measured runs teach the next plan: ``--calibrate`` as rows of the request, and the readings made of them.

A row holds what one rank entry of a measured plan took, how much work that was, and everything that must be alike for
it to speak of another rank. It teaches a ratio, measured / modelled, at its own batch. Between two batches the ratio is
interpolated, so t(b) passes through what was measured; and where a card's rates are unknown, the ratio is all there is
(seconds a FLOP).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from planner.passes.cost import PACKING_LAUNCHES, UNIT_RATES, seconds
from planner.passes.layout import device_pointer
from planner.passes.ledger import Ledger, plain
from planner.passes.paths import link_inputs, rings
from planner.passes.ranks import update_gain
from planner.passes.sharding import is_sharded
from schemas.document import reading, resolve
from schemas.form import Json, Unfaithful, six

_WORK = ("flops", "bytes", "launches")
# What must be equal for a measured rank, and for a measured exchange, to speak of a planned one.
_RANK_ALIKE = ("device", "threads", "workload", "dtype", "kernels", "seq")
_LINK_ALIKE = ("devices", "world", "backend", "path")

Point = tuple[float, float, float, float]
"""(batch, ratio, its low, its high)"""


def rows(plan: Mapping[str, Json], name: str) -> list[dict[str, Json]]:
    """One row a rank entry of ``plan``, from its newest finished run; ``name`` is how messages call the plan.

    Raises:
        Unfaithful: no run of the plan finished, or it measured no compute.
    """
    run = next((run for run in reversed(plan["runs"]) if run["outcome"] == "finished"), None)
    if run is None:
        raise Unfaithful(f"{name}: has no finished run to calibrate by: run it first")
    found = [_row(plan, run, place) for place in range(len(plan["ranks"]))]
    if any(row["compute"] is None for row in found):
        raise Unfaithful(f"{name}: its newest finished run measured no compute time (too few steps?)")
    return found


def _row(plan: Mapping[str, Json], run: Mapping[str, Json], place: int) -> dict[str, Json]:
    entry, exchange = plan["ranks"][place], plan["exchange"]
    row = {"seal": plan["seal"]["digest"], "run": run["id"], **_traits(plan, entry)}
    row["seq"], row["batch"] = entry["seq"]["chosen"], entry["batch"]["chosen"]
    for part, prefix in (("compute", ""), ("optimizer", "optimizer_")):
        row[part] = _seen(run, f"/ranks/{place}/step/{part}", entry["members"])
        row[f"{part}_work"] = [plain(entry["demand"][prefix + key]) for key in _WORK]
    # Gathers and reduce-scatters say nothing of an all-reduce.
    row["all_reduce"] = None if is_sharded(plan) else _seen(run, "/exchange/seconds", None)
    row["owners"] = _seen(run, f"/ranks/{place}/step/owners", entry["members"])
    owners = exchange["owners"]["chosen"] if "owners" in exchange else []
    row["owned"] = max((owners.count(member) for member in entry["members"]), default=0)
    for key in ("payload", "buckets", "owners_payload"):
        row[key] = plain(exchange[key]) if key in exchange else None
    return row


def _traits(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> dict[str, Json]:
    """What a rank entry of a plan or draft is, as a row holds it."""
    return {
        "device": _device(draft, entry),
        "devices": sorted({_device(draft, other) for other in draft["ranks"]}),
        "threads": entry["threads"]["chosen"] if "threads" in entry else None,
        "workload": draft["workload"]["digest"],
        "dtype": entry["dtype"]["chosen"],
        "kernels": sorted(f"{name}={choice['chosen']}" for name, choice in entry["kernels"].items()),
        "world": sum(len(other["members"]) for other in draft["ranks"]),
        "backend": draft["exchange"]["backend"]["chosen"],
        "path": draft["exchange"].get("path", {"value": None})["value"],
    }


def _device(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> str:
    """The device's name; of a card also how much of it the rank has, since MPS and MIG may leave it a part."""
    device = resolve(draft, device_pointer(draft, entry))
    name, part = str(plain(device["name"])), device.get("multiprocessors")
    return name if part is None or part["value"] is None else f"{name}, {part['value']} multiprocessors"


def _seen(run: Mapping[str, Json], pointer: str, members: Sequence[int] | None) -> list[float] | None:
    """[median, least, most] of ``pointer`` over the members that measured it, spreads included; None: none did."""
    labels = [pointer] if members is None else [f"{pointer} @{rank}" for rank in members]
    lines = [run["measured"][label] for label in labels if label in run["measured"]]
    if not lines:
        return None
    ends = [end for line in lines for end in (line["value"], *line.get("spread", ()))]
    return [six(float(statistics.median(line["value"] for line in lines))), six(min(ends)), six(max(ends))]


def unlike(request: Mapping[str, Json], draft: Mapping[str, Json]) -> dict[str, list[str]]:
    """The plans asked to calibrate by whose runs speak of no rank of ``draft``, by seal, with what is unlike."""
    found: dict[str, list[str]] = {}
    for seal in dict.fromkeys(row["seal"] for row in request["calibrate"]):
        differences = []
        for row in (row for row in request["calibrate"] if row["seal"] == seal):
            for entry in draft["ranks"]:
                wanted = {**_traits(draft, entry), "seq": entry["seq"]["chosen"]}
                differences.append([key for key in _RANK_ALIKE if row[key] != wanted[key]])
        if all(differences):
            nearest = min(differences, key=len)
            found[seal] = nearest
    return found


def calibrate_ranks(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """Put ``/ranks/*/calibration/compute`` and ``/optimizer`` where a row speaks of the entry."""
    for place, entry in enumerate(ledger.draft["ranks"]):
        wanted = {**_traits(ledger.draft, entry), "seq": request["seq"] or account["defaults"]["seq"]}
        alike = [row for row in request["calibrate"] if all(row[key] == wanted[key] for key in _RANK_ALIKE)]
        rates = [entry["rates"][name]["value"] for name in ("products", "bandwidth", "launch")]
        known = UNIT_RATES if None in rates else rates
        kind = resolve(ledger.draft, device_pointer(ledger.draft, entry))["kind"]
        for part in ("compute", "optimizer"):
            taught = [row for row in alike if row[part] is not None and (part == "compute" or _same_world(row, wanted))]
            gain = update_gain(entry) if part == "optimizer" and known is rates else 1.0
            points = [_point(row, part, _modelled(kind, row[f"{part}_work"], known, gain)) for row in taught]
            _put(ledger, f"/ranks/{place}/calibration/{part}", points, taught)


def _modelled(kind: str, work: Sequence[float], rates: Sequence[float], gain: float) -> float:
    flops, moved, launches = work
    return seconds(kind, flops, moved, launches, rates, gain=gain)


def _same_world(row: Mapping[str, Json], wanted: Mapping[str, Json]) -> bool:
    return bool(row["world"] == wanted["world"])  # a rank of another fleet owns other matrices


def calibrate_link(ledger: Ledger, request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
    """Put ``/exchange/calibration/all_reduce`` and ``/owners`` where a row speaks of the fleet."""
    wanted = _traits(ledger.draft, ledger.draft["ranks"][0])
    alike = [row for row in request["calibrate"] if all(row[key] == wanted[key] for key in _LINK_ALIKE)]
    link = [ledger.value(pointer) for pointer in link_inputs(ledger.draft)]
    if None in link:
        return
    ring = rings(ledger.draft, *link)
    reduced = [row for row in alike if row["all_reduce"] is not None]
    points = [_point(row, "all_reduce", ring.all_reduce(row["payload"], row["buckets"])) for row in reduced]
    _put(ledger, "/exchange/calibration/all_reduce", points, reduced)
    launch = ledger.value("/ranks/0/rates/launch")
    sent = [row for row in alike if row["owners"] is not None and launch is not None]
    points = [
        _point(row, "owners", ring.all_gather(row["owners_payload"]) + PACKING_LAUNCHES * row["owned"] * launch)
        for row in sent
    ]
    _put(ledger, "/exchange/calibration/owners", points, sent)


def _point(row: Mapping[str, Json], part: str, modelled: float) -> Point:
    median, least, most = (value / modelled for value in row[part])
    return row["batch"], median, least, most


def _put(ledger: Ledger, pointer: str, points: Sequence[Point], taught: Sequence[Mapping[str, Json]]) -> None:
    if not points:
        return
    curve = [[six(value) for value in point] for point in sorted(_merged(points))]
    runs = ", ".join(dict.fromkeys(f"{row['seal'][:12]} ({row['run']})" for row in taught))
    why = f"[batch, measured / modelled time, low, high] of the measured runs {runs}"
    ledger.put(pointer, reading(curve, "", "benchmarked", why))


def _merged(points: Sequence[Point]) -> list[Point]:
    """One point a batch: the median ratio of those measured there, and the widest range."""
    batches: dict[float, list[Point]] = {}
    for point in points:
        batches.setdefault(point[0], []).append(point)
    return [
        (
            batch,
            statistics.median(point[1] for point in same),
            min(point[2] for point in same),
            max(point[3] for point in same),
        )
        for batch, same in batches.items()
    ]
