"""A rank that hangs is seen from beside it, told where, and ended; one that goes on is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

from executor import watch
from executor.meeting import Meeting, Word
from executor.watch import Peers, Watch, identity, keep_stacks, main_is_at, within


@pytest.fixture
def meetings() -> list[Meeting]:
    store = HashStore()
    return [Meeting(rank, 2, store) for rank in range(2)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 0.3)
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.05)


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], list[float]]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            yield process, [process.pid, psutil.Process(process.pid).create_time()]
        finally:
            process.kill()


def test_a_rank_whose_process_ended_is_gone_and_a_stopped_one_is_not_until_it_is_ended() -> None:
    with sleeper() as (process, known):
        peers = Peers(0, [identity(), known])
        process.send_signal(signal.SIGSTOP)
        _until(lambda: peers.stopped() == [1])
        assert (peers.gone(), peers.living()) == ([], [1])
        peers.kill([0, 1])  # itself is none of its peers
        assert process.wait(10) == -signal.SIGKILL
        assert (peers.gone(), peers.living()) == ([1], [])


def _until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_that_is_stopped_for_long_is_not_waited_for(meetings: list[Meeting]) -> None:
    with sleeper() as (process, known):
        peers = Peers(0, [identity(), known])
        assert watched(meetings[0], 0.6, None, forever(None), peers) is None
        process.send_signal(signal.SIGSTOP)
        assert watched(meetings[0], 10, None, forever(None), peers) is not None


def test_another_process_under_a_ranks_pid_is_none_of_the_ranks() -> None:
    with sleeper() as (process, (pid, began)):
        peers = Peers(0, [identity(), [pid, began - 100]])
        peers.kill([1])
        assert (peers.gone(), peers.living()) == ([], []) and process.poll() is None


def watched(
    meeting: Meeting, seconds: float, deadline: float | None, steps: Iterator[int | None], peers: Peers | None = None
) -> str | None:
    """A block of so many seconds in this thread; where it was when it was taken, None where it was not."""
    taken: list[str] = []
    over = threading.Event()

    def take(_: str | None) -> None:
        taken.append(main_is_at())
        over.set()

    watching = Watch(meeting, peers or Peers(0, []), lambda: next(steps), lambda: None, deadline, take)
    watching.__enter__()
    over.wait(seconds)
    if not taken:
        watching.__exit__(None, None, None)
    return taken[0] if taken else None


def forever(step: int | None) -> Iterator[int | None]:
    while True:
        yield step


def test_a_step_that_does_not_end_is_taken_and_steps_that_do_are_not(meetings: list[Meeting]) -> None:
    at = watched(meetings[0], 10, 0.3, forever(3))
    assert at is not None and at.startswith("watched (test_executor_watch.py:")
    assert watched(meetings[0], 0.8, 0.3, iter(range(1000))) is None
    assert watched(meetings[0], 0.8, 0.3, forever(None)) is None
    assert watched(meetings[0], 0.8, None, forever(3)) is None


@pytest.mark.parametrize("word", ["fail", "end", "gone"])
def test_a_thread_that_does_not_notice_anothers_end_is_taken(meetings: list[Meeting], word: str) -> None:
    with sleeper() as (process, known):
        peers = Peers(0, [identity(), known])
        if word == "gone":
            process.kill()
        else:
            assert word in ("fail", "end")
            meetings[1].fail("out of memory") if word == "fail" else meetings[1].end()
        assert watched(meetings[0], 10, None, forever(None), peers) is not None


def test_a_thread_that_ends_by_itself_is_not_taken(meetings: list[Meeting]) -> None:
    meetings[1].fail("out of memory")
    assert watched(meetings[0], 0.1, None, forever(None)) is None


def test_who_is_taken_is_held_where_it_would_leave_the_block_whatever_signals_come(meetings: list[Meeting]) -> None:
    """In a process of its own, which the watch ends."""
    body = (
        "import os, signal, time; from torch.distributed import HashStore; from executor.meeting import Meeting; "
        "from executor.watch import Peers, Watch\n"
        "def take(stopped):\n"
        " time.sleep(1); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5); os._exit(7)\n"
        "with Watch(Meeting(0, 2, HashStore()), Peers(0, []), lambda: 3, lambda: None, 0.5, take): time.sleep(1.2)\n"
        "os._exit(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", body], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 7


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ({0: Word(9.0, 41), 1: Word(10.0, 40, "read (nfs.py:7)")}, "rank 1: was late: it hangs in read (nfs.py:7)"),
        ({0: Word(9.0, 41, "step (loop.py:3)"), 1: Word(10.0, 40, "read (nfs.py:7)")}, "rank 1: was late: it hangs in"),
        ({0: Word(9.0, 40, "read (nfs.py:7)"), 1: Word(9.0, 41, "step (loop.py:3)")}, "rank 0: was late: it hangs in"),
        ({0: Word(9.0, 41, "step (loop.py:3)"), 1: Word(9.0, 41, "step (loop.py:3)")}, "None"),
    ],
)
def test_of_ranks_that_hang_the_one_that_came_to_fewer_exchanges_is_named(
    meetings: list[Meeting], words: dict[int, Word], culprit: str
) -> None:
    for rank, word in words.items():
        meetings[rank].end(word)
    for meeting in meetings:
        assert str(meeting.culprit(0.1, "was late")).startswith(culprit)


def test_what_other_ranks_measured_is_waited_for_only_where_it_will_come(meetings: list[Meeting]) -> None:
    start = time.monotonic()
    assert meetings[0].given(5) == {} and time.monotonic() - start < 1
    later = threading.Timer(0.3, meetings[1].give, [{"a": 1}])
    later.start()
    assert meetings[0].given(5, living=[1]) == {1: {"a": 1}}
    later.join()
    assert Meeting(0, 1).given(5) == {}


def test_a_device_that_does_not_answer_is_not_waited_for() -> None:
    assert within(0.1, lambda: time.sleep(3)) is None and within(5, lambda: 3) == 3


def test_every_threads_stack_is_kept_and_a_place_that_takes_none_ends_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run" / "rank-1.traceback"
    keep_stacks(place)
    assert "test_every_threads_stack_is_kept" in place.read_text()
    keep_stacks(place / "below a file")
