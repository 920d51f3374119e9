"""What looks after a rank from beside it. A rank's own thread can hang where no exception and no signal reaches it: in
the queue of a card whose peer is gone, in a file system, in a model's code. A second thread sees that, and ends the
rank in its stead: recorded, told, and soon.
"""

from __future__ import annotations

import faulthandler
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

from executor.meeting import Meeting

Value = TypeVar("Value")

PATIENCE_SECONDS = 2.0
"""What a rank's own thread has to notice by itself that another rank has ended."""
STOPPED_SECONDS = 16.0
"""How long another rank may be stopped (SIGSTOP), at a save too, where ranks wait for each other without a deadline."""
_POLL_SECONDS = 0.25
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


class Watch:
    """While the block runs, looks after the thread that runs it. Where that one does not notice another rank's end or
    that it is to leave at once, waits for a rank that is stopped, or stays in one step beyond ``deadline`` (s; None:
    its collectives have their own), ``take`` is called, on the watch's thread; the other is then held where it would
    leave the block.

    Args:
        under_way: the step that the thread is in, None between steps.
        insisted: tells once of a signal that came a second time.
    """

    def __init__(
        self,
        meeting: Meeting,
        peers: Peers,
        under_way: Callable[[], int | None],
        insisted: Callable[[], str | None],
        deadline: float | None,
        take: Callable[[str | None], None],
    ) -> None:
        self._meeting, self._peers, self._under_way, self._insisted = meeting, peers, under_way, insisted
        self._deadline, self._take = deadline, take
        self._over, self._ending = threading.Event(), threading.Lock()

    def __enter__(self) -> Watch:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        while not self._ending.acquire(blocking=False):  # the rank ends, whatever signals come meanwhile
            with suppress(BaseException):
                time.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        # Counted in looks, not by the clock: a whole run that was suspended goes on.
        trouble, inside, still, step, stopped = 0, 0, 0, None, None
        while not self._over.wait(_POLL_SECONDS):
            stopped = stopped or self._insisted()
            trouble += 1 if trouble or stopped or self._meeting.anyone_ended() or self._peers.gone() else 0
            now = self._under_way()
            inside, step = (inside + 1 if now is not None and now == step else 0), now
            still = still + 1 if self._peers.stopped() else 0
            late = self._deadline is not None and inside * _POLL_SECONDS > self._deadline
            if late or still * _POLL_SECONDS > STOPPED_SECONDS or trouble * _POLL_SECONDS > PATIENCE_SECONDS:
                if self._ending.acquire(blocking=False):
                    self._take(stopped)
                return


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


def within(seconds: float, job: Callable[[], Value]) -> Value | None:
    """What ``job`` gives, or None where that takes longer than ``seconds``: then it is left to itself."""
    found: list[Value] = []
    thread = threading.Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
