"""Timing this machine's CPU as N ranks would find it: products, copies, small operators, and all-reduce over loopback.

`measure` starts one process a rank (``python -P -m planner.machine.benchmark``), joined by gloo; only these import
torch.
Every quantity is measured several times, and the readings give the median, and as low and high the first and last
tenth of the repeats: the extremes tell of other programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

from planner.request import Usage
from schemas.document import reading
from schemas.form import Json, six

DEADLINE_SECONDS = 60.0
MOST_WORKERS = 16
PRODUCT = 768  # rows and columns of the square product
COPY_BYTES = 2**26  # beyond the last cache of most processors
CHAIN = 64  # small operators in a row
LOOPBACK_BYTES = tuple(4**power for power in range(6, 13))  # 4 KiB to 16 MiB
_SHARE_SECONDS = 0.6  # time given to one quantity


def measure(ranks: int, cores: int) -> Json:
    """Time ``ranks`` CPU ranks at work at the same time, each with its share of ``cores``.

    Returns:
        {"device": {key: reading}, "node": {key: reading}}: the entries that a benchmark adds to a record.

    Raises:
        Usage: a worker failed or none answered in time.
    """
    threads = max(1, cores // ranks)
    at_once = min(ranks, MOST_WORKERS)
    with tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder:
        job = {"rendezvous": os.path.join(folder, "store"), "at_once": at_once, "world": max(2, at_once)}
        samples = _run(job, threads)
    return _readings(
        samples, f"{at_once} rank{'s' * (at_once > 1)} at once, {threads} thread{'s' * (threads > 1)} each"
    )


def _run(job: Mapping[str, Json], threads: int) -> Json:
    # GLOO_SOCKET_IFNAME: the loopback itself is to be timed, and a machine's own name need not resolve.
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    workers = []
    try:
        for rank in range(job["world"]):
            command = [sys.executable, "-P", "-m", "planner.machine.benchmark", json.dumps({**job, "rank": rank})]
            workers.append(
                subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        return _collect(workers)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


def _collect(workers: list[subprocess.Popen[str]]) -> Json:
    answer, end = "", time.monotonic() + DEADLINE_SECONDS
    for worker in workers:
        try:
            out, err = worker.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Usage(f"--benchmark: no answer within {DEADLINE_SECONDS:.0f} s; plan without it") from None
        if worker.returncode != 0:
            last = (err.strip().splitlines() or ["no message"])[-1]
            raise Usage(f"--benchmark: a timing process ended with {worker.returncode}: {last}")
        answer = answer or out
    return json.loads(answer)


def _readings(samples: Json, setting: str) -> Json:
    device = {}
    for key, unit, what in (
        ("rate_fp32", "FLOP/s", f"product of {PRODUCT} x {PRODUCT} fp32 matrices"),
        ("rate_bf16", "FLOP/s", f"product of {PRODUCT} x {PRODUCT} bf16 matrices"),
        ("bandwidth", "B/s", f"copy of {COPY_BYTES} bytes, read and written"),
        ("launch_seconds", "s", f"one operator of a chain of {CHAIN} on 16 numbers, forward and backward"),
    ):
        if samples[key]:
            device[key] = timed(samples[key], unit, f"{what}; {setting}; median of {len(samples[key])}")
    curve = samples["loopback"]
    fits = {name: line([(size, pick(times)) for size, times in curve]) for name, pick in PICKS.items()}
    why = f"all-reduce of 2 gloo ranks, seconds = latency + bytes / rate over {len(curve)} sizes"
    latencies, rates = ([fits[name][part] for name in PICKS] for part in (0, 1))
    node = {
        "loopback_latency": timed(latencies, "s", why),
        "loopback_rate": timed(rates, "B/s", why),
        "loopback_curve": reading(
            [[size, six(median(times))] for size, times in curve],
            "B, s",
            "benchmarked",
            "[bytes, seconds] of all-reduce of 2 gloo ranks, medians",
        ),
    }
    return {"device": device, "node": node}


def _low(values: list[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[0]


def _high(values: list[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]


PICKS: dict[str, Callable[[list[float]], float]] = {"low": _low, "middle": median, "high": _high}


def timed(values: list[float], unit: str, why: str) -> dict[str, Json]:
    """The median of ``values``, with their first and last tenth."""
    return reading(median(values), unit, "benchmarked", why, low=_low(values), high=_high(values))


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(latency in seconds, rate in bytes per second) of seconds = latency + bytes / rate, by least squares of the
    relative error (weights 1 / seconds^2), so that small messages count as much as large ones."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    covariance = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
    variance = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = max(covariance / variance, 1e-15)  # no loopback moves a petabyte a second
    return max(y - slope * x, 0.0), 1 / slope


def _repeat(work: Callable[[], Any], least: int = 5, share: float = _SHARE_SECONDS) -> list[float]:
    """Seconds of each repeat of ``work`` within ``share`` seconds, after one that is not counted."""
    work()
    seconds: list[float] = []
    end = time.perf_counter() + share
    while len(seconds) < least or (time.perf_counter() < end and len(seconds) < 200):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _rates() -> dict[str, list[float]]:
    """Samples of this rank's rates."""
    import torch

    def product(dtype: torch.dtype) -> list[float]:
        left, right = (torch.randn(PRODUCT, PRODUCT).to(dtype) for _ in range(2))
        return [2 * PRODUCT**3 / seconds for seconds in _repeat(lambda: left @ right)]

    source, target = torch.zeros(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    weight = torch.zeros(16, requires_grad=True)

    def chain() -> None:
        value = weight
        for _ in range(CHAIN):
            value = value.sin()
        value.sum().backward()  # type: ignore[no-untyped-call]

    return {
        "rate_fp32": product(torch.float32),
        "rate_bf16": product(torch.bfloat16),
        "bandwidth": [2 * COPY_BYTES / seconds for seconds in _repeat(lambda: target.copy_(source))],
        "launch_seconds": [seconds / (3 * CHAIN) for seconds in _repeat(chain)],  # sin forward; cos and mul backward
    }


def _loopback(group: Any) -> list[list[Any]]:
    """[bytes, samples of seconds] of an all-reduce of each size of LOOPBACK_BYTES."""
    import torch
    import torch.distributed as dist

    curve = []
    for size in LOOPBACK_BYTES:
        payload = torch.zeros(size // 4)
        times = []
        for _ in range(8 if size > 2**20 else 24):
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(payload, group=group)
            times.append(time.perf_counter() - start)
        curve.append([size, times[2:]])  # the first two open connections and buffers
    return curve


def work(job: Mapping[str, Json]) -> Json:
    """One rank's part. Rank 0 returns all samples, the others None."""
    import torch.distributed as dist

    rank, world = job["rank"], job["world"]
    dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=world)
    try:
        pair = dist.new_group([0, 1])
        dist.barrier()
        mine = _rates() if rank < job["at_once"] else None
        dist.barrier()
        curve = _loopback(pair) if rank < 2 else []
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, mine)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    samples = [rates for rates in gathered if rates]
    merged = {key: [value for rates in samples for value in rates[key]] for key in samples[0]}
    return {**merged, "loopback": curve} if rank == 0 else None


if __name__ == "__main__":
    found = work(json.loads(sys.argv[1]))
    if found is not None:
        print(json.dumps(found))
