"""The limits that CUDA's Multi-Process Service sets this process, from its environment: a part of a card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.request import Usage

_PIPES, _SHARE, _MEMORY = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Mps:
    """``share`` of the multiprocessors (None: all), and bytes of memory by device ordinal or UUID."""

    share: float | None = None
    limits: Mapping[str, int] = field(default_factory=dict)

    def memory(self, place: int, uuid: str) -> int | None:
        """The limit on the card ``uuid``, which is the ``place``-th of the machine; None where none is set."""
        return self.limits.get(uuid, self.limits.get(str(place)))


def read(environ: Mapping[str, str]) -> Mps | None:
    """The limits in ``environ``; None where no MPS daemon runs, since they then have no effect.

    Raises:
        Usage: a limit is not of the form that MPS reads.
    """
    if not (Path(environ.get(_PIPES) or _DEFAULT_PIPES) / "control").exists():
        return None
    share = environ.get(_SHARE)
    if share is not None and not (re.fullmatch(r"[0-9]+(\.[0-9]*)?", share, re.ASCII) and 0 < float(share) <= 100):
        raise Usage(f"{_SHARE}={share}: a percentage, above 0 and up to 100")
    limits = dict(_limit(part) for part in environ.get(_MEMORY, "").split(",") if part.strip())
    return Mps(None if share is None else float(share) / 100, limits)


def _limit(part: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*([0-9]+|GPU-[0-9a-fA-F-]+)=([0-9]+)([KMG]?)B?\s*", part, re.ASCII)
    if not found:
        raise Usage(f"{_MEMORY} has {part!r}: device=size with M or G, as in 0=16G")
    return found[1], int(found[2]) * _UNITS[found[3]]
