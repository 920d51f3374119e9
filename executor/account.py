"""The account of a workload: what the work is, before any of it is done.

``python -P -m executor.account`` reads a JSON request on stdin, {"model", "set", "opt", "kinds"}, and writes the sealed
account on stdout. Nothing is computed and no weight is allocated: the whole model is built on the meta device for its
parameters and their routes, and one and two layers of it run forward and backward on tensors without memory at two
batches and two lengths, under the runtime's own autocast, memory mechanisms and optimizers, once for each kind of
device and set of kernels that a plan may choose. Counts are affine in depth and bilinear in batch and length, so four
points and two depths give them for every size.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from importlib import import_module
from itertools import combinations, product, takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from executor.count import Counts, Tally, bilinear, number
from executor.count_updates import adamw_counts, apply_counts, newton_schulz_counts, tables_counts
from executor.guest import guarded
from executor.kernels import registry
from executor.mechanisms.table import ORDERED
from executor.optim.routing import Routed, split
from executor.phantom import phantoms
from executor.places import followed
from executor.workloads import Module, build, configure, is_ours, resolve, values
from planner.door import (
    BadWorkload,
    ConfigRow,
    Idling,
    KernelRow,
    MechanismRow,
    Shaped,
    Value,
    Workload,
    counted_as,
    kernel_set,
    reachable,
)

GRANULE = 16
LENGTHS = (64, 128)  # whole chunks of every kernel
# Not fewer sequences: with one, or with one or two chunks, some copies fall away. From here on the forms are exact;
# below they err by a few per cent.
LEAST_BATCH = 4
COUNTS = ("flops", "bytes", "launches", "host", "link")
OF_TABLES = ("tables_bytes", "tables_peak")  # what a model with tables has besides
SAVED = "saved/"  # begins the count of the bytes that one part of the model keeps for backward
KINDS = ("cpu", "cuda")
DTYPES = ("fp32", "bf16")  # fp16 is as wide as bf16 and launches the same
# No part of what the work is: what is kept of real cards differs from one machine to the next.
_KEPT = ("most", "timed", "tuned")
_APPLY = {mechanism.NAME: mechanism.apply for mechanism in ORDERED}
Points = tuple[tuple[int, int], ...]
Kernels = Mapping[str, Sequence[KernelRow]]


def account(request: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the account, unsealed. Raises BadWorkload for a fault of the user."""
    asked = _checked(request)
    workload = resolve(asked.model)
    with guarded(f"--model {asked.model}", is_ours(workload)):
        return _body(workload, asked)


def _body(workload: Workload, asked: Asked) -> dict[str, Any]:
    model, settings, opt, kinds = asked
    label = f"--model {model}"
    config = configure(workload, settings)
    chosen = values(config)
    kernels = planned_kernels(workload, chosen)
    with torch.device("meta"):
        whole = build(workload, chosen, kernels, label)
    routed = split(whole, opt)
    _refuse_idle(workload, config)
    mechanisms = _mechanisms(whole, routed, opt, points(workload))
    called = _called(workload, chosen, label)
    for kernel in workload.kernels.keys() - called.keys():
        if config.pop(kernel, {"asked": None})["asked"] not in (None, "auto"):
            raise BadWorkload(f"{kernel}={chosen[kernel]}: this configuration calls no kernel of that name")
    return {
        "format": "dormouse.account",
        "format_version": 3,
        "made_from": {
            "model": model,
            "set": dict(settings),
            "opt": opt,
            "kinds": list(kinds),
            "torch": torch.__version__,
            "source": source_digest(workload),
        },
        "digest": workload_digest(routed, workload.kernels),
        "defaults": dict(workload.sizes),
        "config": config,
        "granule": GRANULE,
        "parameters": {route: sum(p.numel() for _, p in named) for route, named in routed._asdict().items()},
        "tensors": {route: len(named) for route, named in routed._asdict().items()},
        "blocks": {route: sum(_rest(p) for _, p in named) for route, named in routed._asdict().items()},
        "matrices": list(_matrices(routed)),
        "shapes": newton_schulz_counts(routed, chosen),
        "apply": apply_counts(routed, chosen),
        "adamw": adamw_counts(routed, chosen),
        "tables": tables_counts(routed, chosen),
        "compute": Counting(workload, chosen, called, mechanisms, label).all(kinds),
        "kernels": {kernel: [dict(row) for row in rows] for kernel, rows in called.items()},
        "kernel_shapes": _kernel_shapes(workload, chosen),
        "mechanisms": mechanisms,
    }


def _refuse_idle(workload: Workload, config: Mapping[str, ConfigRow]) -> None:
    """Raise BadWorkload for a key of the model that was asked for and changes nothing beside the others."""
    for key, reason in (workload.idle(values(config)) if isinstance(workload, Idling) else {}).items():
        if config[key]["asked"] is not None:
            raise BadWorkload(f"{key}={config[key]['chosen']} would change nothing beside {reason}; leave it out")


class Asked(NamedTuple):
    """What is to be counted, and for which kinds of device."""

    model: str
    settings: Mapping[str, str]
    opt: str
    kinds: tuple[str, ...]


def _checked(request: Mapping[str, Any]) -> Asked:
    model, settings, opt = request.get("model"), request.get("set", {}), request.get("opt", "muon")
    if not isinstance(model, str) or not model:
        raise BadWorkload("the request names no model")
    if not isinstance(settings, dict) or not all(isinstance(text, str) for text in settings.values()):
        raise BadWorkload("the request's set must hold KEY: VALUE text")
    if opt not in ("muon", "adamw"):
        raise BadWorkload(f"opt={opt}: must be one of muon, adamw")
    kinds = tuple(kind for kind in KINDS if kind in request.get("kinds", KINDS))
    if not kinds:
        raise BadWorkload(f"the request's kinds must be of {', '.join(KINDS)}")
    return Asked(model, settings, opt, kinds)


# CUDA's caching allocator in torch (CUDACachingAllocator.cpp): from 10 MiB on, memory is asked of the driver in
# multiples of 2 MiB, and a rest of up to 1 MiB stays with the block.
_LARGE, _ROUNDED, _LEAST_REST = 10 * 2**20, 2 * 2**20, 2**20


def _rest(tensor: Tensor) -> int:
    """Bytes by which the block of a tensor alone in its segment is larger than the tensor, on a card."""
    nbytes = tensor.numel() * tensor.element_size()
    rest = -nbytes % _ROUNDED
    return rest if nbytes >= _LARGE and rest <= _LEAST_REST else 0


def points(workload: Workload) -> Points:
    """Two batches times two lengths (batch, length). The tokens are about those of the workload's own sizes: at fewer,
    a large model's peak lies where the weights' temporaries are."""
    batch = max(LEAST_BATCH, -(-workload.sizes["batch"] * workload.sizes["seq"] // LENGTHS[0]))
    return tuple((b, length) for b in (batch // 2, batch) for length in LENGTHS)


def planned_kernels(workload: Workload, chosen: Mapping[str, Value]) -> dict[str, str]:
    """The row that each kernel is built with here: the one asked for, else the first that a CPU runs."""
    named = {}
    for kernel, rows in workload.kernels.items():
        asked = chosen.get(kernel, "auto")
        runs_here = next((row["name"] for row in rows if "cpu" in row["devices"]), rows[0]["name"])
        named[kernel] = runs_here if asked == "auto" else str(asked)
    return named


def _called(workload: Workload, chosen: Mapping[str, Value], label: str) -> dict[str, Sequence[KernelRow]]:
    """The rows of the kernels that a forward calls under this configuration: others have no choice to be made."""
    with phantoms():
        model = build(workload, _shallow(workload, chosen, 1), planned_kernels(workload, chosen), label)
        registry.calls.clear()
        measure(model, *points(workload)[0], "fp32")
    ran = {kernel for kernel, _ in registry.calls}
    return {kernel: rows for kernel, rows in workload.kernels.items() if kernel in ran}


def kernel_sets(
    kernels: Kernels, chosen: Mapping[str, Value], kind: str
) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """(a choice of each kernel, the dtypes it is counted in), one for each set that a plan may choose on a device of
    ``kind`` and that counts otherwise than those before it."""
    choices = [list(_countable(kernels, kernel, str(chosen.get(kernel, "auto")), kind)) for kernel in kernels]
    found: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {}
    for rows in product(*choices):
        named = {kernel: name for kernel, (name, _) in zip(kernels, rows, strict=True)}
        dtypes = tuple(dtype for dtype in DTYPES if all(dtype in of for _, of in rows))
        if dtypes:
            known = found.setdefault(kernel_set(named, kernels), (named, dtypes))
            found[kernel_set(named, kernels)] = (named, tuple(d for d in DTYPES if d in {*known[1], *dtypes}))
    return list(found.values())


def _countable(kernels: Kernels, kernel: str, asked: str, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows of ``kernel`` that auto may choose, under the names they are counted by; or the one row asked for, in
    every dtype: a refusal of it comes later."""
    if asked != "auto":
        yield asked, DTYPES
        return
    for row in reachable(kernels[kernel]):
        if kind in row["devices"]:
            yield counted_as(kernel, row["name"], kernels), tuple(_served(row))


def _served(row: Mapping[str, Any]) -> Iterator[str]:
    if "fp32" in row["dtypes"]:
        yield "fp32"
    if {"bf16", "fp16"} & set(row["dtypes"]):
        yield "bf16"


def _kernel_shapes(workload: Workload, chosen: Mapping[str, Value]) -> dict[str, dict[str, int]]:
    told = workload.kernel_shapes(chosen) if isinstance(workload, Shaped) else {}
    return {kernel: dict(shape) for kernel, shape in told.items()}


def _matrices(routed: Routed) -> Iterator[dict[str, Any]]:
    """What Muon updates: a stack [E, m, n] is one job of E matrices."""
    for name, parameter in routed.muon:
        yield {"name": name, "shape": list(parameter.shape)}


def workload_digest(routed: Routed, kernels: Mapping[str, Any]) -> str:
    """SHA-256 of what the workload is: names, shapes, dtypes and routes of its parameters, and its kernel rows.

    The executor computes it of the model it built; a learning rate does not change it, a layer does.
    """
    parameters = [
        [name, list(p.shape), str(p.dtype).removeprefix("torch."), route]
        for route, named in routed._asdict().items()
        for name, p in named
    ]
    rows = {
        kernel: [{key: value for key, value in row.items() if key not in _KEPT} for row in of]
        for kernel, of in kernels.items()
    }
    return _sha256(json.dumps([parameters, rows], sort_keys=True, separators=(",", ":")).encode())


def source_digest(workload: Workload) -> str:
    """SHA-256 over the executor's source and the file of a user's own model."""
    root = Path(__file__).parent
    lines = [f"{path.relative_to(root).as_posix()} {_sha256(path.read_bytes())}" for path in sorted(root.rglob("*.py"))]
    factory = workload.factory if isinstance(workload, Module) else type(workload)
    file = getattr(sys.modules.get(factory.__module__), "__file__", None)
    if file and not Path(file).is_relative_to(root):
        lines.append(f"model {_sha256(Path(file).read_bytes())}")
    return _sha256("\n".join(lines).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _mechanisms(model: nn.Module, routed: Routed, opt: str, at: Points) -> dict[str, MechanismRow]:
    """The mechanisms that this workload can use at all, in their order; whether a rank can is decided by the plan."""
    offered: dict[str, MechanismRow] = {}
    for place, mechanism in enumerate(ORDERED):
        if not mechanism.offered(model, opt):
            continue
        row: MechanismRow = mechanism.ROW.copy()
        row["order"] = place
        if hasattr(mechanism, "state_bytes"):
            row["bytes"] = mechanism.state_bytes(routed)
        if "moves" in row:
            sizes = (mechanism.staging_bytes, mechanism.host_bytes, mechanism.pinned_bytes, mechanism.link_bytes)
            row["staging"], row["host"], row["pinned"], row["link"] = (
                bilinear({point: size(model, *point) for point in at}) for size in sizes
            )
        offered[mechanism.NAME] = row
    return offered


def variants(rows: Mapping[str, MechanismRow], kind: str) -> list[tuple[str, ...]]:
    """The sets of mechanisms that make a forward and backward of their own on a device of ``kind``, each in the order
    of ``rows``."""
    names = [name for name, row in rows.items() if "variant" in row and kind in row["devices"]]
    sets = [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]
    return [chosen for chosen in sets if not any(set(rows[name].get("excludes", ())) & set(chosen) for name in chosen)]


Course = list[tuple[int, int]]


class Measured(NamedTuple):
    """What came of one forward and backward: counts; after each operator of both the bytes alive, what an opaque one
    took within itself included, and that part alone; how many operators forward has; and the bytes of weights that
    autocast holds to its end beside those saved."""

    counts: Counts
    course: Course
    turn: int
    cast: int

    def saved(self) -> int:
        """Bytes kept for backward."""
        return sum(count for name, count in self.counts.items() if name.startswith(SAVED))


AtPoints = dict[tuple[int, int], Measured]
Case = tuple[str, str]  # kind of device, dtype
Forms = dict[str, Any]  # of a count its form; of "saved" a form for each part; of "beyond" and "first" lines
Compute = dict[str, dict[str, dict[str, dict[str, Forms]]]]


class Counting:
    """Forward and backward of a micro-batch at the configured depth, by kind, set of kernels, compute dtype and
    variant. One model serves all kinds and dtypes of a set of kernels."""

    def __init__(
        self,
        workload: Workload,
        chosen: Mapping[str, Value],
        called: Kernels,
        mechanisms: Mapping[str, MechanismRow],
        label: str,
    ) -> None:
        self.workload, self.chosen, self.called = workload, chosen, called
        self.mechanisms, self.label = mechanisms, label
        self._terms: dict[tuple[str, Case], dict[str, str] | None] = {}  # what `_terms_of` the plain variant are

    def all(self, kinds: Sequence[str]) -> Compute:
        found: Compute = {kind: {} for kind in kinds}
        for name, kernels, dtypes in self._sets(kinds):
            for kind, of in dtypes.items():
                found[kind][name] = {dtype: {} for dtype in of}
            for engaged in variants(self.mechanisms, "cuda"):
                cases = [
                    (kind, dtype)
                    for kind, of in dtypes.items()
                    for dtype in of
                    if engaged in variants(self.mechanisms, kind)
                ]
                variant = "+".join(self.mechanisms[item]["variant"] for item in engaged) or "plain"
                for (kind, dtype), forms in self._counted(name, kernels, engaged, cases).items():
                    found[kind][name][dtype][variant] = forms
        return found

    def _sets(self, kinds: Sequence[str]) -> list[tuple[str, dict[str, str], dict[str, tuple[str, ...]]]]:
        """(name, choice of each kernel, dtypes by kind) of each set of kernels."""
        found: dict[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]] = {}
        for kind in kinds:
            for kernels, dtypes in kernel_sets(self.called, self.chosen, kind):
                found.setdefault(kernel_set(kernels, self.called), (kernels, {}))[1][kind] = dtypes
        return [(name, kernels, dtypes) for name, (kernels, dtypes) in found.items()]

    def _counted(
        self, name: str, kernels: Mapping[str, str], engaged: tuple[str, ...], cases: Sequence[Case]
    ) -> dict[Case, Forms]:
        """Of a model of one layer and of one of two (or of the very depth), the forms of each case."""
        depth = int(self.chosen[self.workload.depth]) if self.workload.depth else 1
        counted: dict[Case, dict[int, AtPoints]] = {case: {} for case in cases}
        for layers in (1, 2) if depth > 2 else (depth,):
            with phantoms():
                shallow = _shallow(self.workload, self.chosen, layers)
                model = build(self.workload, shallow, kernels, self.label)
                for mechanism in engaged:
                    _APPLY[mechanism](model)
            for case in cases:
                counted[case][layers] = self._at_points(model, case, self._terms.get((name, case)))
        if not engaged:
            self._terms |= {
                (name, case): _terms_of(by_depth, points(self.workload)) for case, by_depth in counted.items()
            }
        return {case: _forms(self.workload, self.chosen, by_depth) for case, by_depth in counted.items()}

    def _at_points(self, model: nn.Module, case: Case, terms: Mapping[str, str] | None) -> AtPoints:
        """What is measured at each point. With ``terms``, three of them tell the fourth."""
        kind, dtype = case
        at = points(self.workload)
        with phantoms(kind):
            found = {point: measure(model, *point, dtype) for point in (at if terms is None else (*at[:2], at[3]))}
        if terms is not None:
            found[at[2]] = Measured(_fourth(found, at, terms), [], 0, 0)
        return found


def _fourth(found: Mapping[tuple[int, int], Measured], at: Points, terms: Mapping[str, str]) -> Counts:
    """The counts at (b1, t0) from those at (b0, t0), (b0, t1) and (b1, t1), of forms that lack one of ``terms``."""
    ratio = at[2][0] // at[0][0]
    first, second, last = (found[at[place]].counts for place in (0, 1, 3))
    counts = {}
    for name in {*first, *second, *last}:
        a, b, c = (measured.get(name, 0) for measured in (first, second, last))
        counts[name] = a + c - b if terms.get(name) == "bt" else c - ratio * (b - a)
    return counts


def _terms_of(by_depth: Mapping[int, AtPoints], at: Points) -> dict[str, str] | None:
    """Of each count the term that it lacks: "t", as sums over tokens and sequences do, or "bt", as operators do that
    run once a chunk of the length. None where a count has both: then no three points tell the fourth."""
    found: dict[str, str] = {}
    for measured in by_depth.values():
        for name, count in measured[at[2]].counts.items():
            lacking = [term for term in ("t", "bt") if _fourth(measured, at, {name: term})[name] == count]
            if name != "beyond" and found.get(name) not in lacking:
                if not lacking or name in found:
                    return None
                found[name] = lacking[0]
    return found


def _shallow(workload: Workload, chosen: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """The configuration at another depth: what is the index of a layer stays within it."""
    if workload.depth is None:
        return dict(chosen)
    indices = [key.name for key in workload.keys if key.below == workload.depth]
    return {**chosen, workload.depth: layers, **{name: min(int(chosen[name]), layers - 1) for name in indices}}


def _forms(workload: Workload, chosen: Mapping[str, Value], by_depth: Mapping[int, AtPoints]) -> Forms:
    """Bilinear forms at the configured depth from the counts at two depths (or at that very one)."""
    depth = int(chosen[workload.depth]) if workload.depth else 1
    (first, at_first), (last, at_last) = min(by_depth.items()), max(by_depth.items())
    found: Forms = {"saved": {}}
    for name in sorted({name for measured in (*at_first.values(), *at_last.values()) for name in measured.counts}):
        at = {point: measured.counts.get(name, 0) for point, measured in at_first.items()}
        if last > first:
            # Beside a table's gradient the layers above it hold nothing any more.
            more = _below(workload, chosen, depth) - first if name == "tables_peak" else depth - first
            at = {point: n + more * (at_last[point].counts.get(name, 0) - n) for point, n in at.items()}
        if name.startswith(SAVED):
            found["saved"][name.removeprefix(SAVED)] = bilinear(at)
        elif name in COUNTS or any(at.values()):
            found[name] = bilinear(at)
    ends = points(workload)[1::2]
    tokens = [b * t for b, t in ends]
    shallow, deep = ([at[point] for point in ends] for at in (at_first, at_last))
    grown = (depth - last) * (deep[1].cast - shallow[1].cast)
    left_out = _shared(shallow[1], deep[1]) if last > first else 0
    found["beyond"] = envelope(*zip(tokens, (_beyond(item, left_out, grown) for item in deep), strict=True))
    if last > first:
        found["first"] = envelope(*zip(tokens, (item.course for item in shallow), strict=True))
    return found


def _shared(one: Measured, more: Measured) -> int:
    """How many operators at their end two depths have in common: the first layer's backward. However many layers there
    are above it, they hold nothing any more by then."""
    pairs = zip(reversed(one.course[one.turn :]), reversed(more.course[more.turn :]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _beyond(item: Measured, left_out: int, grown: int) -> Course:
    """A course beyond what is saved, without so many operators at its end. In forward weights that autocast casts once
    are held to the end, those of further layers too: ``grown``."""
    saved, course = item.saved(), item.course[: len(item.course) - left_out]
    return [
        (alive - saved + (grown if place < item.turn else 0), inside) for place, (alive, inside) in enumerate(course)
    ]


def _below(workload: Workload, chosen: Mapping[str, Value], depth: int) -> int:
    """How many layers there are up to the last that a key names the index of; ``depth`` where none does."""
    named = [int(chosen[key.name]) + 1 for key in workload.keys if workload.depth and key.below == workload.depth]
    return max(named, default=depth)


def envelope(few: tuple[int, Course], many: tuple[int, Course]) -> list[dict[str, int | float]]:
    """The bytes alive in a course (or beyond those saved), as lines one + bt B T whose highest counts.

    Backward is a course of operators, the same at two numbers of tokens, and what is alive after each is such a line:
    so are the highest of all of them, of which a few are highest somewhere. ``inside``: bytes a token that an opaque
    operator takes within itself at that place. Where the courses differ, one line through their highest points.
    """
    (n0, first), (n1, second) = few, many
    if len(first) != len(second):
        first, second = [max(first, default=(0, 0))], [max(second, default=(0, 0))]
    step = n1 - n0
    # As (slope, value at 0), both times the step, so that they are whole.
    lines = {
        (high - low, low * step - (high - low) * n0): inside
        for (low, _), (high, inside) in zip(first, second, strict=True)
    }
    return [
        {
            "one": number(Fraction(one, step)),
            "bt": number(Fraction(slope, step)),
            "inside": number(Fraction(lines[slope, one], n1)),
        }
        for slope, one in _highest(sorted(lines))
    ]


def _highest(lines: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of lines (slope, value at 0) of rising slope, those that are the highest somewhere from 0 on."""
    kept: list[tuple[int, int]] = []
    for slope, one in lines:
        while kept and kept[-1][1] <= one:
            kept.pop()
        while len(kept) > 1 and _meet(kept[-2], (slope, one)) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append((slope, one))
    return kept


def _meet(low: tuple[int, int], high: tuple[int, int]) -> Fraction:
    """Where a line meets one of a greater slope."""
    return Fraction(low[1] - high[1], high[0] - low[0])


def measure(model: nn.Module, batch: int, length: int, dtype: str) -> Measured:
    """One forward and backward on zeros, with gradients already allocated; real, fake or phantom tensors.

    Counts are those of a tally; ``saved/PART`` for each part of the model that keeps bytes for backward; ``beyond``,
    what backward takes at its peak beyond all that is saved.
    """
    device = next(model.parameters()).device
    inputs = torch.zeros(batch, length, dtype=torch.int64, device=device)
    targets = torch.zeros_like(inputs)
    known: list[Tensor] = [inputs, targets]
    for parameter in model.parameters():
        known.append(parameter)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            known.append(parameter.grad)
    known += list(model.buffers())
    tables = [parameter for parameter in model.parameters() if getattr(parameter, "lazy_rows", False)]
    autocast = torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()
    with followed(model) as place, Tally(known, tables, place) as tally:
        with autocast:
            loss = model(inputs, targets)
            held = tally.live
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"forward(inputs, targets) gives {found}; it must give the mean cross-entropy, a scalar")
        saved, parts, turn = tally.live, tally.saved(), len(tally.course)
        torch.autograd.backward(loss)
    counts = {name: getattr(tally, name) for name in (*COUNTS, *OF_TABLES)}
    counts |= {"beyond": tally.peak - saved, **{f"{SAVED}{part}": n for part, n in parts.items()}}
    return Measured(counts, tally.course, turn, held - saved)


class _NoCompiler(ModuleType):
    """Stands in for torch._dynamo until something needs more of it than "leave this function alone".

    Torch wraps many of its meta functions so that the compiler passes them by, and imports the whole compiler for that
    at the first call: a third of this program's time, for nothing, since nothing is compiled here.
    """

    # What torch's checkpoint asks: whether tracing inside a trace is an error. There is no trace.
    config = SimpleNamespace(error_on_nested_fx_trace=True, patch=lambda *_, **__: nullcontext())

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """The function as it is."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect asks every module for its file
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)

    @classmethod
    def install(cls) -> None:
        """Take the place of torch._dynamo unless it is imported already."""
        name = "torch._dynamo"
        if name not in sys.modules:
            sys.modules[name] = cls(name)
            torch._dynamo = sys.modules[name]


def _stdout_for_the_account() -> int:
    """A descriptor of stdout that no one else writes to: what a user's code prints goes to stderr from here on."""
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    return kept


def main() -> int:
    """Request on stdin, sealed account on stdout; exit code 2 and one line on stderr for a fault of the user."""
    from schemas.form import Unfaithful, parse, render
    from schemas.seal import seal

    stdout = _stdout_for_the_account()
    _NoCompiler.install()
    gc.disable()  # a short life with few cycles: collecting would cost a tenth of it
    try:
        request = parse(sys.stdin.buffer.read(), "request")
        if not isinstance(request, dict):
            raise BadWorkload("the request must be a JSON object")
        document = render(seal(account(request)))
    except (BadWorkload, Unfaithful) as error:
        print(f"dormouse: {error}", file=sys.stderr)
        return 2
    with open(stdout, "wb") as file:
        file.write(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
