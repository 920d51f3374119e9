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

STACK_BYTES = 256 * 2**20
REDUCES_IN_FLIGHT = 2  # sums over ranks in a narrower dtype that are under way at once
"""Of matrices of one shape that Muon iterates at a time, in fp32: enough to fill a card, and an iteration holds about
three times as much besides. A larger stack of experts stands alone."""
ALLOCATORS = {"expandable": "expandable_segments:True", "segments": "expandable_segments:False"}
"""torch's setting of each way that a card's memory can grow."""
CHUNK_BYTES = 64 * 2**20
"""Of tensors that an optimizer updates at a time: its temporaries are as large. A larger tensor stands alone."""
# CUDA's caching allocator in torch (CUDACachingAllocator.cpp): from 10 MiB on, memory is asked of the driver in
# multiples of 2 MiB, and a rest of up to 1 MiB stays with the block.
_LARGE, _ROUNDED, _LEAST_REST = 10 * 2**20, 2 * 2**20, 2**20
Kind = Literal["int", "float", "choice", "text"]


class BadWorkload(Exception):
    """The user named a workload, key or value that does not exist or cannot be: exit code 2, one message."""


@dataclass(frozen=True)
class Key:
    """One configuration key: how its text is read, which values are allowed, and what it is without being asked.

    ``low`` and ``high`` are inclusive bounds of an int or float; ``choices`` are the words of a choice. ``below`` names
    the key that this one counts into: the index of a layer is below the number of layers.
    """

    name: str
    kind: Kind
    default: Value
    why: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    below: str = ""


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


Form = dict[str, int | float]
"""one + b B + t T + bt B T, of B sequences of T tokens."""


class Timed(TypedDict):
    """One kept timing of a kernel's row, forward and backward: on which card, of which shape (what `kernel_shapes`
    gives, with ``batch`` and ``seq``), in which dtype, under which versions, and its seconds."""

    card: str
    toolchain: dict[str, str]
    shape: dict[str, int]
    dtype: str
    seconds: float


class Tuned(TypedDict):
    """One kept set of tuned configurations: for which card, toolchain, channels a head, numbers of heads and dtypes."""

    card: str
    triton: str
    fla: str
    head: int
    heads: list[int]
    dtypes: list[str]


class _KernelRow(TypedDict):
    name: str
    devices: list[str]
    min_sm: str | None
    dtypes: list[str]
    toolchain: list[str]
    why: str


class KernelRow(_KernelRow, total=False):
    """One way to compute a kernel, with the conditions it needs; rows stand in order of preference.

    ``devices``: device types; ``min_sm``: lowest compute capability as text ("8.0") or None; ``dtypes``: compute
    dtypes of a run it serves; ``toolchain``: packages that must be present. ``counts_as``: the row whose counts stand
    for this one's, where both keep and launch alike. ``most``: the largest sizes that it takes, by their names in
    `Shaped.kernel_shapes`. ``timed`` and ``tuned``: what is kept of real cards. These three say nothing of what the
    work is, and so are no part of its digest.
    """

    counts_as: str
    most: dict[str, int]
    timed: list[Timed]
    tuned: list[Tuned]


class _MechanismRow(TypedDict):
    scope: str
    exact: bool
    devices: list[str]
    why: str


class MechanismRow(_MechanismRow, total=False):
    """One memory mechanism offered: its scope ("rank" or "fleet"), whether it is exact, and what it changes.

    ``variant`` names a column of the account's ``compute`` (several engaged are joined by "+"). ``component`` names a
    component of memory that is scaled by ``factor`` or becomes ``bytes``. ``moves``: a route ("tables") whose masters,
    gradients and state leave the device; then ``staging`` is what lies on the device instead, ``host`` what the host
    holds, ``pinned`` the part of it that is pinned, ``link`` what a step moves between them, and ``lookups`` how many
    rows the host brings and updates. ``excludes``: names of mechanisms that cannot be engaged beside it. ``fleet``
    False: one rank alone can use it, ``fleet_why`` says why.
    ``alike``: ranks must run on devices of one kind. ``toolchain``: packages that must be there and serve the card.
    ``sharded`` False: not where ranks hold parts of the model (FSDP2), ``sharded_why`` says why.
    ``error``: of an approximate one, how far off it was measured to be. ``order``: its place among all, set by the
    account: JSON keeps no order.
    """

    variant: str
    component: str
    factor: float
    bytes: int
    moves: str
    staging: Form
    host: Form
    pinned: Form
    link: Form
    lookups: Form
    excludes: list[str]
    fleet: bool
    fleet_why: str
    sharded: bool
    sharded_why: str
    alike: bool
    toolchain: list[str]
    error: str
    order: int


def block_rest(nbytes: int) -> int:
    """Bytes by which the block of a tensor of ``nbytes`` alone in its segment is larger than the tensor, on a card."""
    rest = -nbytes % _ROUNDED
    return rest if nbytes >= _LARGE and rest <= _LEAST_REST else 0


def counted_as(kernel: str, choice: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The row under whose name the account counts ``choice`` of ``kernel``."""
    row = next(row for row in rows[kernel] if row["name"] == choice)
    return str(row.get("counts_as", choice))


def reachable(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that auto may choose: all to the first that needs nothing of its rank, since that one always serves."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        found.append(row)
        everywhere = {"cpu", "cuda"} <= set(row["devices"]) and {"fp32", "bf16", "fp16"} <= set(row["dtypes"])
        if everywhere and not row["toolchain"] and row["min_sm"] is None:
            break
    return found


def kernel_set(choices: Mapping[str, str], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The key of the account's ``compute`` for one choice of each kernel: "kda=chunk_torch,grouped=grouped_loop"."""
    named = (f"{kernel}={counted_as(kernel, choice, rows)}" for kernel, choice in sorted(choices.items()))
    return ",".join(named) or "none"


@runtime_checkable
class Shaped(Protocol):
    """A workload that tells the shapes its kernels are called with: what timings and tuning are kept by."""

    def kernel_shapes(self, config: Mapping[str, Value]) -> Mapping[str, Mapping[str, int]]:
        """{kernel: {"head": channels a head, "heads": heads, ...}} of a resolved configuration."""
        ...


@runtime_checkable
class Idling(Protocol):
    """A workload that tells which of its keys change nothing under a configuration: asking for one is refused."""

    def idle(self, config: Mapping[str, Value]) -> Mapping[str, str]:
        """{key without effect: what makes it so, as in "experts=0"}."""
        ...


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


def staged_elements(bucket_bytes: int, elements: int) -> int:
    """Elements of each buffer that gradients are reduced through in a narrower dtype. A bucket of whole fp32 tensors
    is mostly somewhat larger than its size says, and should not be cut for that."""
    return min(elements, bucket_bytes * 3 // 2 // 4)
