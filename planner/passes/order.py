"""The passes in their order, and the draft that they make of three documents: a plan before it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.passes.capacity import capacity
from planner.passes.exchange import exchange
from planner.passes.fit import fit
from planner.passes.layout import lay_out
from planner.passes.policy import policy
from planner.passes.step import step
from schemas.form import Json

Document = Mapping[str, Json]
Pass = Callable[[Document, Document, Document, Document], dict[str, Json]]

PASSES: tuple[Pass, ...] = (policy, exchange, capacity, fit, step)
"""Each takes (request, record, account, draft) and gives a new draft; none changes what it was given."""


def draft_of(request: Document, record: Document, account: Document, passes: tuple[Pass, ...] = PASSES) -> Document:
    """The draft after ``passes``."""
    draft = lay_out(request, record, account)
    for each in passes:
        draft = each(request, record, account, draft)
    return draft
