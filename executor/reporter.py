"""What a run tells meanwhile: plain lines for a person, JSON lines for a program. Rank 0 tells, others are mute."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from executor import voice
from schemas.form import Json

METRICS = "metrics.jsonl"
"""The file of a run's metrics in its folder."""


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

    Steps are told counted from 1. Each line of the file carries the id of its ``run``; a run adds to the file, after a
    line that says when it began (``start``). Where lines can no longer be written the run goes on without them. Raises
    OSError where the folder takes no file.
    """

    def __init__(self, folder: Path, every: int, run: str, start: str, out: IO[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = (folder / METRICS).open("a", encoding="utf-8")
        self._every, self._run, self._out = every, run, out
        self._write({"start": start})
        self._last = time.monotonic()
        self._pace: float | None = None

    def say(self, text: str) -> None:
        voice.say(text, self._out)

    def step(self, step: int, steps: int, loss: float, factor: float, seconds: float, tokens: int) -> None:
        """``step`` is counted from 0, as the loop does; ``seconds`` and ``tokens`` (the fleet's) are of the step; by
        the wall goes what a step took with all that lies between it and the last one, and the time remaining."""
        now = time.monotonic()
        wall, self._last = now - self._last, now
        # The first step carries the start-up of libraries: the pace begins after it.
        if step > 0:
            self._pace = wall if self._pace is None else 0.9 * self._pace + 0.1 * wall
        rate = tokens / seconds if seconds > 0 else 0.0
        line = {"step": step + 1, "loss": loss, "lr_factor": factor, "seconds": seconds, "tokens_per_second": rate}
        self._write({**line, "wall_seconds": wall})
        if step % self._every == 0 or step == steps - 1:
            left = "" if self._pace is None else f"  left {_clock(self._pace * (steps - 1 - step))}"
            numbers = f"loss {loss:.4f}  lr x{factor:.3f}  {rate:,.0f} tokens/s  {1e3 * seconds:.1f} ms"
            self.say(f"step {step + 1:>{len(str(steps))}}/{steps}  {numbers}{left}")

    def evaluated(self, step: int, bits_per_byte: float) -> None:
        """After ``step`` steps."""
        self._write({"step": step, "bits_per_byte": bits_per_byte})
        found = f"held-out {bits_per_byte:.4f} bits per byte"
        self.say(f"after {step} steps: {found if math.isfinite(bits_per_byte) else 'the held-out loss is not finite'}")

    def skipped(self, step: int, reason: str) -> None:
        """``step`` is counted from 0, as the loop does."""
        self._write({"step": step + 1, "skipped": reason})
        self.say(f"step {step + 1} skipped on every rank: {reason}")

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # said when it was written
                self._file.close()

    def _write(self, line: dict[str, Json]) -> None:
        if self._file is None:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            self._file.write(json.dumps({"run": self._run, **plain}) + "\n")
            self._file.flush()
        except OSError as error:
            self.say(f"the run goes on without {self._file.name}, which takes no more lines ({error.strerror})")
            self.close()
            self._file = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
