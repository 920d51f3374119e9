"""Which kernel ran is counted, so that a run can prove what its plan promised.

A kernel ("kda") has choices ("chunk_torch", "recurrent_torch"). A choice is called through the registry only; every
call raises its count by one. Nothing here falls back: an unknown choice is an error.

An opaque operator (Triton, FLA) is a ``torch.library`` operator of the namespace "dormouse"; what it costs is entered
beside it, since no count of what it launches inside can see into it. So are torch's own of which that holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from torch import Tensor

P = ParamSpec("P")


class Cost(NamedTuple):
    """What one call of an opaque operator does: ``flops`` of matrix products and ``temporary`` bytes that it takes and
    returns inside itself, both functions of its arguments and its result, and what launching its kernels costs the
    host, in operators of torch."""

    flops: Callable[..., int]
    launches: int
    temporary: Callable[..., int]


TRITON_LAUNCH = 2
"""Operators of a model that a Triton kernel launched from Python costs the host, what its wrapper does included: on a
host of H200 46 to 52 us where it is launched again (``executor.kernels.relaunch``; 93 to 122 us by Triton itself),
where an operator of a model took 45 us."""

costs: dict[str, Cost] = {}
calls: Counter[tuple[str, str]] = Counter()
_choices: dict[tuple[str, str], Callable[..., Tensor]] = {}


def register(kernel: str, choice: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Enter a function as one choice of a kernel; the function returned counts each of its calls."""

    def enter(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            calls[kernel, choice] += 1
            return function(*args, **kwargs)

        _choices[kernel, choice] = counted
        return counted

    return enter


def lookup(kernel: str, choice: str) -> Callable[..., Tensor]:
    """The counted function of a choice. Raises KeyError naming the known choices."""
    if (kernel, choice) not in _choices:
        known = sorted(name for owner, name in _choices if owner == kernel)
        raise KeyError(f"kernel {kernel} has no choice {choice!r}; known: {', '.join(known) or 'none'}")
    return _choices[kernel, choice]


def _nothing(*_: Any, out: Any) -> int:
    return 0


def cost(operator: str, flops: Callable[..., int], launches: int, temporary: Callable[..., int] = _nothing) -> None:
    """Enter what ``operator`` ("dormouse::name") costs; both functions are called as ``f(*args, out=result)``."""
    costs[operator] = Cost(flops, launches, temporary)
