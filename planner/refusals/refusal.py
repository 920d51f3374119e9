"""One refusal: a stable code and a text of four parts."""

from __future__ import annotations

from dataclasses import dataclass


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
        head = f"refused ({self.code}): {self.asked}"
        return f"{head}\n  found:  {self.found}\n  why:    {self.why}\n  to fix: {self.escape}"
