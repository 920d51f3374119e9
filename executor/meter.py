"""What one rank sees of its own steps: the moments of each, and the bytes at their highest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from executor.clock import Clock, Moment
from executor.exchange import Exchanged
from executor.peaks import Probe

PARTS = ("compute", "exchange", "optimizer", "owners", "total")


@dataclass
class Samples:
    """Seconds of each measured step by part, and of its all-reduces (``reduced``), launch to completion; the share of
    those that lies before the last one's launch, while backward still computes, is ``hidden``."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    reduced: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    exchanged: Exchanged | None = None
    owners_bytes: int | None = None

    def median(self, part: str) -> float | None:
        return median(self.parts[part]) if self.parts[part] else None

    def spread(self, part: str) -> tuple[float, float] | None:
        """The 10 % and 90 % quantiles of a part; None of fewer than two samples."""
        return quantile_range(self.parts[part])

    @property
    def count(self) -> int:
        return len(self.parts["total"])


def quantile_range(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 10 % and 90 % quantiles of ``samples``; None of fewer than two."""
    if len(samples) < 2:
        return None
    cuts = quantiles(samples, n=10, method="inclusive")
    return cuts[0], cuts[-1]


class Meter:
    """Told of each step's phases by the loop; keeps the samples of steps that are inside the measuring window.

    compute: from the step's start to the launch of its last collective, or to the end of backward where nothing is
    exchanged. exchange: from there to the end of backward, waiting for slower ranks included, and what backward waited
    for a buffer before; where every collective holds the rank up, all of them are exchange, and the rest is compute.
    owners: the sending of owners' updates. optimizer: the rest (norm, clipping, updates, their application). A run that
    goes on from step ``start`` warms up anew: ``first`` of its own steps are outside the window.
    """

    def __init__(
        self, clock: Clock, probe: Probe, first: int, exchanged: Callable[[], Exchanged | None], start: int = 0
    ) -> None:
        self.clock, self.probe, self.samples = clock, probe, Samples()
        self._first, self._exchanged, self._start = first, exchanged, start
        self._moments: list[Moment] = []
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step - self._start
        self.probe.begin(self._step)
        self._moments = [self.clock.now()]

    def backward_done(self) -> None:
        self._moments.append(self.clock.now())
        self.probe.optimizer()

    def sending(self) -> None:
        """Owners' updates begin to travel; `sent` when they have."""
        self._moments.append(self.clock.now())

    def sent(self) -> None:
        self._moments.append(self.clock.now())

    def launched(self) -> None:
        """All of the step is launched; what came of it is not read yet."""
        self._moments.append(self.clock.now())

    def end(self, owners_bytes: int | None) -> None:
        self.clock.settle()
        self.probe.end()
        if self._step < self._first or self.probe.disturbs(self._step):
            return
        seen = self._exchanged()
        self._keep(seen)
        self.samples.exchanged, self.samples.owners_bytes = seen, owners_bytes

    def skipped(self) -> None:
        """The step was not applied: it is no sample."""
        self.clock.settle()
        self.probe.end()

    def step_seconds(self) -> float:
        """Seconds of the step that just ended."""
        return self.clock.seconds(self._moments[0], self._moments[-1])

    def _keep(self, seen: Exchanged | None) -> None:
        start, backward, end = self._moments[0], self._moments[1], self._moments[-1]
        launched = seen.spans[-1][0] if seen is not None and seen.spans else backward
        owners = self.clock.seconds(self._moments[2], self._moments[3]) if len(self._moments) == 5 else 0.0
        exchanged = self.clock.seconds(launched, backward)
        stalled = 0.0 if seen is None else self.clock.union(seen.stalls, launched)
        if seen is not None and seen.blocking:
            exchanged = self.clock.union(seen.whole_spans())
        exchanged += stalled
        seconds = {
            "compute": self.clock.seconds(start, backward) - exchanged,
            "exchange": exchanged,
            "optimizer": self.clock.seconds(backward, end) - owners,
            "owners": owners,
            "total": self.clock.seconds(start, end),
        }
        for part, value in seconds.items():
            self.samples.parts[part].append(value)
        if seen is not None:
            spans = seen.whole_spans()
            reduced = self.clock.union(spans)
            self.samples.reduced.append(reduced)
            hides = reduced > 0 and not seen.blocking
            behind = self.clock.union(spans, launched) - stalled
            self.samples.hidden.append(max(0.0, behind) / reduced if hides else 0.0)
