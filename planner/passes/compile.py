"""A plan is a pure function of three documents: request, record, account."""

from __future__ import annotations

from planner.passes.order import Document, draft_of
from planner.refusals.rules import refuse
from schemas.form import Json
from schemas.seal import seal


def compile_plan(request: Document, record: Document, account: Document) -> dict[str, Json]:
    """The sealed plan that the three documents make. The same three give the same bytes on every machine.

    Raises:
        Refused: what was asked cannot be honoured; every reason is in it, and no plan is made.
    """
    facts = {"request": request, "record": record, "account": account}
    refuse("request", {}, facts)
    draft = draft_of(request, record, account)
    refuse("plan", draft, facts)
    return seal(draft)
