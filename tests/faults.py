"""Planted faults: each replaces a named function of the executor in a rank's process. cases/faults.json says which."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from executor import build, exchange, parts, shards, slices

_CASES = Path(__file__).parent / "cases" / "faults.json"
_data_slice, _sum, _owners_of = slices.data_slice, exchange.sum_over_ranks, build.owners_of
_gather, _scatter, _wholes = shards.gather, shards.scatter, parts.wholes


def cases(of: str = "ddp") -> list[dict[str, Any]]:
    """The faults kept as data: name, what is patched with what, the gate that must turn red, and the run it is for.

    ``of``: those of ranks with a model each ("ddp"), of ranks that share one ("sharded"), or "all".
    """
    found: list[dict[str, Any]] = json.loads(_CASES.read_text())
    return [case for case in found if of in ("all", case.get("of", "ddp"))]


def plant(name: str) -> list[tuple[Any, str, Any]]:
    """Patch what the fault ``name`` patches; gives (owner, attribute, original) to restore."""
    (case,) = [case for case in cases("all") if case["name"] == name]
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


def the_second_unit_is_not_summed(part: torch.Tensor, whole: torch.Tensor, group: Any, later: bool) -> Any:
    _calls[0] += 1
    if _calls[0] % 4 != 2:
        return _scatter(part, whole, group, later)
    part.copy_(whole.view(group.size(), -1)[group.rank()])
    return None


def the_last_ranks_rows_stay_away(whole: torch.Tensor, part: torch.Tensor, group: Any, later: bool) -> Any:
    work = _gather(whole, part, group, later)
    if group.rank() == 0:
        whole.view(group.size(), -1)[-1].zero_()
    return work


def the_norm_of_own_rows(self: Any, gradients: Any) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(gradients)


def rank_one_sees_another_bit(tensors: Any) -> Any:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for tensor in _wholes(tensors):
        yield tensor.clone().view(torch.uint8).bitwise_xor(1).view(tensor.dtype) if rank == 1 else tensor
