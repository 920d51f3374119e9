"""The account of a workload: what the work is, before any of it is done.

``python -P -m executor.account`` reads a JSON request on stdin, {"model", "set", "opt"}, and writes the sealed account
on stdout. Nothing is computed and no weight is allocated: the whole model is built on the meta device for its
parameters and their routes, and one and two layers of it run forward and backward on tensors without memory at two
batches and two lengths, under the runtime's own autocast, recomputation and optimizers. Counts are affine in depth and
bilinear in batch and length, so four points and two depths give them for every size.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from executor.count import Counts, Form, Tally, bilinear
from executor.count_updates import adamw_counts, apply_counts, newton_schulz_counts
from executor.guest import guarded
from executor.mechanisms import muon_state_bf16, recompute
from executor.optim.routing import Routed, split
from executor.phantom import phantoms
from executor.workloads import Module, build, configure, is_ours, resolve, values
from planner.door import BadWorkload, KernelRow, Value, Workload

GRANULE = 16
# Not smaller: with one sequence or one or two chunks some copies fall away, and at few tokens the peak lies where the
# weights' own temporaries are. From here on the forms are exact; below they err by a few per cent.
POINTS = tuple((batch, length) for batch in (2, 4) for length in (128, 192))
COUNTS = ("flops", "bytes", "launches", "saved", "peak")


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
    return {
        "format": "dormouse.account",
        "format_version": 1,
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
        "matrices": [{"name": name, "shape": list(p.shape)} for name, p in routed.muon],
        "shapes": newton_schulz_counts(routed, chosen),
        "apply": apply_counts(routed, chosen),
        "adamw": adamw_counts(routed, chosen),
        "compute": _compute(workload, chosen, kernels, bool(recompute.blocks(whole)), label),
        "kernels": {kernel: [dict(row) for row in rows] for kernel, rows in workload.kernels.items()},
        "mechanisms": _mechanisms(whole, opt),
    }


def _checked(request: Mapping[str, Any]) -> tuple[str, Mapping[str, str], str]:
    model, settings, opt = request.get("model"), request.get("set", {}), request.get("opt", "muon")
    if not isinstance(model, str) or not model:
        raise BadWorkload("the request names no model")
    if not isinstance(settings, dict) or not all(isinstance(text, str) for text in settings.values()):
        raise BadWorkload("the request's set must hold KEY: VALUE text")
    if opt not in ("muon", "adamw"):
        raise BadWorkload(f"opt={opt}: must be one of muon, adamw")
    return model, settings, opt


def planned_kernels(workload: Workload, chosen: Mapping[str, Value]) -> dict[str, str]:
    """The row counted for each kernel: the one set by the key of the kernel's name, else the first that a CPU runs."""
    named = {}
    for kernel, rows in workload.kernels.items():
        asked = chosen.get(kernel, "auto")
        runs_here = next((row["name"] for row in rows if "cpu" in row["devices"]), rows[0]["name"])
        named[kernel] = runs_here if asked == "auto" else str(asked)
    return named


def workload_digest(routed: Routed, kernels: Mapping[str, Any]) -> str:
    """SHA-256 of what the workload is: names, shapes, dtypes and routes of its parameters, and its kernel rows.

    The executor computes it of the model it built; a learning rate does not change it, a layer does.
    """
    parameters = [
        [name, list(p.shape), str(p.dtype).removeprefix("torch."), route]
        for route, named in routed._asdict().items()
        for name, p in named
    ]
    rows: dict[str, list[KernelRow]] = {kernel: list(rows) for kernel, rows in kernels.items()}
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


def _mechanisms(model: nn.Module, opt: str) -> dict[str, dict[str, Any]]:
    """The mechanisms that this workload can use at all; whether a rank can is decided by the plan."""
    offered: dict[str, dict[str, Any]] = {}
    if recompute.blocks(model):
        offered[recompute.NAME] = dict(recompute.ROW)
    if muon_state_bf16.eligibility({"device": "cpu", "opt": opt})[0]:
        offered[muon_state_bf16.NAME] = dict(muon_state_bf16.ROW)
    return offered


def _compute(
    workload: Workload, chosen: Mapping[str, Value], kernels: Mapping[str, str], has_blocks: bool, label: str
) -> dict[str, dict[str, dict[str, Form]]]:
    """Forward and backward of a micro-batch, by compute dtype and variant, at the configured depth."""
    key = workload.depth
    depth = int(chosen[key]) if key else 1
    depths = (1, 2) if key and depth > 2 else (depth,)
    variants = ("plain", "recompute") if has_blocks else ("plain",)
    found: dict[tuple[str, str, int], dict[tuple[int, int], Counts]] = {}
    for layers in depths:
        config = {**chosen, key: layers} if key else chosen
        with phantoms(), torch.device("cpu"):
            model = build(workload, config, kernels, label)
            for variant in variants:
                if variant == "recompute":
                    recompute.apply(model)
                for dtype in ("fp32", "bf16"):
                    found[dtype, variant, layers] = {point: measure(model, *point, dtype) for point in POINTS}
    return {
        dtype: {variant: _forms([found[dtype, variant, n] for n in depths], depth) for variant in variants}
        for dtype in ("fp32", "bf16")
    }


def _forms(by_depth: list[dict[tuple[int, int], Counts]], depth: int) -> dict[str, Form]:
    """Bilinear forms at ``depth`` from the counts of one layer and two (or of the very depth)."""
    forms = {}
    for count in COUNTS:
        first = by_depth[0]
        at = {point: counts[count] for point, counts in first.items()}
        if len(by_depth) == 2:
            at = {point: n + (depth - 1) * (by_depth[1][point][count] - n) for point, n in at.items()}
        forms[count] = bilinear(at)
    return forms


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
    autocast = torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()
    with Tally(known) as tally:
        with autocast:
            loss = model(inputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"forward(inputs, targets) gives {found}; it must give the mean cross-entropy, a scalar")
        saved = tally.live
        torch.autograd.backward(loss)
    return {"flops": tally.flops, "bytes": tally.bytes, "launches": tally.launches, "saved": saved, "peak": tally.peak}


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
