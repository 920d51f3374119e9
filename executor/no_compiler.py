"""Keeps torch's compiler from being imported where nothing is compiled."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class NoCompiler(ModuleType):
    """Stands in for torch._dynamo until something needs more of it than "leave this function alone".

    Torch wraps many of its meta functions so that the compiler passes them by, and imports the whole compiler for that
    at the first call: a third of this program's time, for nothing, since nothing is compiled here.
    """

    # What torch's checkpoint asks: whether tracing inside a trace is an error. There is no trace.
    config = SimpleNamespace(error_on_nested_fx_trace=True, patch=lambda *_, **__: nullcontext())

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """The function as it is."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect asks every module for its file
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)

    @classmethod
    def install(cls) -> None:
        """Take the place of torch._dynamo unless it is imported already."""
        name = "torch._dynamo"
        if name not in sys.modules:
            sys.modules[name] = cls(name)
            torch._dynamo = sys.modules[name]
