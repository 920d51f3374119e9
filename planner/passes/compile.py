"""A plan is a pure function of three documents: request, record, account."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.passes.capacity import capacity
from planner.passes.exchange import exchange
from planner.passes.fit import fit
from planner.passes.layout import lay_out
from planner.passes.policy import policy
from planner.passes.step import step
from planner.refusals.rules import refuse
from schemas.form import Json
from schemas.seal import seal

Document = Mapping[str, Json]
Pass = Callable[[Document, Document, Document, Document], dict[str, Json]]

PASSES: tuple[Pass, ...] = (policy, exchange, capacity, fit, step)
"""Each takes (request, record, account, draft) and gives a new draft; none changes what it was given."""


def compile_plan(request: Document, record: Document, account: Document) -> dict[str, Json]:
    """The sealed plan that the three documents make. The same three give the same bytes on every machine.

    Raises:
        Refused: what was asked cannot be honoured; every reason is in it, and no plan is made.
    """
    facts = {"request": request, "record": record, "account": account}
    refuse("request", {}, facts)
    draft = lay_out(request, record, account)
    for each in PASSES:
        draft = each(request, record, account, draft)
    refuse("plan", draft, facts)
    return seal(draft)
