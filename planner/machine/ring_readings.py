"""Readings of the all-reduce over a node's cards: its curve, and the two numbers fitted to it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from statistics import median

from planner.machine.benchmark import PICKS
from planner.machine.curve import RingFit, fit_ring
from schemas.document import reading, unknown
from schemas.form import Json, six

_UNITS = {"allreduce_rate": "B/s", "allreduce_latency": "s", "allreduce_curve": "B, s"}
_PLAIN = re.compile(r"[A-Za-z0-9:,^=._-]{1,24}")  # no path of this machine enters a record
_UNTOLD = ("NCCL_DEBUG", "NCCL_CONF_FILE", "NCCL_TOPO", "NCCL_GRAPH", "NCCL_SOCKET")


def nccl_settings(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """(what of NCCL is set here, what to try where cards cannot reach each other)."""
    environ = os.environ if environ is None else environ
    found = [
        f"{name}={value}" if _PLAIN.fullmatch(value) else f"{name} set"
        for name, value in sorted(environ.items())
        if name.startswith("NCCL_") and not name.startswith(_UNTOLD)
    ]
    if environ.get("NCCL_P2P_DISABLE") == "1":
        hint = "NCCL_P2P_DISABLE=1 is set already; NCCL_DEBUG=INFO tells more"
    else:
        hint = "where peer-to-peer is broken (an IOMMU does that), NCCL_P2P_DISABLE=1 goes around it"
    return ", ".join(found) or "no NCCL_* set", hint


def refused(why: str) -> dict[str, Json]:
    """The readings of an all-reduce that was not timed."""
    return {key: unknown(unit, f"all-reduce over the cards: not timed: {why}") for key, unit in _UNITS.items()}


def all_reduce_readings(answers: Sequence[Json], world: int, shrunk: bool) -> dict[str, Json]:
    """Readings of what the ranks answered, rank 0 first, where each may hold "error" or "wrong" instead.

    Args:
        shrunk: whether memory kept the sizes smaller than wanted.
    """
    settings, hint = nccl_settings()
    for answer in answers:
        if "wrong" in answer:
            return refused(f"the sum of {answer['wrong']} B came out wrong ({settings}); {hint}")
    for answer in answers:
        if "error" in answer:
            return refused(f"{answer['error']} ({settings}); {hint}")
    curve = answers[0]["curve"]
    library = f"NCCL {answers[0]['nccl']} ({settings})" if answers[0]["nccl"] else "gloo, a dry run"
    what = f"all-reduce of bf16 over {world} ranks, {library}, every sum checked"
    fits = [fit_ring([(size, pick(times)) for size, times in curve], world) for pick in PICKS.values()]
    middle = [[size, six(median(times))] for size, times in curve]
    note = "; memory allowed no larger ones" if shrunk else ""
    found = {
        "allreduce_curve": reading(
            middle, "B, s", "benchmarked", f"[bytes, seconds] of {what}; medians of {len(curve[-1][1])} or more{note}"
        )
    }
    known = [fit for fit in fits if fit is not None]
    if len(known) < len(fits):
        reason = f"{what}: times over {len(curve)} sizes do not grow with size, so they tell no rate"
        return {**found, **{key: unknown(_UNITS[key], reason) for key in ("allreduce_rate", "allreduce_latency")}}
    return {**found, **_fitted(known, dict(zip(PICKS, known, strict=True))["middle"], what, curve)}


def _fitted(fits: Sequence[RingFit], middle: RingFit, what: str, curve: Json) -> dict[str, Json]:
    sizes = f"{len(curve)} sizes from {curve[0][0]} to {curve[-1][0]} B"
    why = (
        f"{what}; fit of seconds = 2(P-1) latency + 2(P-1)/P bytes / rate to the medians of {sizes}, least squares of "
        f"relative errors; it misses at most {middle.worst:.1%}, at {middle.at} B"
    )
    found = {}
    for name, value, values in (
        ("rate", middle.rate, [fit.rate for fit in fits]),
        ("latency", middle.latency, [fit.latency for fit in fits]),
    ):
        key = f"allreduce_{name}"
        found[key] = reading(value, _UNITS[key], "benchmarked", why, low=min(values), high=max(values))
    return found
