"""What one rank holds of a model under FSDP2, as formulas over an account's units.

A unit's tensors are dealt to P ranks by rows, ceil(rows / P) each, the last ones padded with zeros. In a step each unit
is gathered for its forward and again for its backward, but for the root (the last of the list), which stays whole in
between. Its gradients are summed by one reduce-scatter.

Legend: P ranks; of a unit: U bytes gathered, G bytes of whole fp32 gradients, S bytes of them as they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.door import CHUNK_BYTES, block_rest
from schemas.form import Json

WIDTH = 4  # bytes of an element as it is kept and gathered: fp32
TRAINED = ("muon", "adamw", "tables")
EVERY = (*TRAINED, "frozen")
_COPIES = {"adamw": 4, "tables": 4, "frozen": 1}  # of a tensor in fp32: itself, its gradient, two moments


@dataclass(frozen=True)
class Shards:
    """The units of a model dealt to ``world`` ranks."""

    units: Sequence[Mapping[str, Json]]
    world: int

    def held(self, routes: Sequence[str] = EVERY) -> int:
        """Elements that a rank holds of the tensors of ``routes``, padding included."""
        return sum(_held(unit, self.world, routes) for unit in self.units)

    def least(self, routes: Sequence[str]) -> int:
        """Elements that the last rank has of the tensors of ``routes``: it may have fewer rows, or none."""
        rows = [row for unit in self.units for row in unit["tensors"] if row["route"] in routes]
        return sum(
            row["count"] * row["row"] * max(0, row["rows"] - (self.world - 1) * -(-row["rows"] // self.world))
            for row in rows
        )

    def scale(self) -> float:
        """What a rank updates of all that is trained."""
        everything = sum(_held(unit, 1, TRAINED) for unit in self.units)
        return self.held(TRAINED) / everything if everything else 1.0

    def gathers(self) -> tuple[list[int], list[int]]:
        """Bytes of each gather of a step: in forward, and again in backward."""
        whole = [self._whole(unit) for unit in self.units]
        return [n for n in whole if n], [n for n in whole[:-1] if n]

    def scatters(self, width: int) -> list[int]:
        """Bytes that each reduce-scatter of a step is given, at ``width`` bytes an element."""
        return [n for n in (width * self.world * _held(unit, self.world, TRAINED) for unit in self.units) if n]

    def gathered(self) -> int:
        """Bytes of whole parameters at backward's peak: the root's, a unit's beside the buffer that the next one comes
        in; the same of forward, a unit's beside the buffer that it came in."""
        *blocks, root = [self._whole(unit) for unit in self.units]
        pairs = [one + other for one, other in pairwise(blocks)] or [sum(blocks)]
        return root + max(*pairs, 2 * max(blocks, default=0))

    def sums(self, width: int, saved: float) -> int:
        """Bytes of whole gradients at backward's peak, sent at ``width`` bytes an element: those of the root, which
        wait for the end, and those of the unit at hand. ``saved`` bytes are kept for backward; a unit lets its part A
        of them go as its gradients come. So the peak is in the middle of the first unit that is left, at its end, or,
        where A is small, at the end of the next, beside what is still being sent of the first."""
        *blocks, root = [self.world * _held(unit, self.world, TRAINED) for unit in self.units]
        if not blocks:
            return WIDTH * root
        whole, sent, part = WIDTH * max(blocks), width * max(blocks), saved / len(blocks)
        return round(WIDTH * root + max(whole / 2, whole - part, sent + whole - 2 * part))

    def rounding(self) -> int:
        """Bytes by which a card's blocks are larger than what is kept in them."""
        return sum(
            _COPIES.get(row["route"], 1) * row["count"] * block_rest(WIDTH * _share(row, self.world))
            for unit in self.units
            for row in unit["tensors"]
        )

    def chunk(self) -> float:
        """The largest chunk that AdamW takes at a time, of the largest it would take of whole tensors."""
        return _chunk(self.units, self.world) / (_chunk(self.units, 1) or 1)

    def _whole(self, unit: Mapping[str, Json]) -> int:
        return WIDTH * self.world * _held(unit, self.world, EVERY)


def shards_of(draft: Mapping[str, Json], account: Mapping[str, Json]) -> Shards | None:
    """The shards of a draft's fleet; None where every rank has the whole model."""
    if not is_sharded(draft):
        return None
    return Shards(account["units"], sum(len(entry["members"]) for entry in draft["ranks"]))


def is_sharded(draft: Mapping[str, Json]) -> bool:
    """Whether the ranks of a plan or draft share one model. A plan from before there was the choice says nothing."""
    choice: Any = draft["exchange"].get("shard")
    return choice is not None and choice["chosen"] == "fsdp"


def _share(row: Mapping[str, Json], world: int) -> int:
    """Elements that a rank holds of one tensor of ``row``."""
    return -(-int(row["rows"]) // world) * int(row["row"])


def _held(unit: Mapping[str, Json], world: int, routes: Sequence[str]) -> int:
    return sum(int(row["count"]) * _share(row, world) for row in unit["tensors"] if row["route"] in routes)


def _chunk(units: Sequence[Mapping[str, Json]], world: int) -> int:
    rows = [row for unit in units for row in unit["tensors"] if row["route"] == "adamw"]
    largest = max((WIDTH * _share(row, world) for row in rows), default=0)
    together = WIDTH * sum(row["count"] * _share(row, world) for row in rows)
    return int(max(largest, min(CHUNK_BYTES, together)))
