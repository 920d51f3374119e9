"""docs/refusals.md, generated from the list of refusals: ``python -m planner.refusals.page``."""

from __future__ import annotations

from planner.refusals.rules import RULES

_WHEN = {
    "request": "While planning, on what was asked",
    "plan": "While planning, on the finished draft",
    "start": "When a run starts",
    "running": "After the discarded first step, and while running",
}
_HEAD = """# Refusals

Dormouse never replaces silently: what was asked for explicitly is honoured or refused (exit code 3), and only `auto`
may fall back, counted. Each refusal has a stable code and a text of four parts: what was asked, what was found (the
card, the number), why that cannot be honoured, and the way out.

This page is generated from the list in `planner/refusals/rules.py` by `make docs`.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD]
    for when, title in _WHEN.items():
        rows = [f"| `{rule.code}` | {rule.meaning} |" for rule in RULES if rule.when == when]
        parts.append("\n".join([f"## {title}", "", "| code | refuses |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
