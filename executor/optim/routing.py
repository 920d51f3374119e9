"""Which optimizer updates which parameter: one function, read by the account and by the run.

Muon orthogonalises the matrices of the repeated blocks. All else goes to AdamW: embedding, head and router (their rows
are classes, not directions), norms, biases, gains, convolutions. A stack of matrices [E, m, n] counts as E matrices. A
parameter with the attribute ``lazy_rows`` is a table of which a step touches few rows: it has a route of its own,
whatever the optimizer of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from torch import nn

Route = Literal["muon", "adamw", "tables"]

_BLOCK = re.compile(r"(^|\.)\d+\.")  # inside a list of blocks: a component of the path is a number
_NOT_A_MATRIX = re.compile(r"(^|\.)(conv\w*|\w*embed\w*|\w*norm\w*|head|lm_head|router)(\.|$)", re.IGNORECASE)


class Routed(NamedTuple):
    """Named parameters by route, each in the model's own order."""

    muon: list[tuple[str, nn.Parameter]]
    adamw: list[tuple[str, nn.Parameter]]
    tables: list[tuple[str, nn.Parameter]]


def route(name: str, parameter: nn.Parameter, opt: str = "muon") -> Route:
    """The route of one parameter under ``opt``: by its mark, its dotted name and its shape."""
    if getattr(parameter, "lazy_rows", False):
        return "tables"
    if opt == "adamw" or parameter.ndim not in (2, 3) or min(parameter.shape[-2:]) < 2:
        return "adamw"
    if not _BLOCK.search(name) or _NOT_A_MATRIX.search(name):
        return "adamw"
    return "muon"


def rows_of(routed: Routed, shard: Callable[[], Mapping[str, nn.Parameter]]) -> Routed:
    """``routed`` with each parameter replaced by this rank's rows of it, by name as ``shard`` gives them: once sharded,
    a parameter has lost the marks that it is routed by. Raises ValueError where any is Muon's."""
    if routed.muon:
        raise ValueError("Newton-Schulz needs whole matrices, and a rank holds rows of them: --shard none")
    rows = shard()
    return Routed(*([(name, rows[name]) for name, _ in named] for named in routed))


def split(model: nn.Module, opt: str) -> Routed:
    """All trainable parameters by route; under ``opt`` "adamw" none goes to Muon. Raises ValueError otherwise."""
    if opt not in ("muon", "adamw"):
        raise ValueError(f"unknown optimizer {opt!r}; known: muon, adamw")
    routed = Routed([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            getattr(routed, route(name, parameter, opt)).append((name, parameter))
    return routed
