"""What the optimizers do in a step, counted on tensors without memory by running the runtime's own optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from executor.count import Counts, Tally
from executor.optim.muon import Muon
from executor.optim.routing import Routed
from executor.optim.tables import Tables
from executor.optim.variants import ADAMW
from planner.door import Value

NS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What Newton-Schulz may compute in; which it is, is decided by the plan, for the whole fleet."""
OF_UPDATES = 0.8
"""Operators of a model that one of an update costs the host: lists of tensors, but neither modules nor autograd around
them. On four hosts of H200 the updates of small and medium took what 0.6 to 1.1 give."""


def newton_schulz_counts(routed: Routed, chosen: Mapping[str, Value]) -> dict[str, dict[str, Counts]]:
    """The update of one matrix of each shape, momentum included, by dtype and "ROWSxCOLUMNS"."""
    return {name: _by_shape(routed, int(chosen["ns_steps"]), dtype) for name, dtype in NS_DTYPES.items()}


def _by_shape(routed: Routed, steps: int, dtype: torch.dtype) -> dict[str, Counts]:
    counted: dict[str, Counts] = {}
    for _, parameter in routed.muon:
        rows, columns = parameter.shape[-2:]
        if f"{rows}x{columns}" in counted:
            continue
        one = nn.Parameter(torch.empty(rows, columns, device="meta"))
        one.grad = torch.empty_like(one)
        optimizer = Muon([("one", one)], [0], 0, ns_steps=steps, ns_dtype=dtype)
        with Tally((one, one.grad, *optimizer.state_dict().values())) as tally:
            optimizer.updates(_keep())
        counted[f"{rows}x{columns}"] = _counts(tally)
    return counted


def apply_counts(routed: Routed, chosen: Mapping[str, Value]) -> dict[str, Counts]:
    """The application of all matrices' updates, which every rank does whoever owns them, by their dtype."""
    weight_decay = float(chosen["weight_decay"])
    # Nothing is owned, so no momentum is made: applying needs none.
    optimizer = Muon(routed.muon, [1] * len(routed.muon), 0, weight_decay=weight_decay)
    counted = {}
    for name, dtype in NS_DTYPES.items():
        updates = [torch.empty_like(parameter, dtype=dtype) for _, parameter in routed.muon]
        with Tally((*optimizer.parameters, *updates)) as tally:
            optimizer.apply(updates, 1e-3, _keep())
        counted[name] = _counts(tally)
    return counted


def adamw_counts(routed: Routed, chosen: Mapping[str, Value]) -> dict[str, Counts]:
    """One step over the whole AdamW route, by what does it."""
    named = [(name, _with_gradient(parameter)) for name, parameter in routed.adamw]
    counted = {}
    for kind, make in ADAMW.items():
        optimizer = make(named, weight_decay=float(chosen["weight_decay"]))
        with Tally(_alive(named, (*optimizer.first, *optimizer.second))) as tally:
            optimizer.step(1e-3, _keep())
        counted[kind] = _counts(tally)
    return counted


def tables_counts(routed: Routed, chosen: Mapping[str, Value]) -> Counts:
    """One step over the tables, of which every row is read."""
    if not routed.tables:
        return _counts(Tally())
    named = [(name, _with_gradient(parameter)) for name, parameter in routed.tables]
    optimizer = Tables(named)
    with Tally(_alive(named, (*optimizer.first, *optimizer.second))) as tally:
        optimizer.step(1e-3, _keep())
    return _counts(tally)


def _with_gradient(parameter: nn.Parameter) -> nn.Parameter:
    parameter.grad = torch.empty_like(parameter)
    return parameter


def _alive(named: Sequence[tuple[str, nn.Parameter]], state: Iterable[Tensor]) -> list[Tensor]:
    return [*(p for _, p in named), *(p.grad for _, p in named if p.grad is not None), *state]


def _keep() -> Tensor:
    """What every step of a run is gated by."""
    return torch.ones((), dtype=torch.bool, device="meta")


def _counts(tally: Tally) -> Counts:
    launches = ceil(OF_UPDATES * tally.launches)
    return {"flops": tally.flops, "bytes": tally.bytes, "launches": launches, "temporary": tally.peak}
