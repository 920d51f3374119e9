"""A Triton kernel launched again as it was launched before, without being asked anew which one it is.

At each launch the autotuner builds its key (FLA's twice), heuristics are evaluated, the signature is bound and its
specialisation looked up. In a step that launches bind, that is a large part of what the host does. What comes of it is
a function of what the arguments are: of their types, of the numbers, of whether a tensor's address is a multiple of 16
bytes. So it is found once for each of those, by Triton itself at the first launch, and then launched directly, by the
compiled kernel's own launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

ALIGNED = 16  # bytes: Triton compiles another kernel for what begins elsewhere
MOST = 512
"""Sets of arguments that a kernel is remembered for. With more, something varies from call to call: Triton is asked."""

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]


class _Known(NamedTuple):
    """What was launched: the compiled kernel, and the value of each parameter by name, in order, None for tensors; and
    the names of those keyword arguments that are no parameters, but options of compiling or launching."""

    compiled: Any
    values: dict[str, Any]
    options: list[str]


class Relaunched:
    """Stands for a Triton kernel, with autotuning and heuristics or only jitted: ``kernel[grid](*args, **kwargs)``."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._layers = kernel, list(_layers(kernel))
        self._jitted = self._layers[-1]
        self._names: list[str] = list(self._jitted.arg_names)
        self._known: dict[Any, _Known] = {}
        self._lock = Lock()

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            key = (*kwargs, *map(_kind, args), *map(_kind, kwargs.values()))
            known = self._known.get(key)
            if known is None:
                return self._first(key, grid, args, kwargs)
            for name in known.options:
                del kwargs[name]
            values = {**known.values, **dict(zip(self._names, args, strict=False)), **kwargs}
            size = grid(values) if callable(grid) else grid
            known.compiled[(*size, 1, 1)[:3]](*values.values())
            return known.compiled

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)  # what else is asked of it, the kernel answers

    def by_name(self, grid: Grid) -> Callable[..., Any]:
        """What launches it by Triton itself."""
        launch: Callable[..., Any] = self._kernel[grid]
        return launch

    def _first(self, key: Any, grid: Grid, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Launch by Triton, and remember what it launched where that can be launched again."""
        with self._lock:
            bound: dict[str, Any] = {}
            run = self._jitted.run

            def seen(*args: Any, **kwargs: Any) -> Any:
                bound.update(zip(self._names, args, strict=False))  # while it is tuned many times: the last one counts
                bound.update(kwargs)
                return run(*args, **kwargs)

            self._jitted.run = seen
            try:
                compiled = self.by_name(grid)(*args, **kwargs)
            finally:
                del self._jitted.run
            if hasattr(compiled, "packed_metadata") and not self._hooked() and len(self._known) < MOST:
                values = {name: bound.get(name, _default(self._jitted, name)) for name in self._names}
                values = {name: None if isinstance(value, Tensor) else value for name, value in values.items()}
                self._known[key] = _Known(compiled, values, [name for name in kwargs if name not in values])
        return compiled

    def _hooked(self) -> bool:
        """Whether something is to be done before each launch."""
        configs = (getattr(layer, "best_config", None) for layer in self._layers)
        return bool(self._jitted.pre_run_hooks) or any(getattr(config, "pre_hook", None) for config in configs)


def _kind(value: Any) -> Any:
    """What Triton compiles for: of a tensor the dtype and the alignment; of all else the value, and its type."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    return value.__class__, value


def _default(jitted: Any, name: str) -> Any:
    value = jitted.signature.parameters[name].default
    return None if value is jitted.signature.empty else value


def _layers(kernel: Any) -> Iterator[Any]:
    """``kernel`` and what it wraps, to the jitted function."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    yield kernel
    while isinstance(kernel, Autotuner | Heuristics):
        kernel = kernel.fn
        yield kernel


def relaunched(kernel: Any) -> Any:
    """``kernel`` launched so; as it is where Triton's interpreter runs it, which compiles nothing."""
    from triton.runtime.jit import JITFunction

    return Relaunched(kernel) if isinstance(list(_layers(kernel))[-1], JITFunction) else kernel


def replace(package: str) -> int:
    """Have every tuned kernel of ``package``'s modules, as far as they are imported, launched so; gives how many.
    Functions that are only jitted stay: kernels call them by name while they are compiled."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    made: dict[int, Relaunched] = {}
    for module in _modules(package):
        for name, found in list(vars(module).items()):
            if isinstance(found, Autotuner | Heuristics):
                setattr(module, name, made.setdefault(id(found), Relaunched(found)))
    return len(made)


def _modules(package: str) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items())
            if module is not None and (name == package or name.startswith(f"{package}."))]  # fmt: skip
