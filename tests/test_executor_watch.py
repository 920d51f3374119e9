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
from executor.pulse import Pulse, Work
from executor.watch import Peers, Stall, Watch, identity, keep_stacks, main_is_at, while_it_moves, within


@pytest.fixture
def meetings() -> list[Meeting]:
    store = HashStore()
    return [Meeting(rank, 2, store) for rank in range(2)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.3)
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


def test_a_rank_whose_watch_is_silent_for_long_is_not_waited_for(meetings: list[Meeting]) -> None:
    assert watched(meetings[0], 0.6) is None  # it has no watch yet
    beats = [threading.Timer(0.1 * place, meetings[1].beat) for place in range(8)]
    for beat in beats:
        beat.start()
    assert watched(meetings[0], 0.8) is None
    assert watched(meetings[0], 10) is not None


def test_another_process_under_a_ranks_pid_is_none_of_the_ranks() -> None:
    with sleeper() as (process, (pid, began)):
        peers = Peers(0, [identity(), [pid, began - 100]])
        peers.kill([1])
        assert (peers.gone(), peers.living()) == ([], []) and process.poll() is None


def watched(
    meeting: Meeting,
    seconds: float,
    stall: Stall | None = None,
    peers: Peers | None = None,
    tell: Callable[[Work], None] | None = None,
) -> str | None:
    """A block of so many seconds in this thread; where it was when it was taken, None where it was not."""
    taken: list[str] = []
    over = threading.Event()

    def take(*_: object) -> None:
        taken.append(main_is_at())
        over.set()

    stall = stall or Stall(Pulse(), lambda _: 0.3)
    watching = Watch(meeting, peers or Peers(0, []), stall, lambda: None, take, tell)
    watching.__enter__()
    over.wait(seconds)
    if not taken:
        watching.__exit__(None, None, None)
    return taken[0] if taken else None


def warm() -> Pulse:
    pulse = Pulse()
    for kind in ("step", "evaluation"):
        with pulse.at("the first", kind):
            pass
    return pulse


def test_work_that_does_not_move_is_taken_and_work_that_does_is_not_however_slow(meetings: list[Meeting]) -> None:
    pulse = warm()
    with pulse.at("step 3", "step", joint=True):
        at = watched(meetings[0], 10, Stall(pulse, lambda _: 0.3))
    assert at is not None and at.startswith("watched (test_executor_watch.py:")
    with pulse.at("the checkpoint of step 3"):
        beats = [threading.Timer(0.15 * place, pulse.beat) for place in range(1, 7)]
        for beat in beats:
            beat.start()
        assert watched(meetings[0], 0.9, Stall(pulse, lambda _: 0.3)) is None
        with pulse.waiting():
            assert watched(meetings[0], 0.6, Stall(pulse, lambda _: 0.3)) is None
    assert watched(meetings[0], 0.6, Stall(pulse, lambda _: 0.3)) is None


def test_where_nobody_waits_a_stall_is_told_once_and_ends_nothing(meetings: list[Meeting]) -> None:
    pulse, told = warm(), list[Work]()
    with pulse.at("step 3", "step"):
        assert watched(meetings[0], 1.2, Stall(pulse, lambda _: 0.2), tell=told.append) is None
    assert told == [Work("step 3", False, False)]


@pytest.mark.parametrize(
    ("again", "each", "looks"),
    [(False, 0.1, 25), (False, 0.0, 5), (True, 0.1, 5)],
)
def test_what_may_compile_for_the_first_time_has_as_long_as_it_computes(
    monkeypatch: pytest.MonkeyPatch, again: bool, each: float, looks: int
) -> None:
    """At most as long as the setup has; ``looks`` until it is taken, at 20 a second."""
    spent = iter(range(1000))
    monkeypatch.setattr(watch, "computed", lambda: each * next(spent))
    monkeypatch.setattr(watch, "SETUP_SECONDS", 1.2)
    pulse = warm() if again else Pulse()
    stall = Stall(pulse, lambda _: 0.2)
    with pulse.at("the evaluation after step 3", "evaluation"):
        found = next(look for look in range(100) if stall.found() is not None)
    assert abs(found - looks) <= 1


def test_the_time_that_a_compiler_takes_counts_while_it_runs_and_the_watchs_own_does_not() -> None:
    before = watch.computed()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        _until(lambda: watch.computed() - before > 0.3)
        process.kill()
    before, end = watch.computed(), time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    assert watch.computed() - before < 0.1


def test_a_job_is_waited_for_while_it_moves_and_left_to_itself_where_it_does_not() -> None:
    pulse, over = Pulse(), threading.Event()

    def writes(beats: int) -> str:
        with pulse.at("the trained model's file"):
            for _ in range(beats):
                time.sleep(0.1)
                pulse.beat()
            over.wait(0 if beats else 10)
        return "written"

    assert while_it_moves(Stall(pulse, lambda _: 0.3), lambda: writes(6)) == "written"
    assert while_it_moves(Stall(pulse, lambda _: 0.3), lambda: writes(0)) is None
    over.set()


@pytest.mark.parametrize("word", ["fail", "end", "gone"])
def test_a_thread_that_does_not_notice_anothers_end_is_taken(meetings: list[Meeting], word: str) -> None:
    with sleeper() as (process, known):
        peers = Peers(0, [identity(), known])
        if word == "gone":
            process.kill()
        else:
            assert word in ("fail", "end")
            meetings[1].fail("out of memory") if word == "fail" else meetings[1].end()
        assert watched(meetings[0], 10, peers=peers) is not None


def test_a_thread_that_ends_by_itself_is_not_taken(meetings: list[Meeting]) -> None:
    meetings[1].fail("out of memory")
    assert watched(meetings[0], 0.1) is None


def test_who_is_taken_is_held_where_it_would_leave_the_block_whatever_signals_come(meetings: list[Meeting]) -> None:
    """In a process of its own, which the watch ends."""
    body = (
        "import os, signal, time; from torch.distributed import HashStore; from executor.meeting import Meeting; "
        "from executor.pulse import Pulse; from executor.watch import Peers, Stall, Watch\n"
        "pulse = Pulse(); pulse.at('step 3').__enter__()\n"
        "def take(*_):\n"
        " time.sleep(1); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5); os._exit(7)\n"
        "stall = Stall(pulse, lambda _: 0.5)\n"
        "with Watch(Meeting(0, 2, HashStore()), Peers(0, []), stall, lambda: None, take): time.sleep(1.2)\n"
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
