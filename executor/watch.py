"""What looks after a rank from beside it. A rank's own thread can hang where no exception and no signal reaches it: in
the queue of a card whose peer is gone, in a file system, in a model's code. A second thread sees that, and ends the
rank in its stead: recorded, told, and soon.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

import psutil
import torch

from executor.meeting import SETUP_SECONDS, Meeting
from executor.pulse import Pulse, Work

Value = TypeVar("Value")

PATIENCE_SECONDS = 2.0
"""What a rank's own thread has to notice by itself that another rank has ended."""
SILENT_SECONDS = 16.0
"""How long another rank's watch may be silent: its process is stopped (SIGSTOP), or hangs in C with the interpreter's
lock."""
_POLL_SECONDS = 0.25
_COMPUTES_SHARE = 0.05
"""Who makes kernels keeps a core busy, its own or a compiler's; who hangs without a card waits, for less than this."""
_LIBRARIES = (os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"])


def identity() -> list[float]:
    """This process as other ranks of the node know it again: its pid, and the moment it began (s)."""
    own = psutil.Process()
    return [own.pid, own.create_time()]


class Peers:
    """The processes of the other ranks by their `identity`, in order of ranks. A pid that is used again is none of
    them; one that cannot be seen from here (a container of its own) is left out."""

    def __init__(self, rank: int, identities: Sequence[Sequence[float]]) -> None:
        self._processes: dict[int, psutil.Process] = {}
        for other, (pid, began) in enumerate(identities):
            with suppress(psutil.Error):
                found = psutil.Process(int(pid))
                if other != rank and abs(found.create_time() - began) < 1.0:
                    self._processes[other] = found

    def gone(self) -> list[int]:
        """The ranks whose process has ended."""
        return [rank for rank in self._processes if rank not in self.living()]

    def living(self) -> list[int]:
        """The ranks whose process runs, or is stopped."""
        return [rank for rank, process in self._processes.items() if _lives(process)]

    def stopped(self) -> list[int]:
        """The ranks whose process is stopped (SIGSTOP): it says nothing of itself."""
        return [rank for rank in self.living() if _status(self._processes[rank]) == psutil.STATUS_STOPPED]

    def kill(self, ranks: Iterable[int]) -> None:
        """End what no longer hears: a stopped process, or one that hangs."""
        for rank in ranks:
            if rank in self._processes:
                with suppress(psutil.Error):
                    self._processes[rank].kill()


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and _status(process) not in (psutil.STATUS_ZOMBIE, None)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.Error:
        return None


class Stall:
    """Looks at a ``pulse``, again and again, until its work has not moved for the ``patience`` (s) that it has.

    What is ``excused``, as all that may compile, has more, up to the setup's, for as long as the process, or a compiler
    that it started, computes.
    """

    def __init__(
        self,
        pulse: Pulse,
        patience: Callable[[Work], float],
        excused: Callable[[Work], bool] = lambda work: work.compiles,
    ) -> None:
        self._pulse, self._patience, self._excused = pulse, patience, excused
        self._last: tuple[Work, int] | None = None
        self._looks, self._allowed, self._computed = 0, 0.0, 0.0

    def found(self) -> Work | None:
        """The work that has stalled."""
        # Counted in looks, not by the clock: a whole run that was suspended goes on.
        now = self._pulse.now()
        if now is None or now != self._last:
            self._last, self._looks = now, 0
            if now is not None:
                self._allowed = self._patience(now[0])
            return None
        work, self._looks = now[0], self._looks + 1
        excused = self._excused(work)
        if self._looks == 1 and excused:
            self._computed = computed()
        if self._looks * _POLL_SECONDS <= self._allowed:
            return None
        if excused and self._allowed < SETUP_SECONDS:
            more, before, self._computed = self._patience(work), self._computed, computed()
            if self._computed - before > _COMPUTES_SHARE * more:
                self._allowed += more
                return None
        return work

    def excuse(self) -> None:
        """Be silent of what has stalled, until it moves."""
        self._allowed = math.inf


class Watch:
    """While the block runs, looks after the thread that runs it. Where that one does not notice another rank's end or
    that it is to leave at once, stalls, or another rank's watch is silent, ``take`` is called, on the watch's thread;
    the other is then held where it would leave the block.

    Args:
        insisted: tells once of a signal that came a second time.
        take: told that signal, and the work that has stalled.
        tell: told of work that has stalled, instead, where nobody waits for this rank.
    """

    def __init__(
        self,
        meeting: Meeting,
        peers: Peers,
        stall: Stall,
        insisted: Callable[[], str | None],
        take: Callable[[str | None, Work | None], None],
        tell: Callable[[Work], None] | None = None,
    ) -> None:
        self._meeting, self._peers, self._stall, self._insisted = meeting, peers, stall, insisted
        self._take, self._tell = take, tell
        self._over, self._ending = threading.Event(), threading.Lock()

    def __enter__(self) -> Watch:
        self._meeting.beat()  # from the first moment on
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        while not self._ending.acquire(blocking=False):  # the rank ends, whatever signals come meanwhile
            with suppress(BaseException):
                time.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        trouble, stopped = 0, None
        while not self._over.wait(_POLL_SECONDS):
            stopped = stopped or self._insisted()
            trouble += 1 if trouble or stopped or self._meeting.anyone_ended() or self._peers.gone() else 0
            silent = self._meeting.beat()
            stalled = self._stall.found()
            if stalled is not None and self._tell is not None:
                self._tell(stalled)
                self._stall.excuse()
                stalled = None
            if stalled or silent * _POLL_SECONDS > SILENT_SECONDS or trouble * _POLL_SECONDS > PATIENCE_SECONDS:
                if self._ending.acquire(blocking=False):
                    self._take(stopped, stalled)
                return


def computed() -> float:
    """Seconds of processors that this process and those it started have used, but for the thread that asks."""
    own = psutil.Process()
    used = sum(own.cpu_times()[:4]) - time.thread_time()  # the four: itself, and its children that have ended
    for child in own.children(recursive=True):
        with suppress(psutil.Error):
            used += sum(child.cpu_times()[:4])
    return used


def main_is_at() -> str:
    """Where the main thread is: the innermost function that is neither Python's nor torch's own, with file and line."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "no place that Python knows"
    return f"{found.f_code.co_name} ({Path(found.f_code.co_filename).name}:{found.f_lineno})"


def keep_stacks(path: Path) -> None:
    """Write every thread's stack to ``path``, where that can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)


def while_it_moves(stall: Stall, job: Callable[[], Value]) -> Value | None:
    """What ``job`` gives, however long it takes; None where what it does stalls: then it is left to itself."""
    found: list[Value] = []
    thread = threading.Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    while thread.is_alive() and stall.found() is None:
        thread.join(_POLL_SECONDS)
    return found[0] if found else None


def within(seconds: float, job: Callable[[], Value]) -> Value | None:
    """What ``job`` gives, or None where that takes longer than ``seconds``: then it is left to itself."""
    found: list[Value] = []
    thread = threading.Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
