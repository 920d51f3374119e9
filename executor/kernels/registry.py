"""Which kernel ran is counted, so that a run can prove what its plan promised.

A kernel ("kda") has choices ("chunk_torch", "recurrent_torch"). A choice is called through the registry only; every
call raises its count by one. Nothing here falls back: an unknown choice is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from torch import Tensor

P = ParamSpec("P")

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
