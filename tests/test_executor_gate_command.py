"""The command ``executor.gate``: what it tells, what it leaves, and how it ends where something differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
from executor import gate
from executor.gates import compare, link
from processes import environment
from schemas.document import reading, unknown

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes for all

SHORT = ("--mode", "gradref", "--steps", "2", "--device", "cpu")


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor.gate", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_the_command_starts_its_ranks_and_tells_every_gate_once(tmp_path: Path) -> None:
    done = _run(*SHORT, "--capacity", "4,2,1", "--out", "seen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["gate:", "pass", "pass", "gate:"]
    assert "4x64, 2x64, 1x64" in lines[1] and "(bound 2e-05)" in lines[1]
    assert lines[-1] == "gate: 2 of 2 held on 3 ranks"
    seen = [json.loads((tmp_path / "seen" / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [row["checks"] for row in seen] == [seen[0]["checks"]] * 3
    assert seen[0]["runs"]["unequal"]["fingerprints"] == seen[2]["runs"]["unequal"]["fingerprints"]


def test_a_fault_ends_every_rank_with_4_and_names_rank_and_number() -> None:
    results = ranks.gate(SHORT, "token weight forgotten")
    assert [result["code"] for result in results] == [gate.FAILED] * 2
    words = results[0]["words"]
    assert words.count("FAIL  gradref") == 2 and "rank 0: 2.8e-01 from the sum by hand" in words
    assert not results[1]["words"]


def test_nan_and_refusals_are_answered_by_every_rank() -> None:
    for mode, held in (("nan", 3), ("refusals", 8)):
        results = ranks.gate(("--mode", mode, "--device", "cpu"))
        assert [result["code"] for result in results] == [0, 0], results[0]["words"]
        assert f"{held} of {held} held on 2 ranks" in results[0]["words"]


def test_shapes_for_other_ranks_than_were_started_are_told_once() -> None:
    results = ranks.gate((*SHORT, "--capacity", "4,2,1"))
    assert [result["code"] for result in results] == [gate.USAGE] * 2
    assert results[0]["words"].splitlines() == ["dormouse: --capacity names 3 ranks, and 2 were started"]
    assert not results[1]["words"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", "1"), "--batch is 1: the least is 2"),
        (("--steps", "x"), "not a whole number"),
        (("--capacity", "auto"), "--capacity is auto: one B or BxT a rank, as in 4,2"),
        (("--capacity", "4"), "the gate is of several"),
        (("--out", "/dev/null/seen"), "--out /dev/null/seen: Not a directory"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.main(arguments) == gate.USAGE
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and words in said[0]


def test_fsdp_is_refused_as_the_planner_refuses_it() -> None:
    results = ranks.gate((*SHORT, "--shard", "fsdp"))
    assert [result["code"] for result in results] == [gate.REFUSED] * 2
    assert results[0]["words"].startswith("dormouse: refused (fsdp-muon): --shard fsdp")


def test_ranks_that_share_a_model_pass_the_gate_and_a_fault_of_theirs_does_not() -> None:
    sharing = (*SHORT, "--shard", "fsdp", "--opt", "adamw")
    results = ranks.gate(sharing)
    assert [result["code"] for result in results] == [0, 0], results[0]["words"]
    results = ranks.gate(sharing, "sharded: a unit's gradients are not summed")
    assert [result["code"] for result in results] == [gate.FAILED] * 2
    assert "FAIL  gradref" in results[0]["words"]


def test_what_cannot_be_compared_is_never_within_a_bound() -> None:
    nan, one = float("nan"), {"a": np.ones(3), "b": np.ones(2)}
    for found, right in (([1.0], [1.0, 2.0]), ([nan, 2.0], [1.0, 2.0]), ([], [])):
        assert not compare.losses_apart(found, right)[0] <= 1e9
    for weights in ({}, {"a": np.ones(3)}, {**one, "a": np.array([1.0, nan, 1.0])}):
        assert not compare.furthest(weights, one)[0] <= 1e9
    assert compare.losses_apart([1.0, 2.5], [1.0, 2.0]) == (0.5, "step 2")
    assert compare.furthest({**one, "b": np.array([1.0, 2.0])}, one) == (pytest.approx(0.5**0.5), "b")


def test_weights_are_compared_where_rounding_does_not_decide_adamws_step() -> None:
    """||[0, 1]|| / ||[1, 1]|| where the second gradient is well above AdamW's epsilon, or 0, which nothing rounds."""
    weights, other = {"a": np.array([1.0, 1.0])}, {"a": np.array([1.0, 2.0])}
    for gradient, apart in ((1e-5, 0.5**0.5), (1e-8, 0.0), (0.0, 0.5**0.5)):
        found = compare.weights_apart(other, weights, {"a": np.array([1.0, gradient])})
        assert found == (pytest.approx(apart), "a")
    assert not compare.weights_apart({}, weights, {"a": np.ones(2)})[0] <= 1e9


def test_the_steps_at_which_ranks_part_are_named() -> None:
    assert compare.steps_apart([["a", "b"], ["a", "b"]]) == []
    assert compare.steps_apart([["a", "b", "c"], ["a", "x", "c"], ["a", "b"]]) == [2, 3]


def test_a_balance_that_moved_alone_or_counts_left_over_are_found() -> None:
    right = {"ffn.bias": np.array([0.5, 0.0], np.float32), "ffn.counts": np.zeros(2)}
    for odd in ({"ffn.bias": np.array([0.0, 0.5], np.float32)}, {"ffn.counts": np.ones(2)}):
        assert compare.balances_apart([right, {**right, **odd}], [right, right]) == 1
    assert compare.balances_apart([right], [right, right]) == 1
    assert compare.balances_apart([right], [right]) == 0


def _plan(rate: float, ranks: int = 2) -> dict[str, Any]:
    item = reading(rate, "B/s", "computed", "gen3 x16: 15.754 GB/s x 0.8", low=rate)
    exchange = {"path": reading("staged", "", "computed", "by hand"), "rate": {**item, "weakest": "assumed"}}
    exchange["latency"] = reading(0.0, "s", "assumed", "none")
    return {"exchange": exchange, "fleet": {"devices": {}}, "ranks": [{"members": list(range(ranks))}]}


@pytest.mark.parametrize(("ranks_", "medium", "b1"), [(2, "21.9 ms", "169.8 ms"), (4, "32.8 ms", "254.7 ms")])
def test_the_link_is_reckoned_as_the_table_of_gen3_has_it(ranks_: int, medium: str, b1: str) -> None:
    lines = list(link.report(_plan(0.8 * 16 * 8e9 * 128 / 130 / 8, ranks_), {"allreduce_curve": unknown("B, s", "no")}))
    assert medium in next(line for line in lines if line.startswith("medium"))
    assert b1 in next(line for line in lines if line.startswith("b1"))


def test_a_link_that_crawls_or_hangs_is_told_with_what_to_try() -> None:
    timed = {"allreduce_curve": reading([[2**20, 1e-3], [2**30, 1.0]], "B, s", "benchmarked", "by hand")}
    assert any("NCCL_P2P_DISABLE" in line for line in link.report(_plan(12.6e9), timed))
    assert not any("NCCL_P2P_DISABLE" in line for line in link.report(_plan(1.2e9), timed))
    hung = {"allreduce_curve": unknown("B, s", "not timed: no answer within 60 s; NCCL_P2P_DISABLE=1 goes around it")}
    check = link.check(hung)
    assert check.passed is False and "NCCL_P2P_DISABLE=1" in check.found
    assert link.check(timed).passed
