"""The timing of a CPU: it is really done, and a part that fails is one message, not a missing number."""

from __future__ import annotations

import time
from typing import Any

import pytest

from planner.machine import benchmark
from planner.request import Usage


def test_two_ranks_are_timed_at_once_with_ranges_around_every_median() -> None:
    start = time.perf_counter()
    found = benchmark.measure(2, 2)
    assert time.perf_counter() - start < benchmark.DEADLINE_SECONDS
    assert set(found["device"]) == {"rate_fp32", "rate_bf16", "bandwidth", "launch_seconds"}
    for item in (*found["device"].values(), found["node"]["loopback_rate"], found["node"]["loopback_latency"]):
        assert item["basis"] == "benchmarked"
        assert item["low"] <= item["value"] <= item["high"]
    assert found["device"]["rate_fp32"]["value"] > 1e8
    assert [size for size, _ in found["node"]["loopback_curve"]["value"]] == list(benchmark.LOOPBACK_BYTES)


def test_a_timing_process_that_fails_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.sys, "executable", "/bin/false")
    with pytest.raises(Usage, match="a timing process ended with 1"):
        benchmark.measure(1, 1)


def test_a_timing_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = benchmark.subprocess.Popen

    def sleeper(_: Any, **more: Any) -> Any:
        started.append(popen(["sleep", "60"], **more))
        return started[-1]

    monkeypatch.setattr(benchmark, "DEADLINE_SECONDS", 0.2)
    monkeypatch.setattr(benchmark.subprocess, "Popen", sleeper)
    with pytest.raises(Usage, match="no answer within"):
        benchmark.measure(1, 1)
    assert [worker.poll() is not None for worker in started] == [True, True]
