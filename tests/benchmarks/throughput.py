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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import executor.optim.muon as muon_module
from executor import build, conditions, loop
from executor.clock import Clock
from executor.count import flops_of, tensors_in
from executor.data import Reader, stdlib_corpus
from executor.fleet import Alone, agreed
from executor.kernels import tuned
from executor.meter import Meter
from executor.models import presets
from executor.models.engram import Engram
from executor.models.kda import Block, FeedForward, KdaModel, Mix
from executor.models.moe import MoE, balanced
from executor.optim.tables import Tables
from executor.peaks import CardProbe, probe
from executor.precision import DTYPES
from executor.reporter import Mute
from executor.slices import DataSlice, RankSlice, WorkSlice
from executor.workloads import configure, values

HOME = Path(__file__).resolve().parents[2]
HEAD, BLOCK, MIX, CORE = "embedding, head, loss", "norms, residual", "projections, short convolution", "KDA core"
ROUTING, PRODUCTS, EXPERTS = "MoE: routing", "MoE: grouped products", "MoE: casts, SwiGLU"
FEED, ENGRAM = "feed-forward", "Engram"
SUMS, CLIP = "gradients: zeroed, added up", "gradients: norm, clipping"
MOMENTUM, ITERATION, APPLY = "Muon: momentum", "Muon: Newton-Schulz", "Muon: apply"
ADAMW, TABLES, BALANCE, OTHER = "AdamW", "tables' rule", "MoE: balance", "other"
PARTS = (HEAD, BLOCK, MIX, CORE, ROUTING, PRODUCTS, EXPERTS, FEED, ENGRAM, SUMS, CLIP, MOMENTUM, ITERATION, APPLY,
         ADAMW, TABLES, BALANCE, OTHER)  # fmt: skip

PRESETS = {workload.name: workload for workload in (presets.TINY, presets.SMALL, presets.MEDIUM, presets.B1)}
RANGE, NODE = "part: ", "autograd::engine::evaluate_function: "
WARM, PROFILED = 4, 2
LAUNCH_BOUND = 1.3
LR_FACTOR = 0.1  # of the peak rates, which need a warm-up that these few steps are not


# What a part is: ranges, their borders, the products inside.


@dataclass
class Frame:
    """A range that is entered. ``taken`` are its arguments, ``given`` what it made and handed to a range inside it,
    ``got`` what ranges inside it returned, ``passed`` those of both that it hands on as they are."""

    part: str
    taken: list[Tensor]
    given: list[Tensor] = field(default_factory=list)
    got: list[Tensor] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)

    def hand(self, tensors: Iterable[Tensor]) -> None:
        """Note what a range inside takes."""
        known = {id(tensor) for tensor in (*self.taken, *self.got)}
        for tensor in tensors:
            if id(tensor) in known:
                self.passed.add(id(tensor))
            else:
                self.given.append(tensor)


@dataclass
class Ranges:
    """The parts of a step as ranges. ``numbers`` tells the part of each autograd node by its sequence number, ``bytes``
    what crosses the borders of a part in all steps since they were last cleared."""

    numbers: dict[int, str] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter)
    stack: list[Frame] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def put(self, owner: Any, name: str, part: str, weights: Iterable[Tensor] = (), border: bool = True) -> None:
        """Run ``owner.name`` in a range from now on; without ``border`` nothing is counted for crossing it."""
        inner, held = getattr(owner, name), list(weights)

        def ranged(*args: Any, **kwargs: Any) -> Any:
            frame = Frame(part, list(tensors_in((*args, *kwargs.values()))))
            if self.stack and border:
                self.stack[-1].hand(frame.taken)
            self.stack.append(frame)
            first = torch.autograd._get_sequence_nr()
            try:
                with record_function(RANGE + part):
                    result = inner(*args, **kwargs)
            finally:
                self.stack.pop()
            for number in range(first, torch.autograd._get_sequence_nr()):
                self.numbers.setdefault(number, part)  # ranges inside have left before
            if border:
                outs = list(tensors_in((result,)))
                self.bytes[part] += _crossing(frame, outs, held)
                if self.stack:
                    self.stack[-1].got += outs
            return result

        setattr(owner, name, ranged)
        self._undo.append(lambda: setattr(owner, name, inner))

    def now(self) -> str:
        """The part that an operator belongs to while it runs."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.numbers.get(node._sequence_nr(), OTHER)
        return self.stack[-1].part if self.stack else OTHER

    def clear(self) -> None:
        """Put everything back as it was."""
        for undo in reversed(self._undo):
            undo()


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _crossing(frame: Frame, outs: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    """Least bytes of one forward through a range, and of its backward.

    Forward reads what is taken and the weights, writes what is given. Backward reads the gradients of what was given,
    and once more what was taken and the weights; it writes the gradients of both.
    """
    returned = {id(tensor) for tensor in outs}
    own = [tensor for tensor in frame.taken if id(tensor) not in frame.passed]
    got = [tensor for tensor in frame.got if id(tensor) not in frame.passed | returned]
    received = {id(tensor) for tensor in frame.got}
    given = [*frame.given, *(tensor for tensor in outs if id(tensor) not in received)]
    crossing = _size((*own, *got, *given, *weights))
    if torch.is_grad_enabled():
        graded = [tensor for tensor in (*own, *got, *given, *weights) if tensor.requires_grad]
        crossing += _size((*graded, *own, *weights))
    return crossing


class Products(TorchDispatchMode):
    """Matrix FLOPs of each part while it is entered."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()
        self.ranges, self.flops = ranges, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = flops_of(func, args, kwargs or {}, result)
        if flops:
            self.flops[self.ranges.now()] += flops
        return result


def put_ranges(ranges: Ranges, parts: loop.Training) -> None:
    """Every part of a step in its range; inner ones first, so that an outer one counts only the weights left to it."""
    model, optimizers = parts.model, parts.optimizers
    assert isinstance(model, KdaModel)
    for module in model.modules():
        if isinstance(module, Mix):
            _mix(ranges, module)
        elif isinstance(module, MoE):
            ranges.put(module, "grouped", PRODUCTS)
            ranges.put(module, "experts", EXPERTS, [module.gate, module.up, module.down])
            ranges.put(module, "forward", ROUTING, [module.router.weight])
        elif isinstance(module, FeedForward):
            ranges.put(module, "forward", FEED, module.parameters())
        elif isinstance(module, Engram):
            rest = [parameter for parameter in module.parameters() if parameter is not module.table]
            ranges.put(module, "forward", ENGRAM, rest)
        elif isinstance(module, Block):
            ranges.put(module, "forward", BLOCK, [module.mix_norm.weight, module.ffn_norm.weight])
    ranges.put(parts, "forward", HEAD, [model.embedding.weight, model.norm.weight, model.head.weight])
    ranges.put(model, "zero_grad", SUMS, border=False)
    ranges.put(parts.fleet, "norm", CLIP, border=False)
    ranges.put(loop, "_shrink", CLIP, border=False)
    ranges.put(parts, "balance", BALANCE, border=False)
    ranges.put(optimizers.adamw, "step", ADAMW, border=False)
    if optimizers.muon is not None:
        ranges.put(muon_module, "orthogonalise", ITERATION, border=False)
        ranges.put(optimizers.muon, "updates", MOMENTUM, border=False)
        ranges.put(optimizers.muon, "apply", APPLY, border=False)
    if optimizers.tables is not None:
        ranges.put(optimizers.tables, "step", TABLES, border=False)


def _mix(ranges: Ranges, mix: Mix) -> None:
    inside = [] if mix.core is None else [mix.A_log, mix.dt_bias]
    if mix.core is not None:
        ranges.put(mix, "core", CORE)
    ranges.put(mix, "forward", MIX, [p for p in mix.parameters() if all(p is not other for other in inside)])


def bytes_of_updates(parts: loop.Training, inputs: Tensor) -> Counter[str]:
    """Least bytes of what follows backward, and of tables' rows: each gradient, state and weight once a part."""
    optimizers, found = parts.optimizers, Counter[str]()
    rows = 0
    for engram in (module for module in parts.model.modules() if isinstance(module, Engram)):
        touched = len(torch.unique(engram.indices(inputs))) * _size([engram.table[0]])
        found[ENGRAM] += 2 * touched  # read, and their gradient written
        rows += touched
    if isinstance(optimizers.tables, Tables):
        found[TABLES] = 7 * rows  # gradient read; weight and two moments read and written
    dense = sum(_size(p for _, p in named) for named in (optimizers.routed.muon, optimizers.routed.adamw))
    found[CLIP] = dense + rows
    adamw = optimizers.adamw
    found[ADAMW] = 3 * _size(p for _, p in optimizers.routed.adamw) + 2 * _size((*adamw.first, *adamw.second))
    if optimizers.muon is not None:
        full = _size(optimizers.muon.parameters)
        half = full * optimizers.muon.ns_dtype.itemsize // 4
        momentum = optimizers.muon.state_bytes()["muon_momentum"]
        found += Counter({MOMENTUM: full + 2 * momentum + half, ITERATION: 2 * half, APPLY: half + 2 * full})
    return found


# What the profiler saw.


@dataclass
class Work:
    """What a part did on the device: kernels and seconds by phase, and seconds and number by a kernel's name."""

    kernels: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0]))

    def add(self, phase: str, name: str, seconds: float) -> None:
        self.kernels += 1
        self.seconds[phase] += seconds
        self.names[name][0] += seconds
        self.names[name][1] += 1


def worked(events: Sequence[Any], ranges: Ranges, on_card: bool) -> dict[str, Work]:
    """All kernels among a profile's ``events`` by part."""
    found: dict[str, Work] = defaultdict(Work)
    placed = Counter[str]()
    for event in events:
        kernels = [(kernel.name, kernel.duration) for kernel in event.kernels if not kernel.name.startswith(RANGE)]
        if not on_card:
            kernels = [(event.name, event.self_cpu_time_total)] if _is_operator(event) else []
        part, phase = _place(event, ranges) if kernels else (OTHER, "forward")
        for name, microseconds in kernels:
            placed[name] += 1
            found[part].add(phase, name, microseconds / 1e6)
    for name, microseconds in _of_device(events):
        placed[name] -= 1
        if placed[name] < 0:  # launched by no operator that was seen
            found[OTHER].add("forward", name, microseconds / 1e6)
    return found


def _is_operator(event: Any) -> bool:
    return event.name.startswith(("aten::", "dormouse::"))


def _of_device(events: Iterable[Any]) -> Iterator[tuple[str, float]]:
    """(name, microseconds) of all that a card ran; the ranges that the profiler draws on its timeline are no work."""
    for event in events:
        drawn = event.name.startswith(RANGE) or getattr(event, "is_user_annotation", False)
        if event.device_type == DeviceType.CUDA and not drawn:
            yield event.name, event.time_range.end - event.time_range.start


def _place(event: Any, ranges: Ranges) -> tuple[str, str]:
    """(part, phase) of an operator, by what it was called from."""
    while event is not None:
        if event.name.startswith(RANGE):
            return event.name.removeprefix(RANGE), "forward"
        if event.name.startswith(NODE):
            summed = event.name.endswith("AccumulateGrad")
            return (SUMS if summed else ranges.numbers.get(event.sequence_nr, OTHER)), "backward"
        event = event.cpu_parent
    return OTHER, "forward"


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
        seconds, floor = done.seconds.total() / PROFILED, max(terms.values())
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


# What is told.


def render(record: Mapping[str, Any]) -> str:
    """The page of a record: what was measured on, then a section a model."""
    ceiling, versions = record["ceilings"], record["versions"]
    said = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    _, *reading, _ = (__doc__ or "").split("\n\n")
    lines = [
        "# How fast a training step is", "", *"\n\n".join(reading).splitlines(), "",
        f"{record['device']}; {said}.",
        f"Best possible here: {ceiling['flops'] / 1e12:,.1f} TFLOP/s ({ceiling['product']}^3 product), "
        f"{ceiling['bytes'] / 1e9:,.0f} GB/s ({ceiling['copy_bytes'] / 2**20:,.0f} MiB copied).",
    ]  # fmt: skip
    for model in record["models"]:
        lines += ["", *(_failed(model) if "error" in model else _section(model))]
    return "\n".join(lines) + "\n"


def _title(model: Mapping[str, Any]) -> str:
    return f"## {model['model']}, {model['batch']} x {model['seq']}"


def _failed(model: Mapping[str, Any]) -> list[str]:
    return [_title(model), "", f"Not measured: {model['error']}"]


def _section(model: Mapping[str, Any]) -> list[str]:
    wall, kernels, floor = model["wall"]["median"], model["kernel_seconds"], model["floor_seconds"]
    peak = "not measured" if model["peak_bytes"] is None else f"{model['peak_bytes'] / 2**30:.2f} GiB"
    ends = f"{_ms(model['wall']['least'])} to {_ms(model['wall']['most'])}"
    lines = [
        f"{_title(model)}, {model['dtype']}", "",
        f"{model['parameters'] / 1e6:,.1f} M parameters; {model['tokens_per_second']:,.0f} tokens/s; peak {peak}. "
        f"A step takes {_ms(wall)} ms by the host ({ends}), {_ms(model['device']['total']['median'])} ms by "
        f"{model['clock']}, and is launched in {_ms(model['launched']['median'])} ms. Its "
        f"{model['kernels']:,.0f} kernels take {_ms(kernels)} ms, at best {_ms(floor)} ms.",
        "", _waits(model["synchronisations"]), "",
        "| part | kernels | forward, update ms | backward ms | share | GFLOP | least MB | floor ms | ratio | binds |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    first = "launches, then " if model["launch_bound"] else ""
    for row in model["rows"]:
        binds = "" if row["binds"] is None else first + row["binds"]
        lines.append(_line(row["part"], row["kernels"], row["forward"], row["backward"], row["seconds"] / kernels,
                           row["flops"], row["least_bytes"], row["floor"], row["ratio"], binds))  # fmt: skip
    total = {key: sum(row[key] for row in model["rows"]) for key in ("forward", "backward", "flops", "least_bytes")}
    binds = "launches" if model["launch_bound"] else ""
    lines.append(_line("all", model["kernels"], total["forward"], total["backward"], 1.0, total["flops"],
                       total["least_bytes"], floor, kernels / floor, binds))  # fmt: skip
    lines.append(f"\nThe step is {wall / floor:.1f} times its floor.")
    return lines


def _waits(waits: Mapping[str, int] | None) -> str:
    if waits is None:
        return "Host synchronisations: a CPU has none to count."
    lines = "".join(f"\n- {count} x `{line}`" for line, count in waits.items())
    return f"Host synchronisations until the step is launched: {sum(waits.values())}.{lines}"


def _line(part: str, kernels: float, forward: float, backward: float, share: float, flops: int, least: int,
          floor: float, ratio: float | None, binds: str) -> str:  # fmt: skip
    cells = (part, f"{kernels:,.0f}", _ms(forward), _ms(backward), f"{share:.1%}", f"{flops / 1e9:,.1f}",
             f"{least / 1e6:,.1f}", _ms(floor), "" if ratio is None else f"{ratio:.1f}", binds)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds < 0.01 else f"{1e3 * seconds:,.1f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":\n")[0])
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
        print(render(json.loads(options.render.read_text(encoding="utf-8"))), end="")
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
                options.out.with_suffix(".md").write_text(render(record), encoding="utf-8")
    print(render(record), end="")


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
