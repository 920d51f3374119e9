"""The account of a workload: what the work is, before any of it is done.

``python -P -m executor.account`` reads a JSON request on stdin, {"model", "set", "opt"}, and writes the sealed account
on stdout. Nothing is computed and no weight is allocated: the whole model is built on the meta device for its
parameters and their routes, and one and two layers of it run forward and backward on tensors without memory at two
batches and two lengths, under the runtime's own autocast, memory mechanisms and optimizers, once for each set of
kernels that a plan may choose. Counts are affine in depth and bilinear in batch and length, so four points and two
depths give them for every size.
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
from itertools import combinations, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from executor.count import Counts, Tally, bilinear, number
from executor.count_updates import adamw_counts, apply_counts, newton_schulz_counts, tables_counts
from executor.guest import guarded
from executor.kernels import registry
from executor.mechanisms.table import ORDERED
from executor.optim.routing import Routed, split
from executor.phantom import phantoms
from executor.workloads import Module, build, configure, is_ours, resolve, values
from planner.door import (
    BadWorkload,
    ConfigRow,
    Form,
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
COUNTS = ("flops", "bytes", "launches", "saved", "peak", "host", "link")
OF_TABLES = ("tables_bytes", "tables_peak")  # what a model with tables has besides
DTYPES = ("fp32", "bf16")  # fp16 is as wide as bf16 and launches the same
# No part of what the work is: what is kept of real cards differs from one machine to the next.
_KEPT = ("most", "timed", "tuned")
_APPLY = {mechanism.NAME: mechanism.apply for mechanism in ORDERED}
Points = tuple[tuple[int, int], ...]
Kernels = Mapping[str, Sequence[KernelRow]]


def account(request: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the account, unsealed. Raises BadWorkload for a fault of the user."""
    model, settings, opt = _checked(request)
    workload = resolve(model)
    with guarded(f"--model {model}", is_ours(workload)):
        return _body(workload, model, settings, opt)


def _body(workload: Workload, model: str, settings: Mapping[str, str], opt: str) -> dict[str, Any]:
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
        "format_version": 2,
        "made_from": {
            "model": model,
            "set": dict(settings),
            "opt": opt,
            "torch": torch.__version__,
            "source": source_digest(workload),
        },
        "digest": workload_digest(routed, workload.kernels),
        "defaults": dict(workload.sizes),
        "config": config,
        "granule": GRANULE,
        "parameters": {route: sum(p.numel() for _, p in named) for route, named in routed._asdict().items()},
        "tensors": {route: len(named) for route, named in routed._asdict().items()},
        "matrices": list(_matrices(routed)),
        "shapes": newton_schulz_counts(routed, chosen),
        "apply": apply_counts(routed, chosen),
        "adamw": adamw_counts(routed, chosen),
        "tables": tables_counts(routed, chosen),
        "compute": _compute(workload, chosen, called, mechanisms, label),
        "kernels": {kernel: [dict(row) for row in rows] for kernel, rows in called.items()},
        "kernel_shapes": _kernel_shapes(workload, chosen),
        "mechanisms": mechanisms,
    }


def _refuse_idle(workload: Workload, config: Mapping[str, ConfigRow]) -> None:
    """Raise BadWorkload for a key of the model that was asked for and changes nothing beside the others."""
    for key, reason in (workload.idle(values(config)) if isinstance(workload, Idling) else {}).items():
        if config[key]["asked"] is not None:
            raise BadWorkload(f"{key}={config[key]['chosen']} would change nothing beside {reason}; leave it out")


def _checked(request: Mapping[str, Any]) -> tuple[str, Mapping[str, str], str]:
    model, settings, opt = request.get("model"), request.get("set", {}), request.get("opt", "muon")
    if not isinstance(model, str) or not model:
        raise BadWorkload("the request names no model")
    if not isinstance(settings, dict) or not all(isinstance(text, str) for text in settings.values()):
        raise BadWorkload("the request's set must hold KEY: VALUE text")
    if opt not in ("muon", "adamw"):
        raise BadWorkload(f"opt={opt}: must be one of muon, adamw")
    return model, settings, opt


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
    layers = min(2, int(chosen[workload.depth])) if workload.depth else 1
    with phantoms(), torch.device("cpu"):
        model = build(workload, _shallow(workload, chosen, layers), planned_kernels(workload, chosen), label)
        registry.calls.clear()
        measure(model, *points(workload)[0], "fp32")
    ran = {kernel for kernel, _ in registry.calls}
    return {kernel: rows for kernel, rows in workload.kernels.items() if kernel in ran}


def kernel_sets(kernels: Kernels, chosen: Mapping[str, Value]) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """(a choice of each kernel, the dtypes it is counted in), one for each set that a plan may choose and that counts
    otherwise than those before it."""
    choices = [list(_countable(kernels, kernel, str(chosen.get(kernel, "auto")))) for kernel in kernels]
    found: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {}
    for rows in product(*choices):
        named = {kernel: name for kernel, (name, _) in zip(kernels, rows, strict=True)}
        dtypes = tuple(dtype for dtype in DTYPES if all(dtype in of for _, of in rows))
        if dtypes:
            known = found.setdefault(kernel_set(named, kernels), (named, dtypes))
            found[kernel_set(named, kernels)] = (named, tuple(d for d in DTYPES if d in {*known[1], *dtypes}))
    return list(found.values())


def _countable(kernels: Kernels, kernel: str, asked: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows of ``kernel`` that auto may choose, under the names they are counted by; or the one row asked for, in
    every dtype: a refusal of it comes later."""
    if asked != "auto":
        yield asked, DTYPES
        return
    for row in reachable(kernels[kernel]):
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


def variants(rows: Mapping[str, MechanismRow]) -> list[tuple[str, ...]]:
    """The sets of mechanisms that make a forward and backward of their own, each in the order of ``rows``."""
    names = [name for name, row in rows.items() if "variant" in row]
    sets = [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]
    return [chosen for chosen in sets if not any(set(rows[name].get("excludes", ())) & set(chosen) for name in chosen)]


def _compute(
    workload: Workload,
    chosen: Mapping[str, Value],
    called: Kernels,
    mechanisms: Mapping[str, MechanismRow],
    label: str,
) -> dict[str, dict[str, dict[str, dict[str, Form]]]]:
    """Forward and backward of a micro-batch at the configured depth, by set of kernels, compute dtype and variant."""
    found: dict[str, dict[str, dict[str, dict[str, Form]]]] = {}
    for kernels, dtypes in kernel_sets(called, chosen):
        by_dtype = found.setdefault(kernel_set(kernels, called), {dtype: {} for dtype in dtypes})
        for engaged in variants(mechanisms):
            name = "+".join(mechanisms[item]["variant"] for item in engaged) or "plain"
            counted = _at_depths(workload, chosen, kernels, engaged, dtypes, label)
            for dtype in dtypes:
                by_dtype[dtype][name] = _forms(workload, chosen, counted[dtype])
    return found


ByDepth = dict[int, dict[tuple[int, int], Counts]]


def _at_depths(
    workload: Workload,
    chosen: Mapping[str, Value],
    kernels: Mapping[str, str],
    engaged: tuple[str, ...],
    dtypes: Sequence[str],
    label: str,
) -> dict[str, ByDepth]:
    """By dtype, the counts at each point of a model of one layer and of one of two (or of the very depth)."""
    depth = int(chosen[workload.depth]) if workload.depth else 1
    found = {dtype: ByDepth() for dtype in dtypes}

    for layers in (1, 2) if depth > 2 else (depth,):
        with phantoms(), torch.device("cpu"):
            model = build(workload, _shallow(workload, chosen, layers), kernels, label)
            for name in engaged:
                _APPLY[name](model)
            for dtype in dtypes:
                found[dtype][layers] = {point: measure(model, *point, dtype) for point in points(workload)}
    return found


def _shallow(workload: Workload, chosen: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """The configuration at another depth: what is the index of a layer stays within it."""
    if workload.depth is None:
        return dict(chosen)
    indices = [key.name for key in workload.keys if key.below == workload.depth]
    return {**chosen, workload.depth: layers, **{name: min(int(chosen[name]), layers - 1) for name in indices}}


def _forms(workload: Workload, chosen: Mapping[str, Value], by_depth: ByDepth) -> dict[str, Form]:
    """Bilinear forms at the configured depth from the counts at two depths (or at that very one)."""
    depth = int(chosen[workload.depth]) if workload.depth else 1
    (first, at_first), (last, at_last) = min(by_depth.items()), max(by_depth.items())
    forms = {}
    for count in (*COUNTS, *(name for name in OF_TABLES if any(counts[name] for counts in at_first.values()))):
        at = {point: counts[count] for point, counts in at_first.items()}
        if last > first:
            # Beside a table's gradient the layers above it hold nothing any more.
            more = _below(workload, chosen, depth) - first if count == "tables_peak" else depth - first
            at = {point: n + more * (at_last[point][count] - n) for point, n in at.items()}
        forms[count] = bilinear(at)
    beyond = _beyond({point: counts["peak"] - counts["saved"] for point, counts in at_last.items()})
    forms["peak"] = {key: number(Fraction(forms["saved"][key]) + beyond.get(key, 0)) for key in forms["saved"]}
    return forms


def _below(workload: Workload, chosen: Mapping[str, Value], depth: int) -> int:
    """How many layers there are up to the last that a key names the index of; ``depth`` where none does."""
    named = [int(chosen[key.name]) + 1 for key in workload.keys if workload.depth and key.below == workload.depth]
    return max(named, default=depth)


def _beyond(at: Mapping[tuple[int, int], int]) -> dict[str, Fraction]:
    """one + bt B T of the bytes that backward takes beyond those saved, through the two larger numbers of tokens.

    It is the largest of several such lines (of the head, of a layer, of a weight's gradient), each the longest for a
    while, so no bilinear form holds it. Near the workload's own size, and beyond, this is the line that counts.
    """
    (few, lower), (more, upper) = sorted((b * t, extra) for (b, t), extra in at.items())[-2:]
    slope = Fraction(upper - lower, more - few)
    return {"one": upper - slope * more, "bt": slope}


def measure(model: nn.Module, batch: int, length: int, dtype: str) -> Counts:
    """The counts of one forward and backward on zeros, with gradients already allocated; real, fake or meta tensors."""
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
    with Tally(known, tables) as tally:
        with autocast:
            loss = model(inputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"forward(inputs, targets) gives {found}; it must give the mean cross-entropy, a scalar")
        saved = tally.live
        torch.autograd.backward(loss)
    return {"saved": saved, **{name: getattr(tally, name) for name in (*COUNTS, *OF_TABLES) if name != "saved"}}


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
