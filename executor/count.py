"""Count what a piece of torch code does: matrix FLOPs, bytes moved, launches, and bytes alive.

A Tally is a dispatch mode, so it sees every operator that reaches a backend, in forward, backward and optimizer alike,
on real, fake and meta tensors. Bytes alive are the storages that operators made and nobody has let go yet, by weak
reference: what a custom function keeps for its backward is counted like everything else. Memory that an operator
takes and returns inside itself is not seen, but told: of an opaque operator by what is registered beside it, of torch's
own on a card by ``executor.card``. What ``dormouse::offload`` gives lies in host memory: it and ``dormouse::restore``
move bytes over the link.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.card import temporary
from executor.kernels.registry import Cost, costs
from executor.phantom import Phantom, is_view, on_meta, storage_of
from executor.recurrent import KEPT, PLACE
from planner.door import Form

aten = torch.ops.aten

# Operators without work on a device although their schema does not say that they are views.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        *("_unsafe_view", "lift_fresh", "promote_types", "set_", "resize_"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    )
)
# Products that torch's own flop counter knows; its import is slow, so it happens only where one of these occurs.
_RARE_PRODUCTS = ("convolution", "scaled_dot_product", "scaled_mm", "_attention", "grouped_mm")


_GATHERS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index")
_OFFLOAD, _RESTORE, _CAST, _DETACH = "dormouse::offload", "dormouse::restore", "aten::_to_copy", "aten::detach"
WEIGHTS = "weights_cast"
"""The place of weights in the compute dtype: autocast's copies."""

Counts = dict[str, int]


class Role(NamedTuple):
    """What one operator, ``name`` in its schema, is to a tally. ``asks``: a question to a tensor (its device), no work;
    ``free``: a view, or memory left as it was; ``gathers``: reads of its first argument only what it gives; ``casts``:
    gives a tensor in another dtype; ``offloads``: gives host memory; ``carries``: over the link; ``cost``: entered
    beside it, or None; ``flops``: of its matrix products, from (its arguments, its keyword arguments, its result), or
    None."""

    name: str
    asks: bool
    free: bool
    gathers: bool
    casts: bool
    offloads: bool
    carries: bool
    cost: Cost | None
    flops: Callable[..., int] | None


_roles: dict[int, Role] = {}  # by the operator's id: hashing it would be a call of its own


def _role(func: Any) -> Role:
    if id(func) not in _roles:
        _roles[id(func)] = _role_of(func)
    return _roles[id(func)]


def _role_of(func: Any) -> Role:
    name = func._schema.name
    return Role(
        name=name,
        asks=func.namespace == "prim",
        free=is_view(func) or name in _FREE,
        gathers=name in _GATHERS,
        casts=name == _CAST,
        offloads=name == _OFFLOAD,
        carries=name in (_OFFLOAD, _RESTORE),
        cost=costs.get(name),
        flops=_flops_of(func),
    )


class Tally(TorchDispatchMode):
    """Counts while entered. ``known``: tensors whose storages are not counted as alive (parameters, gradients, inputs).
    ``tables``: those of them whose dense gradient, as large as a table, is counted apart: it comes late in backward,
    and beside it no sum of tokens would be seen. ``place``: tells what part of a model runs.

    Attributes: flops (matrix products only), bytes (read and written), launches (operators that are no views; an
    opaque one is as many as launching its kernels costs the host), detached (how many tensors were, as hooks do that
    keep what is saved in another form), live and peak (bytes alive now, and the most so far), course (after each
    operator the bytes alive, what an opaque one took within itself included, and that part alone), host (the most bytes
    that were alive in host memory), link (bytes moved to host memory and back), tables_bytes (read and written of
    tables' gradients), tables_peak (the most bytes alive beside one).
    """

    def __init__(
        self, known: Iterable[Tensor] = (), tables: Iterable[Tensor] = (), place: Callable[[], str] = str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes = self.launches = self.detached = self.live = self.peak = self.host = self.link = 0
        self.tables_bytes = self.tables_peak = 0
        self.course: list[tuple[int, int]] = []
        self._hosted = self._gradients = 0
        self._place = place
        self._tables = {table.shape for table in tables}
        known = list(known)
        self._phantoms = any(isinstance(tensor, Phantom) for tensor in known)
        self._known = {id(storage_of(tensor)): storage_of(tensor) for tensor in known}  # so identities stay unique
        self._alive: dict[int, tuple[Any, str, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call would go through the compiler's wrapper, whose import takes over a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = on_meta(func, args, kwargs) if self._phantoms else func(*args, **kwargs)
        role = _role(func)
        if role.asks:
            return result
        outputs = [result] if isinstance(result, Tensor) else list(tensors_in((result,)))
        self.detached += role.name == _DETACH
        if not role.free:
            self.launches += 1 if role.cost is None else role.cost.launches
        if role.carries:
            self.link += sum(map(_moved, outputs))
        elif not role.free:
            # A gather reads of its source what it gives.
            read = [*outputs, *tensors_in(args[1:])] if role.gathers else [*tensors_in(args)]
            for tensor in (*read, *tensors_in(kwargs.values()), *outputs):
                self._move(tensor)
            self.flops += flops_of(func, args, kwargs, result)
        # What is cast from what was there before, a weight, is cast once for all that use it.
        weight = role.casts and id(storage_of(args[0])) in self._known
        for number, output in enumerate(outputs):
            opaque = number == KEPT.get(role.name)
            place = WEIGHTS if weight else PLACE if opaque else self._place()
            self._watch(output, role.offloads, place)
        inside = _inside(role, args, result)
        self.peak = max(self.peak, self.live + inside)
        if self._gradients:
            self.tables_peak = max(self.tables_peak, self.live + inside)
        self.course.append((self.live + inside, inside))
        return result

    def saved(self) -> dict[str, int]:
        """Bytes alive now, by the place in which they were made."""
        found: dict[str, int] = {}
        for _, place, nbytes in self._alive.values():
            if place:
                found[place] = found.get(place, 0) + nbytes
        return found

    def _move(self, tensor: Tensor) -> None:
        if tensor.shape in self._tables:
            self.tables_bytes += _moved(tensor)
        else:
            self.bytes += _moved(tensor)

    def _watch(self, tensor: Tensor, on_host: bool, place: str) -> None:
        storage = storage_of(tensor)
        key = id(storage)
        if key in self._alive or key in self._known:
            return
        nbytes = storage.nbytes()
        grow = self._grow_host if on_host else self._grow_tables if tensor.shape in self._tables else self._grow

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            grow(-nbytes)

        # What lies elsewhere, or is a table's gradient, is no place's.
        self._alive[key] = weakref.ref(storage, gone), place if grow == self._grow else "", nbytes
        grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if self._gradients:
            self.tables_peak = max(self.tables_peak, self.live)

    def _grow_tables(self, nbytes: int) -> None:
        self._gradients += nbytes
        if self._gradients:
            self.tables_peak = max(self.tables_peak, self.live)

    def _grow_host(self, nbytes: int) -> None:
        self._hosted += nbytes
        self.host = max(self.host, self._hosted)


def _inside(role: Role, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that an operator takes and returns within itself."""
    if role.cost is not None:
        return 0 if role.carries else role.cost.temporary(*args, out=result)
    return temporary[role.name](*args, out=result) if role.name in temporary else 0


def tensors_in(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, those in lists included."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors_in(item)


def _moved(tensor: Tensor) -> int:
    """Bytes of a tensor, each byte of an expanded one once."""
    if isinstance(tensor, Phantom):
        return tensor.moved()
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product(a: Tensor, b: Tensor) -> int:
    """2 m k n multiplications and additions of [.., m, k] @ [.., k, n]."""
    return 2 * a.numel() * b.shape[-1]


_PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: lambda _, a, b: _product(a, b),
    aten.baddbmm: lambda _, a, b: _product(a, b),
    aten.mv: lambda a, _: 2 * a.numel(),
    aten.dot: lambda a, _: 2 * a.numel(),
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Matrix FLOPs of one call: 0 for what is no matrix product, depthwise convolutions included (elementwise work)."""
    flops = _role(func).flops
    return 0 if flops is None else flops(args, kwargs, result)


def _flops_of(func: Any) -> Callable[..., int] | None:
    """What counts the matrix FLOPs of an operator; None where it has none."""
    name, packet = func._schema.name, func._overloadpacket
    if name in costs:
        return lambda args, kwargs, result: costs[name].flops(*args, out=result)
    if packet in _PRODUCTS:
        product = _PRODUCTS[packet]
        return lambda args, kwargs, result: product(*(item for item in args if isinstance(item, Tensor)))
    if any(word in name for word in _RARE_PRODUCTS):
        return partial(_rare_flops, func)
    return None


def _rare_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """By torch's own formula; 0 for depthwise convolutions (elementwise work)."""
    depthwise = any(isinstance(item, Tensor) and item.ndim > 2 and item.shape[1] == 1 for item in args[1:3])
    if "convolution" in func._schema.name and depthwise:
        return 0
    from torch.utils.flop_counter import flop_registry  # slow import: late

    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def bilinear(at: Mapping[tuple[int, int], int]) -> Form:
    """{"one", "b", "t", "bt"} of the form one + b B + t T + bt B T through four points {(B, T): value}.

    The points are two batches times two lengths. Exact where the count is such a form, as sums over tokens, sequences
    and chunks are; a coefficient that is no whole number is kept as a float.
    """
    (b0, b1), (t0, t1) = sorted({b for b, _ in at}), sorted({t for _, t in at})
    slope0, slope1 = (Fraction(at[b, t1] - at[b, t0], t1 - t0) for b in (b0, b1))  # per T, at each batch
    bt = (slope1 - slope0) / (b1 - b0)
    t = slope0 - bt * b0
    b = Fraction(at[b1, t0] - at[b0, t0], b1 - b0) - bt * t0
    one = at[b0, t0] - b * b0 - t * t0 - bt * b0 * t0
    return {name: number(value) for name, value in (("one", one), ("b", b), ("t", t), ("bt", bt))}


def number(value: Fraction) -> int | float:
    """A whole number as int, any other with six significant digits."""
    return int(value) if value.denominator == 1 else float(f"{float(value):.6g}")
