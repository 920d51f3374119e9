"""Ranks meet over a store, hear of each other's end, and leave their codes; what a run tells is plain."""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from executor import launch
from executor.entry import compose
from executor.loop import Progress
from executor.meeting import Meeting, RankFailed, Word
from executor.reporter import Teller
from schemas.form import render


@pytest.fixture
def meetings() -> list[Meeting]:
    store = HashStore()
    return [Meeting(rank, 3, store) for rank in range(3)]


def test_every_rank_gathers_every_ranks_value_in_order(meetings: list[Meeting]) -> None:
    with ThreadPoolExecutor(3) as pool:
        for round_number in range(2):
            found = list(pool.map(lambda m, n=round_number: m.gather({"rank": m.rank, "round": n}), meetings))
            assert found == [[{"rank": rank, "round": round_number} for rank in range(3)]] * 3


def test_one_rank_meets_itself() -> None:
    alone = Meeting(0, 1)
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.culprit(0.1) is None
    alone.leave()


def test_who_waits_for_a_rank_that_failed_is_told_of_it(meetings: list[Meeting]) -> None:
    meetings[2].fail("ValueError: no")
    with pytest.raises(RankFailed, match="rank 2: ValueError: no"):
        meetings[0].gather(1, seconds=5)


def test_a_rank_that_does_not_come_is_named(meetings: list[Meeting]) -> None:
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(meeting.gather, 1, 0.3) for meeting in (meetings[0], meetings[2])]
        for future in late:
            with pytest.raises(RankFailed, match="rank 1: did not come"):
                future.result()


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ({1: "fail", 2: "end"}, "rank 1: out of memory"),
        ({1: "end", 2: "end"}, None),
        ({2: "end"}, "rank 1: is gone and left no word"),
    ],
)
def test_the_rank_at_fault_is_told_from_those_that_only_lost_it(
    meetings: list[Meeting], words: dict[int, str], culprit: str | None
) -> None:
    for rank, word in words.items():
        if word == "fail":
            meetings[rank].fail("out of memory")
        else:
            meetings[rank].end()
    assert meetings[0].culprit(0.2) == culprit


@pytest.mark.parametrize(
    ("waits", "culprit"),
    [
        ({0: 30.0, 1: 0.2, 2: 29.5}, "rank 1: came to the ranks' exchange only after another had waited 30 s for it"),
        ({0: 0.2, 1: 30.0, 2: 30.0}, "rank 0: came to the ranks' exchange only after another had waited 30 s for it"),
        ({0: 0.1, 1: 0.2, 2: 0.1}, None),
    ],
)
def test_of_ranks_that_lost_one_another_the_last_to_come_is_named(
    meetings: list[Meeting], waits: dict[int, float], culprit: str | None
) -> None:
    for rank, waited in waits.items():
        meetings[rank].end(Word(waited))
    assert {meeting.culprit(0.2) for meeting in meetings} == {culprit}


@pytest.mark.parametrize(("gone", "speaker"), [((), 0), ((0,), 1), ((0, 1), 2)])
def test_the_lowest_rank_that_is_left_speaks_alone(
    meetings: list[Meeting], gone: tuple[int, ...], speaker: int
) -> None:
    left = [meeting for meeting in meetings if meeting.rank not in gone]
    for meeting in left:
        meeting.end()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda meeting: meeting.speaks(0.2), left)) == [m.rank == speaker for m in left]


def test_a_rank_that_wakes_after_another_spoke_is_silent(meetings: list[Meeting]) -> None:
    meetings[1].end()
    assert meetings[1].speaks(0.1)
    meetings[0].end()
    assert not meetings[0].speaks(0.1)


@pytest.mark.parametrize(
    ("codes", "returned", "expected"),
    [({0: 3, 1: 3}, 0, 3), ({0: 0, 1: 0}, 0, 0), ({0: 0, 1: 4}, 1, 4), ({1: 4}, 1, 4), ({}, 1, 4), ({}, 0, 0)],
)
def test_the_code_of_a_run_is_the_one_its_ranks_left(
    tmp_path: Path, codes: dict[int, int], returned: int, expected: int
) -> None:
    for rank, code in codes.items():
        (tmp_path / f"rank-{rank:06}").write_text(str(code))
    (tmp_path / "told").touch()
    assert launch._wait([sys.executable, "-c", f"raise SystemExit({returned})"], {}, tmp_path) == expected


def test_a_rank_whose_end_is_agreed_does_not_fail_in_torchruns_eyes(tmp_path: Path, monkeypatch: Any) -> None:
    assert launch.leave_code(1, 3, agreed=True) == 3
    monkeypatch.setenv(launch.OUTCOME, str(tmp_path))
    assert launch.leave_code(1, 3, agreed=True) == 0
    assert launch.leave_code(2, 4, agreed=False) == 4
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["3", "4"]


def test_metrics_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for run in ("first", "second"):
        Teller(tmp_path, 1, run, "now", io.StringIO()).close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"run": "first", "start": "now"}, {"run": "second", "start": "now"}]


def test_lines_are_for_a_person_and_metrics_for_a_program(tmp_path: Path) -> None:
    out = io.StringIO()
    teller = Teller(tmp_path / "run", 2, "run-1", "2026-01-01T00:00:00Z", out)
    for step in range(4):
        teller.step(step, 4, 2.5, 1.0, 0.5, 100)
    teller.skipped(4, "rank 1: loss is not finite")
    teller.step(4, 5, float("nan"), 1.0, 0.5, 100)
    teller.evaluated(4, 3.25)
    teller.evaluated(5, float("nan"))
    teller.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines if "loss 2.5" in line] == ["1/4", "3/4", "4/4"]
    assert "200 tokens/s  500.0 ms" in lines[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"run": "run-1", "start": "2026-01-01T00:00:00Z"}
    assert {row["run"] for row in rows} == {"run-1"}
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    assert rows[1]["tokens_per_second"] == 200.0
    assert rows[5] == {"run": "run-1", "step": 5, "skipped": "rank 1: loss is not finite"}
    assert rows[6]["loss"] is None
    assert rows[7] == {"run": "run-1", "step": 4, "bits_per_byte": 3.25}
    assert rows[8]["bits_per_byte"] is None
    assert lines[-1].endswith("after 5 steps: the held-out loss is not finite")


def test_an_evaluation_that_is_not_finite_has_no_number_in_the_record() -> None:
    progress = Progress(steps=4, evaluations=[(2, 3.25), (4, float("nan"))])
    entry = compose("run", "now", "finished", None, progress, None, [], "source", {}, {}, {})
    assert entry["evaluations"] == [{"step": 2, "bits_per_byte": 3.25}] and entry["bits_per_byte"] is None
    render(entry)


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    teller = Teller(tmp_path, 1, "run-1", "now", out)
    for step in range(2):
        teller.step(step, 2, 2.5, 1.0, 0.5, 100)
    teller.close()
    assert out.getvalue().count("the run goes on without") == 1 and "No space left" in out.getvalue()
    assert "step 2/2" in out.getvalue()
