"""Where ranks meet before there is a process group, and after one has died: a key-value store, with plain JSON in it.

Facts are gathered here rather than by a collective, so that ranks with unlike plans, or without the planned backend,
still hear of each other; and a rank that fails leaves its cause here, so that the others can name it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from schemas.form import Json

SETUP_SECONDS = 30 * 60  # kernel tuning takes minutes
_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.5


class RankFailed(Exception):
    """A rank failed. The message begins with the rank that failed first and gives its cause; the exit code is 4."""


class Meeting:
    """The meeting of ``size`` ranks. One rank needs no store and meets itself."""

    def __init__(self, rank: int, size: int, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store = None if store is None else PrefixStore("dormouse", store)
        self._round = 0

    def gather(self, value: Json, seconds: float = SETUP_SECONDS) -> list[Json]:
        """Every rank's ``value``, in order of ranks, on every rank. All ranks call it in the same order.

        Raises:
            RankFailed: a rank left its cause of failure meanwhile, or did not come within ``seconds``.
        """
        if self._store is None:
            return [value]
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        keys = [f"{self._round}/{rank}" for rank in range(self.size)]
        self._await(lambda: self._missing(keys), seconds)
        return [json.loads(self._store.get(key)) for key in keys]

    def leave(self, seconds: float = 10.0) -> None:
        """Say that nothing more will be read here. Rank 0, which may hold the store, waits for the others to say it."""
        if self._store is None:
            return
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            keys = [f"left/{rank}" for rank in range(self.size)]
            end = time.monotonic() + seconds
            while self._missing(keys) and not self._failures() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)

    def fail(self, cause: str) -> None:
        """Leave this rank's own cause of failure for the others."""
        self._leave_word(f"failed/{self.rank}", cause)

    def end(self) -> None:
        """Leave word that this rank ends for no fault of its own: it was stopped, or lost another."""
        self._leave_word(f"ended/{self.rank}", "")

    def culprit(self, seconds: float = 0.0) -> str | None:
        """The rank that failed first and its cause, as the other ranks left word; None where nobody is at fault.

        Waits up to ``seconds`` for a cause, or for a word of every other rank; a rank without one is gone.
        """
        end = time.monotonic() + seconds
        while True:
            for rank, cause in self._failures().items():
                return f"rank {rank}: {cause}"
            silent = self._silent()
            if not silent or time.monotonic() >= end:
                break
            time.sleep(_POLL_SECONDS)
        return f"rank {silent[0]}: is gone and left no word" if silent and seconds else None

    def _silent(self) -> list[int]:
        if self._store is None:
            return []
        try:
            return [rank for rank in range(self.size) if rank != self.rank and not self._has(f"ended/{rank}")]
        except RuntimeError:  # the store lived in rank 0
            return [0]

    def _leave_word(self, key: str, word: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, word)
            except RuntimeError:  # the store lived in a rank that is gone: no one is left to read
                return

    def _failures(self) -> dict[int, str]:
        if self._store is None:
            return {}
        try:
            others = [rank for rank in range(self.size) if rank != self.rank and self._has(f"failed/{rank}")]
            return {rank: self._store.get(f"failed/{rank}").decode() for rank in others}
        except RuntimeError:  # the store lived in a rank that is gone
            return {}

    def _has(self, key: str) -> bool:
        assert self._store is not None
        return bool(self._store.check([key]))

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._has(key)]

    def _await(self, missing: Callable[[], list[int]], seconds: float) -> None:
        start, pause = time.monotonic(), _POLL_SECONDS
        while late := missing():
            for rank, cause in self._failures().items():
                raise RankFailed(f"rank {rank}: {cause}")
            if time.monotonic() - start > seconds:
                raise RankFailed(f"rank {late[0]}: did not come to the meeting within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(_LONGEST_POLL_SECONDS, pause * 1.2)


def meet(rank: int, size: int) -> tuple[Meeting, Any]:
    """The meeting of a world as torchrun sets it out in the environment, and the store it is held in (None alone)."""
    if size == 1:
        return Meeting(rank, size), None
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=SETUP_SECONDS)))
    return Meeting(rank, size, store), store
