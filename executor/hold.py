"""One run at a time of a plan, and in a run's folder: rank 0 holds a file of each for as long as it runs."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOCKS = Path("/proc/locks")


class InUse(Exception):
    """Another run is under way in the same place. The message says which process; the exit code is 4."""


class Hold:
    """Files that this process holds until it ends, however that is, or leaves the ``with`` block."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def take(self, path: Path) -> str | None:
        """Hold the file at ``path``, where there is one; why not, where another process holds it.

        On a file system without locks nothing can be held, and nothing is refused.
        """
        if path in self._handles:
            return None
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
        except OSError:  # nothing there yet, or not to be read: what cannot be is told where it is needed
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(handle) if isinstance(error, BlockingIOError) else ""
            os.close(handle)
            return f"another run{holder} holds {path}" if isinstance(error, BlockingIOError) else None
        self._handles[path] = handle
        return None


def _holder(handle: int) -> str:
    """`` (process 123)``, where the kernel lists who locked the file behind ``handle``."""
    place = os.fstat(handle)
    file = f"{os.major(place.st_dev):02x}:{os.minor(place.st_dev):02x}:{place.st_ino}"
    with suppress(OSError):
        for row in map(str.split, LOCKS.read_text().splitlines()):
            if len(row) > 5 and row[1] == "FLOCK" and row[5] == file:
                return f" (process {row[4]})"
    return ""
