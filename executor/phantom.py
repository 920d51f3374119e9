"""CPU tensors without memory: each looks like a CPU tensor and holds nothing but what a tensor's memory would be.

A meta tensor has shapes, strides and storages but is no CPU tensor, so autocast and device-dependent code pass it by.
A phantom tells the CPU's device and dispatches like it, through autograd and autocast. What an operator makes of given
shapes is found once, on meta tensors, and remembered. This is what torch's FakeTensorMode does with far more care
(symbolic shapes, constants) at a cost that is too much for a planner that should answer at once; a test holds the
counts of both equal. ``phantoms("cuda")`` follows in addition what a card does otherwise (``executor.card``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor import recurrent
from executor.card import SHAPES, as_on_a_card

_CPU, _META = torch.device("cpu"), torch.device("meta")
_SHAPES = {**SHAPES, **recurrent.SHAPES, **recurrent.CARD_SHAPES}


class Store:
    """What stands for a phantom's storage. It lives as long as a view of it does."""

    __slots__ = ("__weakref__", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """Bytes that the storage would have."""
        return self._nbytes


class Form:
    """Shape, strides, offset and dtype of a tensor: one object for all that are alike."""

    __slots__ = ("dtype", "nbytes", "offset", "shape", "strides")

    def __init__(self, shape: torch.Size, strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.shape, self.strides, self.offset, self.dtype = shape, strides, offset, dtype
        self.nbytes = shape.numel() * dtype.itemsize


_forms: dict[Any, Form] = {}


def _form_of(tensor: Tensor) -> Form:
    key = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
    if key not in _forms:
        _forms[key] = Form(*key)
    return _forms[key]


class Phantom(Tensor):
    """A CPU tensor to look at, of a form and a store."""

    form: Form
    store: Store

    @staticmethod
    def __new__(cls, form: Form, store: Store) -> Phantom:
        made: Phantom = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.strides, storage_offset=form.offset, dtype=form.dtype, device=_CPU
        )
        made.form, made.store = form, store
        return made

    def become(self, form: Form) -> Phantom:
        """Itself, in another form of the same store."""
        if form is not self.form:
            with torch._C._DisableTorchDispatch():
                self.as_strided_(form.shape, form.strides, form.offset)
            self.form = form
        return self

    def moved(self) -> int:
        """Bytes of it, each byte of an expanded one once."""
        return min(self.form.nbytes, self.store.nbytes())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_meta(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom({tuple(self.shape)}, {self.dtype})"


class PhantomMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, tensors made on the CPU are phantoms."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._entered = kind, ExitStack()

    def __enter__(self) -> PhantomMode:
        if self._kind == "cuda":
            self._entered.enter_context(as_on_a_card())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call would go through the compiler's wrapper, whose import takes over a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_meta(func, args, kwargs or {})


class Made(NamedTuple):
    """One result of an operator: its form, and whose store it has: that of tensor argument ``source``, or a new one of
    ``nbytes``, the same for all results of one ``group``. ``itself``: the argument is given back."""

    form: Form
    source: int | None
    itself: bool
    group: int
    nbytes: int


# By id: an operator lives as long as its library, and hashing it is a call of its own.
_with_device: dict[int, bool] = {}  # whether an operator takes a device
_made: dict[Any, Any] = {}  # by operator and forms of its arguments: what it gives, as Made in its nesting


def on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of phantoms; an argument written in place is returned itself."""
    given: list[Phantom] = []
    key: tuple[Any, ...] = (id(func), *[_key(item, given) for item in args])
    if kwargs:
        key += tuple((name, _key(item, given)) for name, item in kwargs.items())
    if id(func) not in _with_device:
        _with_device[id(func)] = any(argument.name == "device" for argument in func._schema.arguments)
    if _with_device[id(func)]:
        key += (torch.get_default_dtype(),)
    if key not in _made:
        _made[key] = _first(func, args, kwargs, given)
    recipe = _made[key]
    if type(recipe) is Made and recipe.source is None:
        return Phantom(recipe.form, Store(recipe.nbytes))
    return _given(recipe, given, {})


def _given(recipe: Any, given: list[Phantom], stores: dict[int, Store]) -> Any:
    """The results that a recipe tells of."""
    if isinstance(recipe, Made):
        if recipe.source is None:
            return Phantom(recipe.form, stores.setdefault(recipe.group, Store(recipe.nbytes)))
        source = given[recipe.source]
        return source.become(recipe.form) if recipe.itself else Phantom(recipe.form, source.store)
    return type(recipe)(_given(part, given, stores) for part in recipe) if isinstance(recipe, list | tuple) else recipe


def _key(item: Any, given: list[Phantom]) -> Any:
    """A hashable stand-in for an argument: of a tensor its form; the type of a number counts. ``given`` notes tensors
    in their order."""
    if isinstance(item, Tensor):
        phantom = item if isinstance(item, Phantom) else Phantom(_form_of(item), Store(item.untyped_storage().nbytes()))
        given.append(phantom)
        return phantom.form
    if isinstance(item, list | tuple):
        return tuple([_key(part, given) for part in item])
    return (type(item), item) if isinstance(item, int | float) else item


def _first(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Phantom]) -> Any:
    """Run an operator on meta tensors, and note what it gives."""
    with torch._C._DisableTorchDispatch():
        behind = _metas(given)
        waiting = iter(behind)
        inner_args = [_enter(item, waiting) for item in args]
        inner_kwargs = {name: _enter(item, waiting) for name, item in kwargs.items()}
        if _with_device[id(func)] and ("device" in kwargs or not given) and kwargs.get("device") in (None, _CPU):
            inner_kwargs["device"] = _META
        return _noted(_SHAPES.get(func, func)(*inner_args, **inner_kwargs), behind, {})


def _metas(given: Iterable[Phantom]) -> list[Tensor]:
    """A meta tensor for each phantom; those of one store share their storage."""
    storages: dict[int, Any] = {}
    found = []
    for item in given:
        if id(item.store) not in storages:
            storages[id(item.store)] = torch.empty(item.store.nbytes(), dtype=torch.uint8, device=_META)
        storage = storages[id(item.store)].untyped_storage()
        form, empty = item.form, torch.empty(0, dtype=item.form.dtype, device=_META)
        found.append(empty.set_(storage, form.offset, form.shape, form.strides))
    return found


# Not closures: a recursive closure is a reference cycle, which would keep tensors alive.
def _enter(item: Any, waiting: Any) -> Any:
    """The meta side of an argument, lists included."""
    if isinstance(item, Tensor):
        return next(waiting)
    if isinstance(item, torch.device) and item == _CPU:
        return _META  # of an operator of ours that takes its device by place
    return [_enter(part, waiting) for part in item] if isinstance(item, list | tuple) else item


def _noted(item: Any, behind: list[Tensor], groups: dict[int, int]) -> Any:
    """A result as the recipe that gives it."""
    if isinstance(item, Tensor):
        for place, known in enumerate(behind):
            if item is known:
                return Made(_form_of(item), place, True, 0, 0)  # which may be another form: aten::transpose_
        storage = item.untyped_storage()
        for place, known in enumerate(behind):
            if storage._cdata == known.untyped_storage()._cdata:
                return Made(_form_of(item), place, False, 0, 0)
        group = groups.setdefault(storage._cdata, len(groups))
        return Made(_form_of(item), None, False, group, storage.nbytes())
    return type(item)(_noted(part, behind, groups) for part in item) if isinstance(item, list | tuple) else item


def is_view(func: Any) -> bool:
    """Whether an operator's schema says that a result aliases an input that it does not write."""
    return any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)


def phantoms(kind: str = "cpu") -> PhantomMode:
    """A mode to enter: CPU tensors made inside hold no memory. ``kind`` "cuda": operators are those of a card."""
    return PhantomMode(kind)


def storage_of(tensor: Tensor) -> Any:
    """What stands for a tensor's memory: one object for all views of it, with ``nbytes()``."""
    return tensor.store if isinstance(tensor, Phantom) else tensor.untyped_storage()
