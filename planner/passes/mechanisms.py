"""Sets of memory mechanisms: which there are for a rank, and the time of the best of those that fit."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from planner.passes.cost import Rank
from schemas.form import Json

Mechanisms = tuple[str, ...]
Rows = Mapping[str, Mapping[str, Json]]


def names_of(rows: Rows, scope: str, kinds: Collection[str]) -> Mechanisms:
    """The mechanisms of an account that are decided for a "rank" or for the "fleet" and run on all ``kinds``."""
    return tuple(name for name, row in rows.items() if row["scope"] == scope and set(kinds) <= set(row["devices"]))


def subsets(names: Sequence[str]) -> list[Mechanisms]:
    """All subsets, smallest first, each in the order of ``names``."""
    return [subset for size in range(len(names) + 1) for subset in itertools.combinations(names, size)]


def open_sets(rows: Rows, kind: str, fit: Json, fleet: Mechanisms | None = None) -> list[Mechanisms]:
    """The sets that --fit may still choose of for one rank: every subset of its own, beside the ``fleet``'s (None: not
    decided yet, so all of them, which save most and cost no compute). None but the empty set without --fit."""
    if fit in (None, "off"):
        return [()]
    shared = names_of(rows, "fleet", [kind]) if fleet is None else fleet
    return [(*shared, *own) for own in subsets(names_of(rows, "rank", [kind]))]


def least_seconds(rank: Rank, b: int, t: int, sets: Sequence[Mechanisms], limit: float | None) -> float:
    """Forward and backward under the fastest of ``sets`` that stays within ``limit``; infinite where none does."""
    fitting = [engaged for engaged in sets if limit is None or rank.peak(b, t, engaged) <= limit]
    return min((rank.compute_seconds(b, t, engaged) for engaged in fitting), default=float("inf"))
