"""The size of a bucket: what a sweep found best, and where there was none, a share of the payload."""

from __future__ import annotations

from typing import Any

import pytest

from planner.passes import buckets
from planner.passes.compile import compile_plan
from worlds import account, fleet, request

ROWS: list[dict[str, Any]] = [
    {"path": "staged", "payload": 10**9, "bucket_bytes": 80_000_000, "origin": "b1",
     "seconds": [[20_000_000, 0.31], [80_000_000, 0.3], [200_000_000, 0.36]]},
    {"path": "staged", "payload": 10**7, "bucket_bytes": 8_000_000, "origin": "medium",
     "seconds": [[1_000_000, 0.05], [8_000_000, 0.04]]},
    {"path": "nvlink", "payload": 10**8, "bucket_bytes": 30_000_000, "origin": "medium",
     "seconds": [[30_000_000, 0.02]]},
]  # fmt: skip


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "swept", lambda: tuple(ROWS))


@pytest.mark.parametrize(
    ("path", "payload", "size"),
    [
        ("staged", 10**7, 8_000_000),
        ("staged", 10**9, 80_000_000),
        ("staged", 10**8, round(8e6 * 10**0.5)),  # half way in the logarithm
        ("staged", 10**5, 8_000_000),
        ("staged", 10**10, 80_000_000),
        ("nvlink", 10**9, 30_000_000),
    ],
)
def test_a_size_lies_between_the_best_of_the_sweeps_of_its_path(kept: None, path: str, payload: int, size: int) -> None:
    assert buckets.bucket_bytes(path, payload)[0] == size


def test_the_other_sizes_of_the_nearest_sweep_are_rejected_with_what_they_cost(kept: None) -> None:
    _, why, rejected = buckets.bucket_bytes("staged", 4 * 10**8)
    assert "b1" in why
    assert [(row["option"], row["why"].split(",")[0]) for row in rejected] == [
        (20_000_000, "310 ms a step in that sweep"), (200_000_000, "360 ms a step in that sweep"),
    ]  # fmt: skip


@pytest.mark.parametrize(("payload", "size"), [(10**6, 4 * 2**20), (2**28, 2**25), (10**12, 128 * 2**20)])
def test_without_a_sweep_it_is_an_eighth_within_bounds(kept: None, payload: int, size: int) -> None:
    found, why, rejected = buckets.bucket_bytes("p2p", payload)
    assert (found, rejected) == (size, []) and "no sweep over this path is kept" in why


def test_the_plan_takes_the_size_of_its_path(kept: None) -> None:
    plan = compile_plan(request(), fleet(1e14, 1e14), account())
    assert plan["exchange"]["path"]["value"] == "staged"
    assert plan["exchange"]["bucket_bytes"]["chosen"] == 8_000_000
    assert [row["option"] for row in plan["exchange"]["bucket_bytes"]["rejected"]] == [1_000_000]


def test_each_kept_sweep_names_a_size_that_it_tried_and_found_best() -> None:
    for row in buckets.swept():
        times = dict(row["seconds"])
        assert row["path"] in ("nvlink", "p2p", "staged", "loopback") and row["origin"]
        assert times[row["bucket_bytes"]] <= 1.01 * min(times.values())
