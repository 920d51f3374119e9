"""Engram tables, their gradients and their moments in host memory: the device holds the rows of a step alone.

Exact: the worker of a table updates the rows by the rule that updates them on the device, and a forward's rows are sent
only after the update before it (``executor.models.host_table``). What a rank's host holds follows from its own windows
alone, so on a fleet the tables would part: one rank only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from executor.models.engram import Engram
from planner.door import MechanismRow

NAME = "engram_ram"
SCOPE = "rank"
EXACT = True
ROW: MechanismRow = {
    "scope": SCOPE,
    "exact": EXACT,
    "moves": "tables",
    "fleet": False,
    "fleet_why": "each rank's host would update the rows of its own windows only, and the tables would differ by rank",
    "devices": ["cpu", "cuda"],
    "why": "tables and their moments in host memory; only the rows that a step looks up cross the link, both ways",
}


def engrams(model: nn.Module) -> list[tuple[str, Engram]]:
    """The named modules whose tables can move, or have."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Engram)]


def offered(model: nn.Module, opt: str) -> bool:
    """Whether this model has tables to move; every optimizer leaves them to the rule of their own."""
    return bool(engrams(model))


def eligibility(facts: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a rank of these facts ({"device": "cpu" | "cuda", "ranks": of the fleet}) can use it, and why."""
    if facts.get("device") not in ROW["devices"]:
        return False, f"offered on {' and '.join(ROW['devices'])}; this rank is {facts.get('device')}"
    if facts.get("ranks", 1) > 1:
        return False, ROW["fleet_why"]
    return True, "needs nothing of the device but copies"


def apply(model: nn.Module) -> None:
    """Move the tables. Raises ValueError where the model has none."""
    found = engrams(model)
    if not found:
        raise ValueError("engram_ram needs an Engram; this model has none (--set engram_rows=N gives it one)")
    for _, engram in found:
        engram.to_host()


def staging_bytes(model: nn.Module, batch: int, length: int) -> int:
    """On the device at most: rows and slots of this step and the next, and the gradient of this step's rows."""
    return sum(n * (3 * row + 2 * slot) for n, row, slot in _lookups(model, batch, length))


def host_bytes(model: nn.Module, batch: int, length: int) -> int:
    """In host memory: the tables and two moments each, and what is pinned."""
    tables = sum(3 * engram.table.numel() * engram.table.element_size() for _, engram in engrams(model))
    return tables + pinned_bytes(model, batch, length)


def pinned_bytes(model: nn.Module, batch: int, length: int) -> int:
    """Of it pinned, on a card: rows and slots on their way out, and the bytes looked up. The gradient on its way back
    is gone by then: a table's worker takes one job after the other."""
    return _inputs(model, batch, length) + sum(n * (row + slot) for n, row, slot in _lookups(model, batch, length))


def link_bytes(model: nn.Module, batch: int, length: int) -> int:
    """Over the link a step at most, both ways: as if no row were looked up twice."""
    return _inputs(model, batch, length) + sum(n * (2 * row + slot) for n, row, slot in _lookups(model, batch, length))


def lookups(model: nn.Module, batch: int, length: int) -> int:
    """Rows that the host brings and updates a step at most: as if no row were looked up twice."""
    return sum(n for n, _, _ in _lookups(model, batch, length))


def _inputs(model: nn.Module, batch: int, length: int) -> int:
    return 8 * batch * length * len(engrams(model))


def _lookups(model: nn.Module, batch: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(lookups of a step, bytes of a row, bytes of a slot) of each table still in the model."""
    for _, engram in engrams(model):
        row = engram.table.shape[1] * engram.table.element_size()
        yield batch * length * len(engram.orders), row, engram.primes.element_size()
