"""The all-reduce between the ranks' devices, timed by the planner's own instruments in processes of their own: every
sum is checked, and a deadline stands over the whole, since a broken path between cards may hang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from planner.machine.benchmark_cards import COMMAND
from planner.machine.crew import Crew, Failed
from planner.machine.ring_readings import all_reduce_readings
from planner.machine.visible import named
from schemas.form import Json

BRIEF, WHOLE, OF_CPUS = 2**24, 2**30, 2**24
"""Bytes of the largest all-reduce: where it is only tried, where it is reported, between CPU ranks."""

_SMALLEST = 2**16
_READY_SECONDS, _DEADLINE_SECONDS, _BUDGET_SECONDS = 120.0, 60.0, 15.0
_REPEATS = 9


def timed(cards: Sequence[str], ranks: int, largest: int) -> dict[str, Json]:
    """Readings allreduce_curve, allreduce_rate (B/s) and allreduce_latency (s) of ``cards``, or without any of CPU
    ``ranks`` over gloo, up to ``largest`` bytes. What could not be timed is unknown, and says why and what to try."""
    names = list(cards) or [f"cpu-{rank}" for rank in range(ranks)]
    request: dict[str, Any] = {"part": "group", "dry": None if cards else {"sm": "8.0", "free": 2**40}}
    request |= {
        "world": len(names),
        "sizes": [_SMALLEST << power for power in range(20) if _SMALLEST << power <= largest],
    }
    request |= {"repeats": _REPEATS, "budget": _BUDGET_SECONDS}
    environs = {name: _environ(name if cards else "") for name in names}
    with TemporaryDirectory(prefix="dormouse-gate-") as folder, Crew(COMMAND, environs) as crew:
        crew.ready(_READY_SECONDS)
        request["rendezvous"] = str(Path(folder, "store"))
        answers = _answers(crew, {name: {**request, "rank": rank} for rank, name in enumerate(names)})
    return all_reduce_readings(answers, len(names), shrunk=bool(cards) and largest < BRIEF)


def largest(record: Mapping[str, Json], wanted: int) -> int:
    """``wanted`` bytes, or what the fullest card still takes: an all-reduce of n bytes is timed with 4 n in use."""
    free = [item["memory_free"]["value"] for item in record["devices"].values() if item["kind"] == "cuda"]
    known = [int(value) // 4 for value in free if value is not None]
    return min([wanted, *(max(value, 4 * _SMALLEST) for value in known)])


def _answers(crew: Crew, requests: Mapping[str, Mapping[str, Json]]) -> list[Json]:
    try:
        return list(crew.ask(requests, _DEADLINE_SECONDS).values())
    except Failed as failure:
        return [{"error": str(failure)}]


def _environ(card: str) -> dict[str, str]:
    """That of a process which sees ``card`` alone, or without one is a CPU rank, on a machine whose name may not
    resolve."""
    seen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": named(card)}
    return {**os.environ, **seen, **({} if card else {"GLOO_SOCKET_IFNAME": "lo"})}
