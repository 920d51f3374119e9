"""The bytes of a file of data: held in memory, or read piece by piece from the open file. Never mapped: a mapped file
that is cut while it is read kills the process (SIGBUS), and one that is written over changes under the run's feet.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HELD_SHARE = 4
"""A file is held in memory where it takes at most one part in this many of what is free, for each rank of the node."""


class DataChanged(Exception):
    """A file of data was cut or written to while the run read it: what was read is no longer what was planned."""


class OnDisk:
    """A large file, as uint8 [length]: each slice is read anew, and proved to be of the file as it was opened.

    The file stays open: a new one in its place is not seen. Raises OSError where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDONLY)
        self._opened = self._state()

    def __len__(self) -> int:
        return self._opened[0]

    def __getitem__(self, place: slice) -> Bytes:
        """The bytes from start to stop. Raises DataChanged."""
        start, stop, _ = place.indices(len(self))
        parts, at = [], start
        while at < stop:
            part = os.pread(self._handle, stop - at, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        # Looked at after the reading: then the bytes are those of the file as it was opened.
        found = self._state()
        if found != self._opened or at < stop:
            what = f"{self._opened[0]} bytes at the start, {found[0]} now"
            written = "" if found[1] == self._opened[1] else "; it was written to"
            raise DataChanged(f"data-changed while running: {self._path}: {what}{written}")
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def _state(self) -> tuple[int, int]:
        """(size in bytes, moment of the last write in ns)."""
        found = os.fstat(self._handle)
        return found.st_size, found.st_mtime_ns


def read(path: Path) -> Bytes | OnDisk:
    """The file's bytes, in memory where there is room (`HELD_SHARE`). Raises OSError."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if path.stat().st_size * ranks * HELD_SHARE > psutil.virtual_memory().available:
        return OnDisk(path)
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)
