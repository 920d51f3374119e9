"""Ctrl-C, SIGTERM and SIGHUP in a run. While it trains, the first is a wish: the ranks agree on a step, save, and
leave. A second one, and any at another time, leaves at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from executor.launch import ENDS, end_by, ending

ECHO_SECONDS = 1.0
"""torchrun passes on to its ranks the Ctrl-C that the terminal has sent to them already: both are one."""
GRACE_SECONDS = 15.0
"""What a rank that is asked to stop waits for others while it saves: torchrun, which asks those that are left when one
is gone, kills them after 30."""


class Stopping:
    """What signals asked of this rank. ``failing`` says whether another rank has ended: then a signal is torchrun's,
    which ends those that are left."""

    def __init__(self, failing: Callable[[], bool] = lambda: False) -> None:
        self.name: str | None = None
        self._failing = failing
        self._training = self._ended = False
        self._heard = 0.0
        self._ear: int | None = None
        self._first: tuple[str, float] | None = None

    @property
    def asked(self) -> bool:
        """Whether the run is to stop after a step."""
        return self.name is not None

    def overdue(self) -> bool:
        """Whether it was asked so long ago that the others can no longer be waited for."""
        return self.asked and time.monotonic() - self._heard > GRACE_SECONDS

    def insisted(self) -> str | None:
        """The signal that came a second time. Asked from beside a thread that hangs in C and hears none itself: the
        bytes are written by the system's own handler."""
        if self._ear is None:
            return None
        with suppress(BlockingIOError):
            for number in os.read(self._ear, 64):
                if number in ENDS and self._first is None:
                    self._first = signal.Signals(number).name, time.monotonic()
                elif number in ENDS and self._first is not None and time.monotonic() - self._first[1] > ECHO_SECONDS:
                    return self._first[0]
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals here, where this thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._ear, mouth = os.pipe()
        for end in (self._ear, mouth):
            os.set_blocking(end, False)
        before = {number: signal.signal(number, self._hear) for number in ending()}
        woken = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(mouth)
            os.close(self._ear)
            self._ear = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """In the block a first signal waits for the end of a step."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def take(self) -> None:
        """The run stops now: no signal disturbs it any more."""
        self._ended = True

    def _hear(self, number: int, _: Any) -> None:
        if self._ended:
            return
        echoed = self.asked and time.monotonic() - self._heard < ECHO_SECONDS
        if self._training and not self._failing() and (echoed or not self.asked):
            if not echoed:
                self.name, self._heard = signal.Signals(number).name, time.monotonic()
            return
        self._ended = True  # once: what follows is the recording
        end_by(number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without signals: torchrun sends SIGTERM to the ranks that are left as soon as one of a failed run has gone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
