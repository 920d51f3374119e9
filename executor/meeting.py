"""Where ranks meet before there is a process group, and after one has died: a key-value store, with plain JSON in it.

Facts are gathered here rather than by a collective, so that ranks with unlike plans, or without the planned backend,
still hear of each other; and a rank that fails leaves its cause here, so that the others can name it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from schemas.form import Json

SETUP_SECONDS = 30 * 60  # kernel tuning takes minutes
_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.5
_GONE = "is gone and left no word"
_LATE_SECONDS = 0.5  # ranks in step come to a collective closer together


class RankFailed(Exception):
    """A rank failed. The message begins with the rank that failed first and gives its cause; the exit code is 4."""


class Word(NamedTuple):
    """What a rank leaves that ends for no fault of its own: the seconds since it came to its last collective, how many
    it came to in all, where it hangs, and the signal that stopped it; None where it has no answer."""

    waited: float | None = None
    entered: int | None = None
    hangs: str | None = None
    stopped: str | None = None


class Meeting:
    """The meeting of ``size`` ranks. One rank needs no store and meets itself."""

    def __init__(self, rank: int, size: int, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store = None if store is None else PrefixStore("dormouse", store)
        self._round = 0
        self._word = Word()
        self._given_up: list[int] = []
        self._heard: dict[int, tuple[int, int]] = {}

    def gather(
        self, value: Json, seconds: float = SETUP_SECONDS, over: Callable[[], bool] = lambda: False
    ) -> list[Json]:
        """Every rank's ``value``, in order of ranks, on every rank. All ranks call it in the same order.

        Raises:
            RankFailed: a rank left its cause of failure meanwhile, or did not come within ``seconds`` or before the
                waiting was ``over``.
        """
        if self._store is None:
            return [value]
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        keys = [f"{self._round}/{rank}" for rank in range(self.size)]
        self._await(lambda: self._missing(keys), seconds, over)
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

    def beat(self) -> int:
        """Say once more that this process runs; gives for how many calls the most silent of those that ever said so
        has not."""
        if self._store is None:
            return 0
        try:
            said = [self._store.add(f"beat/{rank}", rank == self.rank) for rank in range(self.size)]
        except RuntimeError:  # the store lived in a rank that is gone
            return 0
        for rank, times in enumerate(said):
            before, missed = self._heard.get(rank, (0, 0))
            self._heard[rank] = times, missed + 1 if 0 < times == before else 0
        return max(missed for _, missed in self._heard.values())

    def fail(self, cause: str) -> None:
        """Leave this rank's own cause of failure for the others."""
        self._leave_word(f"failed/{self.rank}", cause)

    def end(self, word: Word = Word()) -> None:  # noqa: B008  # it is immutable
        """Leave word that this rank ends for no fault of its own: it was stopped, or it lost another."""
        self._word = word
        self._leave_word(f"ended/{self.rank}", json.dumps(word))

    def give(self, value: Json) -> None:
        """Leave a value for the one that will tell of the end."""
        self._leave_word(f"given/{self.rank}", json.dumps(value))

    def given(self, seconds: float, living: Collection[int] = ()) -> dict[int, Json]:
        """What the other ranks gave, waited for up to ``seconds``: of those that left word of their end, and of the
        ``living``, which will."""
        if self._store is None:
            return {}
        end = time.monotonic() + seconds
        try:
            while True:
                others = [rank for rank in range(self.size) if rank != self.rank]
                there = [rank for rank in others if self._has(f"given/{rank}")]
                missing = [rank for rank in others if rank not in there and (rank in living or self._left_word(rank))]
                if not missing or time.monotonic() >= end:
                    return {rank: json.loads(self._store.get(f"given/{rank}")) for rank in there}
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store lived in a rank that is gone
            return {}

    def culprit(self, seconds: float = 0.0, silence: str | None = None, late: str | None = None) -> str | None:
        """The rank that failed first and its cause, as the other ranks left word; None where nobody is at fault.

        Waits up to ``seconds`` for a cause, or for a word of every other rank. Ranks without one are named with
        ``silence`` (None: they are gone). Where all left word, it is the one that hangs before a collective which
        another came to (named with ``late``), or that came to one long after the others.
        """
        end = time.monotonic() + seconds
        while True:
            for rank, cause in self._failures().items():
                return f"rank {rank}: {cause}"
            silent = self.silent()
            if not silent or time.monotonic() >= end:
                break
            time.sleep(_POLL_SECONDS)
        if silent:
            self._given_up = silent if seconds else []
            return f"rank {', '.join(map(str, silent))}: {silence or _GONE}" if seconds else None
        return self._behind(late or silence) or self._late()

    def stopped(self) -> str | None:
        """The signal that stopped a rank, by the first word that holds one."""
        return next((word.stopped for word in self._all_words().values() if word.stopped is not None), None)

    def stumble(self) -> None:
        """Leave word that this rank's smoke launch did not come through, for ranks that wait for it in theirs."""
        self._leave_word("stumbled", "")

    def anyone_stumbled(self) -> bool:
        """Whether a rank's smoke launch did not come through, or a rank ended."""
        return self._store is not None and (self._has("stumbled") or self.anyone_ended())

    def anyone_ended(self) -> bool:
        """Whether another rank left word of its end."""
        return bool(self._failures() or self._words())

    def speaks(self, seconds: float) -> bool:
        """Whether this rank is the one that records the end and tells it: the lowest of those that left word.

        Waits up to ``seconds`` for a word of the ranks below it that `culprit` has not waited for in vain already; at
        most one rank is told yes.
        """
        if self._store is None:
            return True
        end = time.monotonic() + seconds
        try:
            lower = [rank for rank in range(self.rank) if rank not in self._given_up]
            while not (below := [rank for rank in lower if self._left_word(rank)]):
                if not lower or time.monotonic() >= end:
                    break
                time.sleep(_POLL_SECONDS)
            return not below and self._store.compare_set("teller", "", str(self.rank)) == str(self.rank).encode()
        except RuntimeError:  # the store lived in rank 0, which is gone
            return self.rank <= 1

    def _behind(self, late: str | None) -> str | None:
        """Of the ranks that hang the one that came to the fewest collectives, where another came to more."""
        words = self._all_words()
        came = {rank: word.entered for rank, word in words.items() if word.entered is not None}
        hang = [rank for rank in came if words[rank].hangs is not None]
        last = min(hang, key=lambda rank: came[rank], default=None)
        if last is None or came[last] == max(came.values()):
            return None
        return f"rank {last}: {late or 'did not come to the exchange'}: it hangs in {words[last].hangs}"

    def _late(self) -> str | None:
        """The rank that came to the lost collective last, where the first had waited twice as long for it."""
        waits = {rank: word.waited for rank, word in self._all_words().items() if word.waited is not None}
        if len(waits) < self.size or self.size < 2:
            return None
        last, longest = min(waits, key=lambda rank: waits[rank]), max(waits.values())
        if longest < _LATE_SECONDS + 2 * waits[last]:
            return None
        return f"rank {last}: came to the ranks' exchange only after another had waited {longest:.0f} s for it"

    def _all_words(self) -> dict[int, Word]:
        return {**self._words(), self.rank: self._word}

    def _words(self) -> dict[int, Word]:
        """What each other rank that ended left as its word."""
        if self._store is None:
            return {}
        try:
            others = [rank for rank in range(self.size) if rank != self.rank and self._has(f"ended/{rank}")]
            return {rank: Word(*json.loads(self._store.get(f"ended/{rank}"))) for rank in others}
        except RuntimeError:  # the store lived in a rank that is gone
            return {}

    def _left_word(self, rank: int) -> bool:
        return self._has(f"ended/{rank}") or self._has(f"failed/{rank}")

    def silent(self) -> list[int]:
        """The other ranks that left no word of an end."""
        if self._store is None:
            return []
        try:
            return [rank for rank in range(self.size) if rank != self.rank and not self._left_word(rank)]
        except RuntimeError:  # the store lived in rank 0
            return [0]

    def _leave_word(self, key: str, word: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the store lived in a rank that is gone: no one is left to read
                self._store.set(key, word)

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

    def _await(self, missing: Callable[[], list[int]], seconds: float, over: Callable[[], bool]) -> None:
        start, pause = time.monotonic(), _POLL_SECONDS
        while late := missing():
            for rank, cause in self._failures().items():
                raise RankFailed(f"rank {rank}: {cause}")
            waited = time.monotonic() - start
            if waited > seconds or over():
                raise RankFailed(f"rank {late[0]}: did not come to the meeting within {waited:.0f} s")
            time.sleep(pause)
            pause = min(_LONGEST_POLL_SECONDS, pause * 1.2)


def meet(rank: int, size: int) -> tuple[Meeting, Any]:
    """The meeting of a world as torchrun sets it out in the environment, and the store it is held in (None alone)."""
    if size == 1:
        return Meeting(rank, size), None
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=SETUP_SECONDS)))
    return Meeting(rank, size, store), store
