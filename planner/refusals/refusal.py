"""One refusal: a stable code and a text of four parts."""

from __future__ import annotations

from dataclasses import dataclass

from planner.views.words import clean


@dataclass(frozen=True)
class Refusal:
    """What was asked, what was found (the card, the number), why that cannot be honoured, and the way out: the exact
    flag or command."""

    code: str
    asked: str
    found: str
    why: str
    escape: str

    def text(self) -> str:
        asked, found, why, escape = map(clean, (self.asked, self.found, self.why, self.escape))
        return f"refused ({self.code}): {asked}\n  found:  {found}\n  why:    {why}\n  to fix: {escape}"
