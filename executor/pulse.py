"""Signs of life of a rank's own thread: what it does, and that it goes on with it. They tell slow work from work that
hangs, whatever an evaluation or a save takes in all: what is judged is how long nothing of it moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Work(NamedTuple):
    """What a rank is at. ``joint``: with every other rank, for which it may wait. ``compiles``: it is the first of its
    kind in this process, in which kernels may be made."""

    what: str
    joint: bool
    compiles: bool


class Pulse:
    """Told by the thread itself, read from beside it (`executor.watch`). ``work``: what it is at; None while it may
    wait for others for long."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self._beats = 0
        self._known = {""}

    def beat(self) -> None:
        """A window is evaluated, a piece of a file is on the disk: the work goes on."""
        self._beats += 1

    def now(self) -> tuple[Work, int] | None:
        """What moves as long as the work does; None where there is none."""
        work = self.work
        return None if work is None else (work, self._beats)

    @contextmanager
    def at(self, what: str, kind: str = "", joint: bool = False) -> Iterator[None]:
        """Around a piece of work. Of a ``kind`` ("": that runs no kernels) the first may compile. Where it raises, it
        stays what the rank is at: there it ended."""
        self.work = Work(what, joint, kind not in self._known)
        self.beat()
        yield
        self._known.add(kind)
        self.work = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what in a piece of work waits for other ranks, however long they take."""
        work, self.work = self.work, None
        yield
        self.work = work
