"""The parts of a step for ``tests/benchmarks/throughput.py``: each a named range, its borders, the products inside, and
the kernels that a profile saw of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType, _get_sequence_nr
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

import executor.optim.muon as muon_module
from executor import loop
from executor.count import flops_of, tensors_in
from executor.models.engram import Engram
from executor.models.kda import Block, FeedForward, KdaModel, Mix
from executor.models.moe import MoE
from executor.optim.tables import Tables

HEAD, BLOCK, MIX, CORE = "embedding, head, loss", "norms, residual", "projections, short convolution", "KDA core"
ROUTING, PRODUCTS, EXPERTS = "MoE: routing", "MoE: grouped products", "MoE: casts, SwiGLU"
FEED, ENGRAM = "feed-forward", "Engram"
SUMS, CLIP = "gradients: zeroed, added up", "gradients: norm, clipping"
MOMENTUM, ITERATION, APPLY = "Muon: momentum", "Muon: Newton-Schulz", "Muon: apply"
ADAMW, TABLES, BALANCE, OTHER = "AdamW", "tables' rule", "MoE: balance", "other"
PARTS = (HEAD, BLOCK, MIX, CORE, ROUTING, PRODUCTS, EXPERTS, FEED, ENGRAM, SUMS, CLIP, MOMENTUM, ITERATION, APPLY,
         ADAMW, TABLES, BALANCE, OTHER)  # fmt: skip
RANGE, NODE = "part: ", "autograd::engine::evaluate_function: "


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
            first = _get_sequence_nr()
            try:
                with record_function(RANGE + part):
                    result = inner(*args, **kwargs)
            finally:
                self.stack.pop()
            for number in range(first, _get_sequence_nr()):
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
        node: Any = torch._C._current_autograd_node()
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


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matrix FLOPs of each part while it is entered."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
    ranges.put(parts.fleet, "clear", SUMS, border=False)
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
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    names: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

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
    return str(event.name).startswith(("aten::", "dormouse::"))


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
