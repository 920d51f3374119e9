"""A module like pynvml whose answers are a case of tests/cases/nvml: what was recorded, or what a card could say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = Path(__file__).parent / "cases" / "nvml"


def load(name: str) -> Any:
    return json.loads((CASES / f"{name}.json").read_text("utf-8"))


class FakeNvml:
    """Answers of the case's "cards", by NVML's own function names; {"error": text} raises NVMLError."""

    class NVMLError(Exception):
        pass

    def __init__(self, case: Any) -> None:
        self._case = case
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        self.calls.append("nvmlInit")
        if "init_error" in self._case:
            raise self.NVMLError(self._case["init_error"])

    def nvmlShutdown(self) -> None:
        self.calls.append("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer(self._case["driver"])

    def nvmlDeviceGetCount(self) -> int:
        return len(self._case["cards"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._case["cards"][index]

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda card: self._answer(card.get(name, {"error": "Not Supported"}))

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, dict):
            if "error" in answer:
                raise self.NVMLError(answer["error"])
            return SimpleNamespace(**answer)
        return answer
