"""The link's trial before the first step: what it measures, and how a link that hangs, is wrong or crawls is told."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import plans
import ranks
from executor import trial
from executor.slices import ExchangeSlice
from test_executor_command import command, written

MUTE = """
import os
import time

from torch import nn

if "RANK" in os.environ:
    from executor import fleet, trial

    trial.SECONDS = 6.0
    if os.environ["RANK"] == "1":
        fleet.trial.tried = lambda *_: time.sleep(600)


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.head(self.embedding(inputs)).flatten(0, 1), targets.flatten())
"""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def plan(**more: Any) -> ExchangeSlice:
    return ExchangeSlice(
        "gloo",
        **{"reduce_dtype": "bf16", "bucket_bytes": 4, "owners": (), "payload": 60_000, "step_seconds": None, **more},
    )


def tried(group: dist.ProcessGroup, **more: Any) -> trial.Trial:
    return trial.tried(group, 0, torch.device("cpu"), plan(**more))


@pytest.mark.parametrize(("dtype", "buckets", "nbytes"), [("bf16", 1, 60_000), ("fp32", 4, 15_000), ("fp16", 7, 8572)])
def test_one_bucket_of_the_plan_is_tried_in_its_dtype(
    group: dist.ProcessGroup, dtype: str, buckets: int, nbytes: int
) -> None:
    found = tried(group, reduce_dtype=dtype, buckets=buckets)
    assert found.bytes == nbytes and all(seconds > 0 for seconds in found.seconds)


def test_the_rate_is_what_a_rank_sends_a_second() -> None:
    assert trial.Trial([0.5, 0.25, 0.125], 1000, 4).rate == 1.5 * 1000 / 0.25


def test_a_sum_that_is_not_right_ends_the_run(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = dist.all_reduce

    def wrong(buffer: torch.Tensor, **more: Any) -> None:
        right(buffer, **more)
        buffer[-1] += 1

    monkeypatch.setattr(dist, "all_reduce", wrong)
    with pytest.raises(trial.LinkFailed, match=r"rank 0: the sum of 60000 B .* came out wrong; .*NCCL_P2P_DISABLE=1"):
        tried(group)


@pytest.mark.parametrize(
    ("environ", "words"),
    [(None, "no NCCL_[*] set; where peer-to-peer"), ("1", "NCCL_P2P_DISABLE=1; NCCL_P2P_DISABLE=1 is")],
)
def test_a_link_that_hangs_is_told_with_what_to_try(
    environ: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    if environ:
        monkeypatch.setenv("NCCL_P2P_DISABLE", environ)
    with pytest.raises(trial.LinkFailed, match=f"no all-reduce came within 0.05 s of the start; {words}"):
        trial.made(0.05, lambda: time.sleep(2))


def test_what_the_trial_gives_or_raises_comes_through_its_thread() -> None:
    def fails() -> None:
        raise ConnectionError("rank 1 is gone")

    assert trial.made(5.0, lambda: 7) == 7
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        trial.made(5.0, fails)


@pytest.mark.parametrize(("most", "told"), [(None, False), (0.02, False), (0.0125, False), (0.012, True)])
def test_a_link_crawls_where_it_takes_twice_the_most_that_was_reckoned_with(most: float | None, told: bool) -> None:
    line = trial.crawl(trial.Trial([0.5, 0.025, 0.01], 10**6, 2), plan(alone_high=most))
    assert (line is not None) is told
    if line is not None:
        assert "1000000 B took 25 ms (0.04 GB/s a rank), and the plan reckons with 12 ms at most" in line
        assert "NCCL_P2P_DISABLE=1" in line


def test_what_a_fleet_exchanged_is_measured_beside_what_was_foretold(tmp_path: Path) -> None:
    data = plans.corpus(tmp_path)
    made = plans.with_values(plans.plan(data, 2, steps=6), {"/exchange/bucket_bytes": 32768, "/exchange/buckets": 5})
    entry = ranks.run(made, data, tmp_path / "run")[0]["entry"]
    found = {name: entry["measured"][f"/exchange/{name}"] for name in ("hidden", "alone_seconds", "bus_rate")}
    for name, line in found.items():
        assert line["predicted"] == made["exchange"][name]["value"]
    assert 0 < found["hidden"]["value"] < 1  # all buckets but the last travel while backward computes
    bucket = made["exchange"]["payload"]["value"] / 5
    rate = bucket / found["alone_seconds"]["value"]  # of two ranks each sends a bucket's bytes
    assert found["bus_rate"]["value"] == pytest.approx(rate, rel=1e-3) or found["bus_rate"]["value"] > rate
    assert entry["measured"]["/exchange/reduce_dtype"]["value"] == "fp32"
    assert entry["measured"]["/exchange/payload"]["value"] == made["exchange"]["payload"]["value"]


def test_a_fleet_whose_link_hangs_ends_soon_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mute_model.py").write_text(MUTE)
    monkeypatch.chdir(tmp_path)
    path, data = written(tmp_path, 2, model="mute_model:Model", steps=4)
    done = command(tmp_path, path, "--data", data)  # which gives up after 100 s; the other rank sleeps for 600
    assert done.returncode == 4, done.stderr
    said = [line for line in done.stderr.splitlines() if "no all-reduce came" in line]
    # A rank that starts late, as on a loaded machine, may have lost the other to its deadline, and then names it.
    assert len(said) == 1, done.stderr
    assert re.match("dormouse: failed: (all ranks|rank [01]): no all-reduce came within 6 s of the start; ", said[0])
    (run,) = json.loads(path.read_text())["runs"]
    assert run["outcome"] == "failed" and "NCCL_P2P_DISABLE=1 goes around it" in run["reason"]
