"""A module like pynvml that replays a file of tests/cases/nvml, recorded by `record_nvml.py` or made up.

Each answer stands under its call as text: ``"nvmlDeviceGetName(device 0)": "NVIDIA H200"``. A handle is
``{"handle": "device 0"}``, a structure a dict of its fields, an error ``{"error": 3, "text": "Not Supported"}``, and a
function that an older nvidia-ml-py lacks ``{"absent": true}``. What is not listed is answered by the file's
"otherwise"; a recorded file has none, so that a question that was never asked of the real cards fails the test.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = Path(__file__).parent / "cases" / "nvml"


def load(name: str) -> Any:
    return json.loads((CASES / f"{name}.json").read_text("utf-8"))


def altered(name: str, **answers: Any) -> Any:
    """The case ``name`` with other answers: ``nvmlDeviceGetName__0=...`` answers for device 0 alone."""
    case = copy.deepcopy(load(name))
    for key, answer in answers.items():
        function, _, device = key.partition("__")
        case["answers"][f"{function}({f'device {device}' if device else ''})"] = answer
    return case


class Handle(str):
    """A handle of the driver, by its name in the file."""


def call_text(function: str, arguments: tuple[Any, ...], name: Callable[[Any], str | None]) -> str:
    """``nvmlDeviceGetP2PStatus(device 0, device 1, 2)``; ``name`` gives a handle's name, None for what is no handle."""
    return f"{function}({', '.join(name(part) or json.dumps(part) for part in arguments)})"


class FakeNvml:
    """The answers of ``case``; ``calls`` lists what was asked."""

    class NVMLError(Exception):
        def __init__(self, value: int, text: str) -> None:
            super().__init__(text)
            self.value = value

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, case: Any) -> None:
        self._case = case
        self.calls: list[str] = []

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if not function.startswith("nvml"):
            raise AttributeError(function)
        return lambda *arguments: self._answer(function, arguments)

    def _answer(self, function: str, arguments: tuple[Any, ...]) -> Any:
        asked = call_text(function, arguments, lambda part: str(part) if isinstance(part, Handle) else None)
        self.calls.append(asked)
        if asked in self._case["answers"]:
            return self._value(self._case["answers"][asked])
        if "otherwise" not in self._case:
            raise AssertionError(f"{asked} was never asked when this case was recorded")
        return self._value(self._case["otherwise"])

    def _value(self, answer: Any) -> Any:
        if isinstance(answer, list):
            return [self._value(part) for part in answer]
        if not isinstance(answer, dict):
            return answer
        if "error" in answer:
            raise self.NVMLError(answer["error"], answer["text"])
        if "absent" in answer:
            raise AttributeError("module 'pynvml' has no such function")
        return Handle(answer["handle"]) if "handle" in answer else SimpleNamespace(**answer)
