"""What the link between the ranks must carry and how long that takes: by arithmetic over the plan's own readings, each
with its origin, and by what `executor.gates.wire` timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from executor.gates.checks import Check
from planner.machine.ring_readings import nccl_settings
from planner.passes.link import at_size, ring_volume
from schemas.form import Json

PAYLOADS = {"medium, 138 M parameters in bf16": 276_000_000, "b1, 1.07 B parameters in bf16": 2_140_000_000}
"""Bytes of gradients of the two shapes that the arithmetic of two cards is told for."""
CRAWLS = 0.5
"""A timed rate below this share of the lowest that was reckoned with is told as a crawl."""


def check(timed: Mapping[str, Json]) -> Check:
    """Whether every sum came, in time and right; else why not, and what to try."""
    curve = timed["allreduce_curve"]
    came = curve["value"] is not None
    return Check("link", "all-reduce between the ranks", came, "in time, every sum right" if came else curve["why"])


def report(plan: Mapping[str, Json], timed: Mapping[str, Json]) -> Iterator[str]:
    """Lines for a person: the link's readings, the arithmetic of each payload, what was timed."""
    link, ranks = plan["exchange"], sum(len(entry["members"]) for entry in plan["ranks"])
    yield f"link of {ranks} ranks: {link['path']['value']} ({link['path']['why']})"
    for key, device in plan["fleet"]["devices"].items():
        for name in ("pcie_generation_max", "pcie_width_current", "nvlink_sheet"):
            if name in device:
                yield f"  {key} {name} = {_value(device[name])}"
    yield from (f"  {name} = {_value(link[name])}" for name in ("efficiency", "rate", "latency") if name in link)
    for name, payload in PAYLOADS.items():
        yield f"{name}: {_arithmetic(payload, ranks, link)}{_as_timed(payload, timed)}"
    curve = timed["allreduce_curve"]
    yield f"timed all-reduce: {curve['why']}"
    for size, seconds in curve["value"] or ():
        rate = ring_volume(size, ranks) / seconds / 1e9
        yield f"  {size:>11} B  {1e3 * seconds:9.3f} ms  {rate:8.3f} GB/s a rank"
    if curve["value"] and _crawls(link, timed, ranks):
        yield f"  that crawls, beside the {_rate(link['rate'])} reckoned with; {nccl_settings()[1]}"


def _arithmetic(payload: int, ranks: int, link: Mapping[str, Json]) -> str:
    rate, latency = link["rate"]["value"], link["latency"]["value"]
    if rate is None or latency is None:
        return f"no rate is known ({link['rate']['why']})"
    volume = ring_volume(payload, ranks)
    seconds = volume / rate + 2 * (ranks - 1) * latency
    moved = f"2(P-1)/P x {payload / 1e6:.0f} MB = {volume / 1e6:.0f} MB a rank over {_rate(link['rate'])}"
    return f"{moved} = {1e3 * seconds:.1f} ms ({link['rate']['weakest']})"


def _as_timed(payload: int, timed: Mapping[str, Json]) -> str:
    curve = timed["allreduce_curve"]["value"]
    if curve is None:
        return ""
    how = "timed" if payload <= curve[-1][0] else "in proportion to the largest that was timed"
    return f"; {how}: {1e3 * at_size(curve, payload):.1f} ms"


def _crawls(link: Mapping[str, Json], timed: Mapping[str, Json], ranks: int) -> bool:
    size, seconds = timed["allreduce_curve"]["value"][-1]
    low = link["rate"].get("low", link["rate"]["value"])
    return low is not None and ring_volume(size, ranks) / seconds < CRAWLS * low


def _value(item: Mapping[str, Json]) -> str:
    value = item["value"]
    shown = "unknown" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"{shown} {item['unit']} ({item['basis']}: {item['why']})".replace("  ", " ")


def _rate(item: Mapping[str, Json]) -> str:
    return f"{item['value'] / 1e9:.1f} GB/s"
