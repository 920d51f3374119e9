"""What is said to a person on stderr. No one needs to listen: a pipe that was closed ends no run. Imports nothing of
Dormouse.
"""

from __future__ import annotations

import os
import sys
from typing import IO


def say(text: str, out: IO[str] | None = None) -> None:
    """One message on stderr (or ``out``); where that takes no more, nothing is written there from then on."""
    stream = sys.stderr if out is None else out
    try:
        print(f"dormouse: {_shown(text)}", file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: it was closed
        if out is None:
            _close_ears()


def _shown(text: str) -> str:
    """``text`` with what would steer a terminal shown as its code: a plan's words are told too. Lines stay lines."""
    marks = (mark if mark.isprintable() or mark == "\n" else mark.encode("unicode_escape").decode() for mark in text)
    return "".join(marks)


def _close_ears() -> None:
    # The descriptor itself, not only Python's stream: else what is left in its buffer fails once more at exit.
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    except OSError:
        return
