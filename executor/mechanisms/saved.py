"""What autograd saves inside a piece of a model, kept in another form until backward: the part that mechanisms share.

The unit is a storage, not a tensor: a storage is what stays alive. Views of it (halves of one product, a transpose, a
reshape) are kept once, and each comes back with the strides that it had, so that backward runs the very kernels that it
would have run. Mechanisms nest: what one puts in another form, the one inside it puts in another place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from executor.phantom import storage_of

Get = Callable[[], Tensor]
Put = Callable[[Tensor], Get]  # keeps a flat tensor somewhere, and gives what brings it back
Code = Callable[[Tensor, Put], Get]  # puts a flat tensor in another form, and that somewhere

# Elements a token, the least that is worth the trouble: scales, gates and routing weights of a token stay as they are.
LEAST = 32

# Backward nodes of what casts or rearranges and computes nothing: a parameter seen through these is still a weight.
_REARRANGES = frozenset(
    f"{name}Backward{number}"
    for number in range(2)
    for name in (
        *("Alias", "Cat", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    )
)


class Kept:
    """One storage in the form that it is kept in. It comes back at the first use; autograd drops it after the last."""

    __slots__ = ("__weakref__", "_flat", "_get")

    def __init__(self, get: Get) -> None:
        self._get: Get | None = get
        self._flat: Tensor | None = None

    def flat(self) -> Tensor:
        """The storage as a flat tensor."""
        if self._get is not None:
            self._flat, self._get = self._get(), None
        assert self._flat is not None
        return self._flat


class Saver:
    """The hooks of one pass through one piece.

    Args:
        tokens: of this pass; a storage with fewer than LEAST elements a token is left where it is.
        code: the other form, or None.
        put: the other place, or None.
    """

    def __init__(self, tokens: int, code: Code | None, put: Put | None) -> None:
        outer = _active[-1] if _active else None
        self.code: Code | None = code or (outer.code if outer else None)
        self.put: Put = put or (outer.put if outer else _here)
        self._least = LEAST * tokens
        self._kept: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[Kept]]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds for ``tensor``: its storage's kept form and the view of it, or a weight as it is."""
        with torch.no_grad():
            storage = storage_of(tensor)
            elements = storage.nbytes() // tensor.element_size()
            if elements < self._least or not is_activation(tensor):
                return tensor.detach()
            kept = self._keep(tensor.detach(), storage, elements)
            return kept, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The saved tensor again."""
        if isinstance(packed, Tensor):
            return packed
        kept, shape, stride, offset = packed
        flat: Tensor = kept.flat()
        return flat.as_strided(shape, stride, offset)

    def _keep(self, tensor: Tensor, storage: Any, elements: int) -> Kept:
        """The kept form of a storage, the one made before where it still holds: nothing was written since."""
        key = (id(storage), tensor.dtype, tensor._version)
        known = self._kept.get(key)
        if known is not None and known[0]() is storage:
            kept = known[1]()
            if kept is not None:
                return kept
        flat = tensor.as_strided((elements,), (1,), 0)
        kept = Kept(self.code(flat, self.put) if self.code else self.put(flat))
        self._kept[key] = (weakref.ref(storage), weakref.ref(kept))
        return kept


_active: list[Saver] = []


def _here(flat: Tensor) -> Get:
    return lambda: flat


@contextmanager
def saving(tokens: int, code: Code | None = None, put: Put | None = None) -> Iterator[None]:
    """What is saved inside goes through ``code`` and ``put``; what is None is as it is outside."""
    saver = Saver(tokens, code, put)
    _active.append(saver)
    try:
        with saved_tensors_hooks(saver.pack, saver.unpack):
            yield
    finally:
        _active.pop()


def is_activation(tensor: Tensor) -> bool:
    """Whether gradients flow through ``tensor`` to more than parameters.

    Not so: data, masks, constants and frozen weights, which need no gradient; parameters, and parameters cast or
    rearranged, as autocast and transposes make them.
    """
    if not tensor.is_floating_point() or not tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return False
    pending = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None:
            return True
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):  # type: ignore[attr-defined]
                return True
        elif node.name() in _REARRANGES:
            pending.extend(earlier for earlier, _ in node.next_functions)
        else:
            return True
    return False


def tokens_of(args: Iterable[Any]) -> int:
    """Tokens of a call: of its first floating tensor [..., D] all that is not D; 0 where there is none."""
    found = next((item for item in args if isinstance(item, Tensor) and item.is_floating_point()), None)
    return 0 if found is None or found.ndim == 0 else found.shape[:-1].numel()


def around(function: Callable[..., Any], enter: Callable[[int], AbstractContextManager[None]]) -> Callable[..., Any]:
    """``function`` with each call that autograd records inside ``enter(tokens)``."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with enter(tokens_of((*args, *kwargs.values()))) if torch.is_grad_enabled() else nullcontext():
            return function(*args, **kwargs)

    return called


def as_they_are(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` whose saved tensors are left alone, whatever is engaged around it."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(Tensor.detach, _same):
            return function(*args, **kwargs)

    return called


def _same(tensor: Tensor) -> Tensor:
    return tensor
