"""The ledger that passes write a plan with: a number enters with the pointers it was computed from, or not at all."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from schemas.document import decision, is_decision, is_reading, reading, resolve, unknown
from schemas.form import Json

_MOST_CORNERS = 2**10


class Ledger:
    """A draft of a plan under one pass. It works on a copy, so a pass leaves what it was given as it was."""

    def __init__(self, draft: Mapping[str, Json]) -> None:
        self.draft: dict[str, Json] = copy.deepcopy(dict(draft))

    def put(self, pointer: str, item: Json) -> Json:
        """Set ``item`` at ``pointer``, making the objects on the way, and give it back."""
        *folders, last = pointer.split("/")[1:]
        place: Json = self.draft
        for key in folders:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        place[last] = item
        return item

    def value(self, pointer: str) -> Any:
        """The value of the reading, the choice of the decision, or the plain value at ``pointer``."""
        return plain(resolve(self.draft, pointer))

    def compute(
        self,
        pointer: str,
        unit: str,
        formula: Callable[..., Any],
        inputs: Sequence[str],
        why: str,
        *,
        measurable: bool = False,
    ) -> Any:
        """Put the reading ``formula(*values of inputs)`` at ``pointer`` and return its value.

        A formula over an unknown is unknown. Where an input carries low and high, the result's are the least and the
        greatest over all corners of the inputs' ranges: exact for formulas monotone in each input. An input that is
        named twice is one input.
        """
        items = [resolve(self.draft, source) for source in inputs]
        missing = [source for source, item in zip(inputs, items, strict=True) if is_unknown(item)]
        if missing:
            why = f"needs {', '.join(missing)}, which could not be read ({why})"
            self.put(pointer, unknown(unit, why, inputs=inputs, measurable=measurable))
            return None
        value = formula(*[plain(item) for item in items])
        low, high = _range(formula, inputs, items)
        if low is not None and high is not None:  # a formula that is not monotone may have it outside of all corners
            low, high = min(low, value), max(high, value)
        item = reading(value, unit, "computed", why, inputs=inputs, low=low, high=high, measurable=measurable)
        return self.put(pointer, item)["value"]

    def decide(
        self,
        pointer: str,
        asked: Json,
        chosen: Json,
        why: str,
        *,
        outcome: str | None = None,
        inputs: Iterable[str] = (),
        rejected: Sequence[Mapping[str, Json]] = (),
    ) -> Json:
        """Put a decision at ``pointer`` and return its choice. Without ``outcome``: granted if asked for by value,
        default if nothing or "auto" was asked."""
        settled = outcome or ("default" if asked in (None, "auto") else "granted")
        self.put(pointer, decision(asked, chosen, settled, why, inputs=inputs, rejected=rejected))
        return chosen


def plain(item: Json) -> Any:
    """The value of a reading, the choice of a decision, or ``item`` itself."""
    if is_reading(item):
        return item["value"]
    return item["chosen"] if is_decision(item) else item


def is_unknown(item: Json) -> bool:
    return is_reading(item) and item["value"] is None


def _range(
    formula: Callable[..., Any], inputs: Sequence[str], items: Sequence[Json]
) -> tuple[float | None, float | None]:
    named = dict(zip(inputs, items, strict=True))
    ends = [sorted({item["low"], item["high"]}) if _has_range(item) else [plain(item)] for item in named.values()]
    if all(len(choices) == 1 for choices in ends):
        return None, None
    values = []
    for corner in _corners(ends):
        chosen = dict(zip(named, corner, strict=True))
        values.append(formula(*[chosen[source] for source in inputs]))
    return min(values), max(values)


def _corners(ends: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """All corners; of too many, those that leave at most one input apart from the others: a range from within."""
    if math.prod(map(len, ends)) <= _MOST_CORNERS:
        yield from itertools.product(*ends)
        return
    for side, other in ((0, -1), (-1, 0)):
        corner = [choices[side] for choices in ends]
        yield tuple(corner)
        for place, choices in enumerate(ends):
            yield (*corner[:place], choices[other], *corner[place + 1 :])


def _has_range(item: Json) -> bool:
    return is_reading(item) and "low" in item
