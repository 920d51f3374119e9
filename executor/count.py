"""Count what a piece of torch code does: matrix FLOPs, bytes moved, launches, and bytes alive.

A Tally is a dispatch mode, so it sees every operator that reaches a backend, in forward, backward and optimizer alike,
on real, fake and meta tensors. Bytes alive are the storages that operators made and nobody has let go yet, by weak
reference: what a custom function keeps for its backward is counted like everything else. Memory that an operator
takes and returns inside itself is not seen. An opaque operator costs what is registered beside it. What
``dormouse::offload`` gives lies in host memory: it and ``dormouse::restore`` move bytes over the link.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.kernels.registry import costs
from executor.phantom import Phantom, on_meta, storage_of, traits_of
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
_OFFLOAD, _RESTORE = "dormouse::offload", "dormouse::restore"

Counts = dict[str, int]


class Tally(TorchDispatchMode):
    """Counts while entered. ``known``: tensors whose storages are not counted as alive (parameters, gradients, inputs).
    ``tables``: those of them whose dense gradient, as large as a table, is counted apart: it comes late in backward,
    and beside it no sum of tokens would be seen.

    Attributes: flops (matrix products only), bytes (read and written), launches (operators that are no views), live and
    peak (bytes alive now, and the most so far), host (the most bytes that were alive in host memory), link (bytes moved
    to host memory and back), tables_bytes (read and written of tables' gradients), tables_peak (the most bytes alive
    beside one).
    """

    def __init__(self, known: Iterable[Tensor] = (), tables: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes = self.launches = self.live = self.peak = self.host = self.link = 0
        self.tables_bytes = self.tables_peak = 0
        self._hosted = self._gradients = 0
        self._sizes = {storage_of(table).nbytes() for table in tables}
        known = list(known)
        self._phantoms = any(isinstance(tensor, Phantom) for tensor in known)
        self._known = [storage_of(tensor) for tensor in known]  # kept, so that identities stay unique
        self._alive: dict[int, Any] = {id(storage): storage for storage in self._known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call would go through the compiler's wrapper, whose import takes over a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._phantoms:  # what a phantom does at the end of its own dispatch, without the way there and back
            with torch._C._DisableTorchDispatch():
                result = on_meta(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # questions to a tensor (its device), no operators
            return result
        outputs = list(_tensors((result,)))
        name = func._schema.name
        if name in (_OFFLOAD, _RESTORE):
            self.launches += 1
            self.link += sum(map(_moved, outputs))
        elif not _is_free(func):
            self.launches += costs[name].launches if name in costs else 1
            # A gather reads of its source what it gives.
            read = [*outputs, *_tensors(args[1:])] if name in _GATHERS else [*_tensors(args)]
            for tensor in (*read, *_tensors((kwargs or {}).values()), *outputs):
                self._move(tensor)
            self.flops += flops_of(func, args, kwargs or {}, result)
        for output in outputs:
            self._watch(output, name == _OFFLOAD)
        if name in costs and name not in (_OFFLOAD, _RESTORE):
            self.peak = max(self.peak, self.live + costs[name].temporary(*args, out=result))
        return result

    def _move(self, tensor: Tensor) -> None:
        moved = _moved(tensor)
        if moved in self._sizes:
            self.tables_bytes += moved
        else:
            self.bytes += moved

    def _watch(self, tensor: Tensor, on_host: bool) -> None:
        storage = storage_of(tensor)
        key = id(storage)
        if key in self._alive:
            return
        nbytes = storage.nbytes()

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            self._grow(-nbytes, on_host)

        self._alive[key] = weakref.ref(storage, gone)
        self._grow(nbytes, on_host)

    def _grow(self, nbytes: int, on_host: bool) -> None:
        if on_host:
            self._hosted += nbytes
            self.host = max(self.host, self._hosted)
        elif abs(nbytes) in self._sizes:
            self._gradients += nbytes
        else:
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        if self._gradients:
            self.tables_peak = max(self.tables_peak, self.live)


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, those in lists included."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


@cache
def _is_free(func: Any) -> bool:
    """Whether an operator does no work: it gives a view, or memory left as it was."""
    return traits_of(func).view or func._schema.name in _FREE


def _moved(tensor: Tensor) -> int:
    """Bytes of a tensor, each byte of an expanded one once."""
    return min(tensor.numel() * tensor.element_size(), storage_of(tensor).nbytes())


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
    if func._schema.name in costs:
        return costs[func._schema.name].flops(*args, out=result)
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        tensors = [item for item in args if isinstance(item, Tensor)]
        return _PRODUCTS[packet](*tensors)
    if not _is_rare(func):
        return 0
    name = func._schema.name
    if "convolution" in name and any(isinstance(a, Tensor) and a.ndim > 2 and a.shape[1] == 1 for a in args[1:3]):
        return 0
    from torch.utils.flop_counter import flop_registry  # slow import: late

    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


@cache
def _is_rare(func: Any) -> bool:
    return any(word in func._schema.name for word in _RARE_PRODUCTS)


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


def evaluate(form: Mapping[str, int | float], batch: int, length: int) -> float:
    """The value of a form at a batch and a length."""
    return form["one"] + form["b"] * batch + form["t"] * length + form["bt"] * batch * length
