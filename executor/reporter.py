"""What a run tells meanwhile: plain lines for a person, JSON lines for a program. Rank 0 tells, others are mute."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import IO, Protocol

from schemas.form import Json


class Reporter(Protocol):
    """Told of events by the run; nothing in the core prints."""

    def say(self, text: str) -> None: ...
    def step(self, step: int, steps: int, loss: float, factor: float, seconds: float, tokens: int) -> None: ...
    def evaluated(self, step: int, bits_per_byte: float) -> None: ...
    def skipped(self, step: int, reason: str) -> None: ...
    def close(self) -> None: ...


class Mute:
    """The reporter of every rank but 0, and of tests."""

    def say(self, text: str) -> None:
        return

    def step(self, step: int, steps: int, loss: float, factor: float, seconds: float, tokens: int) -> None:
        return

    def evaluated(self, step: int, bits_per_byte: float) -> None:
        return

    def skipped(self, step: int, reason: str) -> None:
        return

    def close(self) -> None:
        return


class Teller:
    """Lines on stderr every ``every`` steps, and every step and evaluation in ``folder``/metrics.jsonl.

    A run adds to that file, after a line that says when it began (``start``). Raises OSError where the folder takes no
    file.
    """

    def __init__(self, folder: Path, every: int, start: str, out: IO[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._write({"run": start})
        self._every, self._out = every, out or sys.stderr
        self._last = time.monotonic()
        self._pace: float | None = None

    def say(self, text: str) -> None:
        print(f"dormouse: {text}", file=self._out, flush=True)

    def step(self, step: int, steps: int, loss: float, factor: float, seconds: float, tokens: int) -> None:
        """``seconds`` and ``tokens`` (the fleet's) of the step; time remaining goes by the wall, all included."""
        now = time.monotonic()
        wall, self._last = now - self._last, now
        # The first step carries the start-up of libraries: the pace begins after it.
        if step > 0:
            self._pace = wall if self._pace is None else 0.9 * self._pace + 0.1 * wall
        rate = tokens / seconds if seconds > 0 else 0.0
        self._write({"step": step, "loss": loss, "lr_factor": factor, "seconds": seconds, "tokens_per_second": rate})
        if step % self._every == 0 or step == steps - 1:
            left = "" if self._pace is None else f"  left {_clock(self._pace * (steps - 1 - step))}"
            numbers = f"loss {loss:.4f}  lr x{factor:.3f}  {rate:,.0f} tokens/s  {1e3 * seconds:.1f} ms"
            self.say(f"step {step + 1:>{len(str(steps))}}/{steps}  {numbers}{left}")

    def evaluated(self, step: int, bits_per_byte: float) -> None:
        self._write({"step": step, "bits_per_byte": bits_per_byte})
        self.say(f"after {step} steps: held-out {bits_per_byte:.4f} bits per byte")

    def skipped(self, step: int, reason: str) -> None:
        self._write({"step": step, "skipped": reason})
        self.say(f"step {step} skipped on every rank: {reason}")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Json]) -> None:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
