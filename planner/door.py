"""What stands behind ``--model``: the protocols and rows that planner and executor both keep.

The planner names a workload and reads its account; the executor resolves the name, builds the model and trains it.
Neither needs to know the other: they meet in the types of this file, which imports no torch. A model enters with
its keys (its configuration), its sizes (defaults of the request), its kernel rows and a ``build``; everything else
(routing, precision, memory mechanisms, the loop) belongs to the runtime and is the same for every model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

Value = int | float | str
Kind = Literal["int", "float", "choice", "text"]


class BadWorkload(Exception):
    """The user named a workload, key or value that does not exist or cannot be: exit code 2, one message."""


@dataclass(frozen=True)
class Key:
    """One configuration key: how its text is read, which values are allowed, and what it is without being asked.

    ``low`` and ``high`` are inclusive bounds of an int or float; ``choices`` are the words of a choice.
    """

    name: str
    kind: Kind
    default: Value
    why: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


class ConfigRow(TypedDict):
    """One resolved key: what was asked (None: nothing), what holds, and why."""

    asked: Value | None
    chosen: Value
    why: str


class Sizes(TypedDict):
    """Defaults of the request: sequences a rank, bytes a sequence, optimizer steps."""

    batch: int
    seq: int
    steps: int


class KernelRow(TypedDict):
    """One way to compute a kernel, with the conditions it needs; rows stand in order of preference.

    ``devices``: device types; ``min_sm``: lowest compute capability as text ("8.0") or None; ``dtypes``: compute
    dtypes of a run it serves; ``toolchain``: packages that must be present.
    """

    name: str
    devices: list[str]
    min_sm: str | None
    dtypes: list[str]
    toolchain: list[str]
    why: str


class MechanismRow(TypedDict, total=False):
    """One memory mechanism offered: its scope ("rank" or "fleet"), whether it is exact, and what it changes.

    ``variant`` names a column of the account's ``compute``; ``component`` and ``factor`` scale one component.
    """

    scope: str
    exact: bool
    variant: str
    component: str
    factor: float
    devices: list[str]
    why: str


@runtime_checkable
class Workload(Protocol):
    """A model behind the door.

    ``depth`` names the key that counts identical layers (the account then counts one and two layers and
    extrapolates), or is None. ``build`` returns a module whose ``forward(inputs, targets)`` takes two int64 tensors
    [batch, seq] and gives the mean cross-entropy in nats a byte (fp32 scalar); it raises BadWorkload where keys
    contradict each other. ``kernels`` given to it maps each kernel to the name of the row that must run.
    """

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> Sequence[Key]: ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def kernels(self) -> Mapping[str, Sequence[KernelRow]]: ...

    @property
    def depth(self) -> str | None: ...

    def build(self, config: Mapping[str, Value], kernels: Mapping[str, str]) -> Any: ...
