"""One question to NVML as a reading: the answer, or an unknown with NVML's reason; never 0 for what it cannot see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.document import reading, unknown
from schemas.form import Json

NO_VALUES = ("", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


@dataclass(frozen=True)
class Ask:
    """Asks ``nvml``, a module like pynvml. ``aside`` follows NVML's reason where the platform explains it."""

    nvml: Any
    aside: str = ""

    def __call__(
        self, unit: str, why: str, call: Callable[[], Any], *, zero: bool = False, scale: int = 1
    ) -> dict[str, Json]:
        """The answer times ``scale`` as a probed reading.

        0 and "" are no answers unless ``zero``: NVML gives them for a link or a name that it cannot see.
        """
        value, reason = self.plain(call)
        if reason is not None:
            return unknown(unit, reason)
        if (isinstance(value, str) and value.strip() in NO_VALUES) or (value == 0 and not zero):
            return unknown(unit, f"NVML answered {value!r}, which is no value")
        return reading(value if isinstance(value, str) else value * scale, unit, "probed", why)

    def get(self, function: str, *arguments: Any) -> tuple[Any, str | None]:
        """(what NVML's ``function`` answers, None), or (None, why there is no answer)."""
        return self.plain(lambda: getattr(self.nvml, function)(*arguments))

    def plain(self, call: Callable[[], Any]) -> tuple[Any, str | None]:
        """(the answer, None), or (None, why there is none)."""
        try:
            return call(), None
        except self.nvml.NVMLError as error:
            return None, f"NVML: {error}{self.aside}"
        except AttributeError as error:  # an older nvidia-ml-py lacks the function
            return None, f"nvidia-ml-py: {error}"


def text(answer: Any) -> str:
    """NVML's text; older versions of nvidia-ml-py give bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
