"""How fast a training step is on one card: ``python tests/benchmarks/throughput.py --out throughput.json``.

The step is the runtime's own (``executor.loop.launch``, real optimizers, one rank), on windows of the Python standard
library. It is timed untouched. Only then is each part of it put into a named range, for one step that counts and two
under torch's profiler. A kernel of forward or of an optimizer belongs to the innermost range that launched it. One of
backward belongs to the range in which its autograd node was made: nodes are numbered as they are made. What belongs to
none is the row "other".

The floor of a part is the larger of two times. One is its matrix FLOPs at the rate of a large product, the other the
least bytes at the bandwidth of a large copy, both measured here and now. Least bytes are what crosses the part's border
once: weights, activations in and out, their gradients, an optimizer's state; of a table, the distinct rows alone. Kept
activations other than inputs are not counted, so it is a lower bound. Adding gradients up needs nothing at best.

What binds: launches, where a step takes 1.3 times its kernels' time or more; else the larger term of the floor.
"kernels" counts all that the device was given: kernels, copies, fills.

``--render throughput.json`` prints the page of a record made before. On a CPU, to see that it works (operators stand
for kernels): ``--models tiny --device cpu --kda chunk_torch --grouped grouped_loop --batches 4 --seq 128``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from throughput_page import render
from throughput_parts import PARTS, Products, Ranges, Work, bytes_of_updates, put_ranges, worked
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from executor import build, conditions, loop
from executor.clock import Clock
from executor.data import Reader, stdlib_corpus
from executor.fleet import Alone, agreed
from executor.kernels import tuned
from executor.meter import Meter
from executor.models import presets
from executor.models.moe import balanced
from executor.peaks import CardProbe, probe
from executor.precision import DTYPES
from executor.reporter import Mute
from executor.slices import DataSlice, RankSlice, WorkSlice
from executor.workloads import configure, values

_ABOUT = __doc__ or ""
HOME = Path(__file__).resolve().parents[2]
PRESETS = {workload.name: workload for workload in (presets.TINY, presets.SMALL, presets.MEDIUM, presets.B1)}
WARM, PROFILED = 4, 2
LAUNCH_BOUND = 1.3
LR_FACTOR = 0.1  # of the peak rates, which need a warm-up that these few steps are not


def synchronisations(step: Callable[[], Any]) -> Counter[str]:
    """How often the host waited for the card in ``step``, by line of source; those of backward stand at its call."""
    found = Counter[str]()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            found[_line_of_ours()] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return found


def _line_of_ours() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [frame for frame in frames if frame.filename.startswith(str(HOME / "executor"))]
    frame = (ours or frames)[-1]
    return f"{os.path.relpath(frame.filename, HOME)}:{frame.lineno}: {frame.line}"


# What the device can do.


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """{"flops": a second, of a large square product; "bytes": a second, read and written, of a large copy}."""
    side, size = (4096, 2**31) if device.type == "cuda" else (1024, 2**27)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    product = _seconds(device, lambda: torch.mm(left, right))
    copy = _seconds(device, lambda: target.copy_(source))
    return {"product": side, "flops": 2 * side**3 / product, "copy_bytes": size, "bytes": 2 * size / copy}


def _seconds(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """The median of five means over ``repeats``."""
    clock, means = Clock(device.type), []
    for _ in range(6):
        start = clock.now()
        for _ in range(repeats):
            work()
        end = clock.now()
        clock.settle()
        means.append(clock.seconds(start, end) / repeats)
    return statistics.median(means[1:])


# One model.


def training(options: argparse.Namespace, name: str, batch: int) -> tuple[loop.Training, WorkSlice, DataSlice]:
    """The parts that the loop drives, for one rank on the device, as the executor builds them."""
    cuda = options.device == "cuda"
    config = values(configure(PRESETS[name], dict(item.split("=", 1) for item in options.set)))
    chosen = {"adamw": "fused" if cuda else "ieee", "ns_dtype": "bf16" if cuda else "fp32"}  # as the planner decides
    config |= {key: value for key, value in chosen.items() if config[key] == "auto"}
    work = WorkSlice(name, options.opt, 10**6, 0, config)
    tokens = batch * options.seq
    data = DataSlice((), 0, options.seq, batch, tokens, 0, batch, options.seq)
    kernels = {"kda": options.kda, "grouped": options.grouped}
    rank = RankSlice(
        0, 1, 0, options.device, options.device, None, options.dtype, kernels, (), options.dtype == "fp16",
        "segments" if cuda else "none",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(options.device):  # where a billion numbers are drawn at once
        model = PRESETS[name].build(config, kernels).float()
    build.settle(model, rank)
    optimizers = build.optimizers(model, work, rank, ())
    fleet, reader = Alone(), Reader([(options.corpus, 1)], 0, options.seq)
    meter = Meter(Clock(options.device), probe(options.device, 0, lambda: 0), WARM, fleet.exchanged)
    parts = loop.Training(
        model, fleet.prepare(model, optimizers), optimizers, fleet, reader, meter, Mute(), options.dtype,
        build.device_of(options.device),
    )  # fmt: skip
    return parts, work, data


def measure(options: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """Everything of one preset at one batch."""
    began, on_card = time.perf_counter(), options.device == "cuda"
    gc.collect()
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    parts, work, data = training(options, name, batch)

    def step(number: int) -> Tensor:
        return loop.launch(parts, work, data, number, LR_FACTOR)

    timed = _timed(parts, step, options.steps)
    peaks = parts.meter.probe.peaks if isinstance(parts.meter.probe, CardProbe) else None
    reserved = torch.cuda.max_memory_reserved() if on_card else None
    waits = synchronisations(lambda: step(WARM + options.steps)) if on_card else None
    ranges, number = Ranges(), WARM + options.steps + 1
    put_ranges(ranges, parts)
    try:
        with Products(ranges) as products:
            step(number).tolist()
        least = ranges.bytes + bytes_of_updates(parts, parts.batch(data, number)[0])
        seen = _profiled(step, number + 1, on_card)
    finally:
        ranges.clear()
    rows = _rows(worked(seen, ranges, on_card), products.flops, least, options.ceilings)
    kernels = sum(row["seconds"] for row in rows)
    tokens = batch * options.seq
    return {
        "model": name, "batch": batch, "seq": options.seq, "dtype": options.dtype,
        "parameters": sum(p.numel() for p in parts.model.parameters()), "mixtures": len(balanced(parts.model)),
        "adamw": work.config["adamw"], "ns_dtype": work.config["ns_dtype"], "config": dict(work.config),
        **timed, "tokens_per_second": tokens / timed["wall"]["median"],
        "peak_bytes": None if peaks is None else max(peaks.backward, peaks.optimizer),
        "peak_backward_bytes": None if peaks is None else peaks.backward,
        "peak_optimizer_bytes": None if peaks is None else peaks.optimizer,
        "reserved_bytes": reserved,
        "kernels": sum(row["kernels"] for row in rows), "kernel_seconds": kernels,
        "floor_seconds": sum(row["floor"] for row in rows),
        "launch_bound": timed["wall"]["median"] > LAUNCH_BOUND * kernels,
        "synchronisations": None if waits is None else dict(waits),
        "tuned": _tuned(work.config) if on_card else None,
        "conditions": _conditions(on_card), "rows": rows, "took": time.perf_counter() - began,
    }  # fmt: skip


def _timed(parts: loop.Training, step: Callable[[int], Tensor], steps: int) -> dict[str, Any]:
    """Seconds of ``steps`` steps after the warm ones: by the host's clock from before a step to its verdict read, by
    the host's clock until all is launched, and by the device's own clock. Raises SystemExit where one is not finite."""
    wall, launched, meter = list[float](), list[float](), parts.meter
    first = 0.0
    for number in range(WARM + steps):
        parts.meter.clock.settle()
        start = time.perf_counter()
        meter.begin(number)
        told = step(number)
        meter.launched()
        queued = time.perf_counter()
        *verdict, norm, _ = told.tolist()
        found = agreed(verdict)
        end = time.perf_counter()
        meter.end(None)
        parts.optimizers.settle(True)
        first = end - start if number == 0 else first
        if found.nonfinite or norm != norm:
            raise SystemExit(f"step {number + 1} is not finite: loss {found.loss}, gradient norm {norm}")
        if number >= WARM:
            wall.append(end - start)
            launched.append(queued - start)
    samples = meter.samples.parts
    device = {part: _spread(samples[part]) for part in ("total", "compute", "optimizer")}
    return {"wall": _spread(wall), "launched": _spread(launched), "device": device, "first_step": first,
            "loss": found.loss, "clock": meter.clock.instrument}  # fmt: skip


def _spread(samples: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def _profiled(step: Callable[[int], Tensor], number: int, on_card: bool) -> list[Any]:
    """The events of PROFILED steps."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints a line at each start and stop
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities, acc_events=True) as seen:
        for offset in range(PROFILED):
            step(number + offset).tolist()
        if on_card:
            torch.cuda.synchronize()
    return list(seen.events())


def _rows(
    work: Mapping[str, Work], flops: Mapping[str, int], least: Mapping[str, int], ceiling: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One row a part that does anything; all of one step."""
    rows = []
    for part in PARTS:
        done = work.get(part, Work())
        if not done.kernels and not flops.get(part):
            continue
        terms = {"FLOPs": flops.get(part, 0) / ceiling["flops"], "bytes": least.get(part, 0) / ceiling["bytes"]}
        seconds, floor = sum(done.seconds.values()) / PROFILED, max(terms.values())
        most = sorted(done.names.items(), key=lambda item: -item[1][0])[:6]
        rows.append({
            "part": part, "kernels": done.kernels / PROFILED, "seconds": seconds,
            "forward": done.seconds["forward"] / PROFILED, "backward": done.seconds["backward"] / PROFILED,
            "flops": flops.get(part, 0), "least_bytes": least.get(part, 0), "floor": floor,
            "ratio": seconds / floor if floor else None, "binds": max(terms, key=terms.__getitem__) if floor else None,
            "most": [[kernel, each[0] / PROFILED, each[1] / PROFILED] for kernel, each in most],
        })  # fmt: skip
    return rows


def _tuned(config: Mapping[str, Any]) -> str:
    """Whether FLA's kernels ran with configurations tuned for these heads: exact, near, none."""
    return tuned.find(torch.cuda.get_device_name(0), config["heads"], config["width"] // config["heads"])[0]


def _conditions(on_card: bool) -> dict[str, Any]:
    """Clocks, temperature and throttling right after the steps."""
    if not on_card:
        return conditions.seen("cpu", "cpu")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return conditions.seen("cuda", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=_ABOUT.partition(":\n")[0])
    parser.add_argument("--models", default="small,medium,b1", help=f"of {', '.join(PRESETS)}, separated by commas")
    parser.add_argument("--batches", default="8", help="sequences a step, separated by commas")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--opt", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--kda", default="chunk_fla")
    parser.add_argument("--grouped", default="grouped_triton")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="where all of it goes as JSON; the page goes beside it")
    parser.add_argument("--render", type=Path, help="print the page of this record, and measure nothing")
    options = parser.parse_args()
    unknown = [name for name in options.models.split(",") if name not in PRESETS]
    if unknown or any("=" not in item for item in options.set):
        parser.error(f"no model {', '.join(unknown)}" if unknown else "--set takes KEY=VALUE")
    if options.render is None and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this process sees no CUDA card; --device cpu shows that the script works")
    return options


def main() -> None:
    options = _options()
    if options.render is not None:
        print(render(json.loads(options.render.read_text(encoding="utf-8")), _ABOUT), end="")
        return
    device = build.device_of(options.device)
    options.corpus = stdlib_corpus()
    options.ceilings = ceilings(device, DTYPES[options.dtype])
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    triton, fla = tuned.toolchain()
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "Triton": triton, "FLA": fla,
                "Python": platform.python_version()}  # fmt: skip
    plain = {key: value for key, value in vars(options).items() if key not in ("corpus", "ceilings", "out", "render")}
    record: dict[str, Any] = {
        "device": name, "versions": versions, "options": plain, "ceilings": options.ceilings,
        "data": options.corpus.digest._asdict(), "models": [],
    }  # fmt: skip
    for model in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            record["models"].append(_measured(options, model, batch))
            if options.out is not None:
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                options.out.with_suffix(".md").write_text(render(record, _ABOUT), encoding="utf-8")
    print(render(record, _ABOUT), end="")


def _measured(options: argparse.Namespace, model: str, batch: int) -> dict[str, Any]:
    """What `measure` gives, or the reason why it cannot: memory that is not there."""
    try:
        found = measure(options, model, batch)
        print(f"{model} x {batch}: {found['took']:.0f} s", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        found = {"model": model, "batch": batch, "seq": options.seq, "error": str(error).splitlines()[0]}
    return found


if __name__ == "__main__":
    main()
