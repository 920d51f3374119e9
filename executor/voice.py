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
        print(f"dormouse: {text}", file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: it was closed
        if out is None:
            _close_ears()


def _close_ears() -> None:
    # The descriptor itself, not only Python's stream: else what is left in its buffer fails once more at exit.
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    except OSError:
        return
