"""CPU tensors without memory: each looks like a CPU tensor and holds a meta tensor.

A meta tensor has shapes, strides and storages but is no CPU tensor, so autocast and device-dependent code pass it by.
A phantom tells the CPU's device and dispatches like it, through autograd and autocast, and only then computes on
meta. This is what torch's FakeTensorMode does with far more care (caching, symbolic shapes, constants) at a
cost that is too much for a planner that should answer at once; a test holds the counts of both equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Traits(NamedTuple):
    """What an operator's schema says. view: its result aliases an input that it does not write; fresh: its only result
    is a new tensor and nothing is written; has_device: it takes a device.
    """

    view: bool
    fresh: bool
    has_device: bool


@cache
def traits_of(func: Any) -> Traits:
    """The traits of one operator overload."""
    returns, arguments = func._schema.returns, func._schema.arguments
    view = any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
    fresh = len(returns) == 1 and all(item.alias_info is None for item in (*returns, *arguments))
    return Traits(view, fresh and str(returns[0].type) == "Tensor", any(item.name == "device" for item in arguments))


class Phantom(Tensor):
    """A CPU tensor to look at; ``elem`` is the meta tensor that it stands for."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Phantom:
        made: Phantom = Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, device=_CPU
        )
        made.elem = elem
        return made

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call would go through the compiler's wrapper, whose import takes over a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_meta(func, args, kwargs or {})


_shapes: dict[Any, tuple[Any, ...]] = {}  # what an operator without aliases makes of given shapes


def on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the meta tensors behind its arguments; an argument written in place is returned itself."""
    behind: dict[int, Tensor] = {}
    inner_args = [_enter(item, behind) for item in args]
    inner_kwargs = {name: _enter(item, behind) for name, item in kwargs.items()}
    traits = traits_of(func)
    if traits.has_device and ("device" in kwargs or not behind) and kwargs.get("device") in (None, _CPU):
        inner_kwargs["device"] = _META
    if not traits.fresh or not behind:
        return _leave(func(*inner_args, **inner_kwargs), behind)
    key = (func, _key(inner_args), *((name, _key(item)) for name, item in inner_kwargs.items()))
    if key not in _shapes:
        result = func(*inner_args, **inner_kwargs)
        if not isinstance(result, Tensor) or result.storage_offset():
            return _leave(result, behind)
        _shapes[key] = (result.shape, result.stride(), result.dtype)
        return Phantom(result)
    shape, stride, dtype = _shapes[key]
    return Phantom(torch.empty_strided(shape, stride, dtype=dtype, device=_META))


# Not closures of on_meta: a recursive closure is a reference cycle, which would keep tensors alive.
def _enter(item: Any, behind: dict[int, Tensor]) -> Any:
    """The meta side of an argument, lists included; ``behind`` notes which tensor each meta tensor stands behind."""
    if isinstance(item, Tensor):
        elem = item.elem if isinstance(item, Phantom) else item.to(_META)
        behind[id(elem)] = item
        return elem
    if isinstance(item, torch.device) and item == _CPU:
        return _META  # of an operator of ours that takes its device by place
    return [_enter(part, behind) for part in item] if isinstance(item, list | tuple) else item


def _leave(item: Any, behind: dict[int, Tensor]) -> Any:
    """The phantom side of a result."""
    if isinstance(item, Tensor):
        known = behind.get(id(item))
        return Phantom(item) if known is None else known
    return type(item)(_leave(part, behind) for part in item) if isinstance(item, list | tuple) else item


def _key(item: Any) -> Any:
    """A hashable stand-in for an argument: of a tensor its shape, strides and dtype; the type of a number counts."""
    if isinstance(item, Tensor):
        return (item.shape, item.stride(), item.dtype)
    if isinstance(item, list):
        return tuple(map(_key, item))
    return (type(item), item)


def phantoms() -> PhantomMode:
    """A mode to enter: CPU tensors made inside hold no memory."""
    return PhantomMode()  # type: ignore[no-untyped-call]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage that stands for a tensor's memory."""
    return (tensor.elem if isinstance(tensor, Phantom) else tensor).untyped_storage()
