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
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from executor.count import bilinear
from executor.count_updates import adamw_counts, apply_counts, newton_schulz_counts, tables_counts
from executor.counting import KINDS, LENGTHS, Counting, Points, called_kernels, planned_kernels, points
from executor.guest import guarded
from executor.mechanisms.table import ORDERED
from executor.no_compiler import NoCompiler
from executor.optim.routing import Routed, split
from executor.units import parameters_of
from executor.workloads import Module, build, configure, is_ours, resolve, values
from planner.door import (
    BadWorkload,
    ConfigRow,
    Idling,
    MechanismRow,
    Shaped,
    Value,
    Workload,
    block_rest,
)

GRANULE = 16
# No part of what the work is: what is kept of real cards differs from one machine to the next.
_KEPT = ("most", "timed", "tuned")


def account(request: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the account, unsealed. Raises BadWorkload for a fault of the user."""
    asked = _checked(request)
    workload = resolve(asked.model)
    try:
        with guarded(f"--model {asked.model}", is_ours(workload)):
            return _body(workload, asked)
    except BadWorkload as error:
        if not _OF_NO_VALUES.search(str(error)):
            raise
        raise BadWorkload(
            f"{error}; planning runs the module on tensors that have shapes and no values, so neither __init__ nor "
            "forward may read one: by item(), if, nonzero, a mask that torch looks into (is_causal=True tells it), "
            "lengths of packed sequences, sparse gradients"
        ) from None


# What torch says where a value was read that is not there.
_OF_NO_VALUES = re.compile(r"meta tensors?\b|\bmeta Long\b|meta_nonzero|SparseTensorImpl|data pointer of Tensor")


def _body(workload: Workload, asked: Asked) -> dict[str, Any]:
    model, settings, opt, kinds, lengths = asked
    label = f"--model {model}"
    config = configure(workload, settings)
    chosen = values(config)
    kernels = planned_kernels(workload, chosen)
    with torch.device("meta"):
        whole = build(workload, chosen, kernels, label)
    empty = [name for name, parameter in whole.named_parameters() if not parameter.numel()]
    if empty:
        raise BadWorkload(f"{label}: its parameter {empty[0]} has no elements; leave it out")
    routed = split(whole, opt)
    _refuse_idle(workload, config)
    # A module of one's own is counted at the lengths that are planned: it may take no others, and what it does need not
    # be a line of the length. Ours are, of whole chunks of their kernels.
    own = isinstance(workload, Module)
    at = points(workload, lengths) if own else points(workload)
    mechanisms = _mechanisms(whole, routed, opt, at)
    called = called_kernels(workload, chosen, label, at)
    for kernel in workload.kernels.keys() - called.keys():
        if config.pop(kernel, {"asked": None})["asked"] not in (None, "auto"):
            raise BadWorkload(f"{kernel}={chosen[kernel]}: this configuration calls no kernel of that name")
    return {
        "format": "dormouse.account",
        "format_version": 4,
        "made_from": {
            "model": model,
            "set": dict(settings),
            "opt": opt,
            "kinds": list(kinds),
            **({"lengths": list(lengths)} if own else {}),
            "torch": torch.__version__,
            "source": source_digest(workload),
        },
        "digest": workload_digest(routed, workload.kernels),
        "defaults": dict(workload.sizes),
        "config": config,
        "granule": 1 if own else GRANULE,
        "parameters": {route: sum(p.numel() for _, p in named) for route, named in routed._asdict().items()},
        "frozen": sum(p.numel() for p in whole.parameters() if not p.requires_grad),
        "buffers": sum(buffer.nbytes for buffer in whole.buffers()),
        "tensors": {route: len(named) for route, named in routed._asdict().items()},
        "blocks": {
            route: sum(block_rest(p.numel() * p.element_size()) for _, p in named)
            for route, named in routed._asdict().items()
        },
        **({"scalars": scalars} if (scalars := [n for n, p in whole.named_parameters() if not p.ndim]) else {}),
        "units": [_unit(name, parameters, routed) for name, parameters in parameters_of(whole)],
        "matrices": list(_matrices(routed)),
        "shapes": newton_schulz_counts(routed, chosen),
        "apply": apply_counts(routed, chosen),
        "adamw": adamw_counts(routed, chosen),
        "tables": tables_counts(routed, chosen),
        "compute": Counting(workload, chosen, called, mechanisms, label, at).all(kinds),
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
    """What is to be counted, for which kinds of device, and at which two lengths (of a module of one's own)."""

    model: str
    settings: Mapping[str, str]
    opt: str
    kinds: tuple[str, ...]
    lengths: tuple[int, int]


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
    short, long = request.get("lengths", LENGTHS)
    if not (isinstance(short, int) and isinstance(long, int) and 0 < short < long):
        raise BadWorkload("the request's lengths must be two, the shorter first")
    return Asked(model, settings, opt, kinds, (short, long))


def _kernel_shapes(workload: Workload, chosen: Mapping[str, Value]) -> dict[str, dict[str, int]]:
    told = workload.kernel_shapes(chosen) if isinstance(workload, Shaped) else {}
    return {kernel: dict(shape) for kernel, shape in told.items()}


def _unit(name: str, parameters: Sequence[nn.Parameter], routed: Routed) -> dict[str, Any]:
    """What is gathered together where parameters are sharded: tensors by route, rows and elements a row."""
    routes = {parameter: route for route, named in routed._asdict().items() for _, parameter in named}
    rows = [(routes.get(p, "frozen"), p.shape[0] if p.ndim else 1, p.numel()) for p in parameters]
    kinds = Counter((route, count, elements // count) for route, count, elements in rows)
    tensors = [{"route": route, "rows": r, "row": e, "count": n} for (route, r, e), n in sorted(kinds.items())]
    return {"name": name, "tensors": tensors}


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
            row["staging"], row["host"], row["pinned"], row["link"], row["lookups"] = (
                bilinear({point: size(model, *point) for point in at}) for size in (*sizes, mechanism.lookups)
            )
        offered[mechanism.NAME] = row
    return offered


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
    NoCompiler.install()
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
