"""Planted faults: each replaces a named function of the executor in a rank's process. cases/faults.json says which."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from executor import build, exchange, slices

_CASES = Path(__file__).parent / "cases" / "faults.json"
_data_slice, _sum, _owners_of = slices.data_slice, exchange.sum_over_ranks, build.owners_of


def cases() -> list[dict[str, Any]]:
    """The faults kept as data: name, what is patched with what, the gate that must turn red, and the run it is for."""
    return json.loads(_CASES.read_text())


def plant(name: str) -> list[tuple[Any, str, Any]]:
    """Patch what the fault ``name`` patches; gives (owner, attribute, original) to restore."""
    (case,) = [case for case in cases() if case["name"] == name]
    undo = []
    for patch in case["patches"]:
        module, _, path = patch["target"].partition(":")
        *owners, attribute = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        undo.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, globals()[patch["with"]])
    return undo


def every_rank_weighs_the_same(self: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss / self.size


def every_rank_starts_at_the_first_slot(plan: Any, rank: int) -> slices.DataSlice:
    return replace(_data_slice(plan, rank), offset=0)


_calls = [0]


def the_second_bucket_is_not_sent(buffer: torch.Tensor, group: Any) -> Any:
    _calls[0] += 1
    if _calls[0] % 3 != 2:
        return _sum(buffer, group)
    kept: torch.futures.Future[Any] = torch.futures.Future()
    kept.set_result([buffer])
    return kept


def every_rank_owns_all(routed: Any, owners: Any, rank: Any) -> list[int]:
    return [rank.rank] * len(_owners_of(routed, owners, rank))


def no_update_is_sent(self: Any, updates: list[torch.Tensor]) -> list[torch.Tensor]:
    return updates


def no_count_is_sent(self: Any, counts: torch.Tensor) -> torch.Tensor:
    return counts
