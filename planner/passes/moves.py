"""The exchange of a fleet as time is reckoned by it: one all-reduce in buckets, or under FSDP2 gathers and
reduce-scatters of units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.passes.cost import BACKWARD_SHARE, waited_seconds
from planner.passes.link import Rings
from planner.passes.sharding import is_sharded
from schemas.form import Json

FORWARD_SHARE = 1 - BACKWARD_SHARE


@dataclass(frozen=True)
class Moves:
    """What a step moves: ``payload`` bytes summed in ``buckets``, ``last`` of them in the last; and where parameters
    are sharded ``gathers``: bytes and how many gathers of forward, then of backward (none: they are not).
    ``overlaps``: the device computes meanwhile, which gloo's ranks do not."""

    payload: float
    buckets: float
    last: float
    gathers: tuple[tuple[float, float], tuple[float, float]] | None = None
    overlaps: bool = True

    def forward(self, ring: Rings) -> float:
        """Seconds of the gathers of forward."""
        return 0.0 if self.gathers is None else ring.half(*self.gathers[0])

    def seconds(self, ring: Rings) -> float:
        """Seconds of all collectives of a step."""
        if self.gathers is None:
            return ring.all_reduce(self.payload, self.buckets)
        return self.forward(ring) + ring.half(*self.gathers[1]) + ring.half(self.payload, self.buckets)

    def waited(self, slowest: float, total: float, forward: float) -> float:
        """Of ``total`` seconds of collectives, ``forward`` of them in forward, those that are not hidden behind the
        compute of the rank that computes longest. The first gather and the last sum have nothing to hide behind."""
        if self.gathers is None:
            return waited_seconds(slowest, total, self.last / self.payload)
        if not self.overlaps:
            return total
        share = (self.buckets - 1) / self.buckets
        behind = min(share * forward, FORWARD_SHARE * slowest)
        return total - behind - min(share * (total - forward), BACKWARD_SHARE * slowest)

    def exposed(self, own: float, slowest: float, total: float, forward: float) -> float:
        """What a rank of compute time ``own`` waits for: the slowest rank's lag, and collectives where they show."""
        return slowest - own + self.waited(slowest, total, forward)


def moves_of(draft: Mapping[str, Json]) -> Moves:
    """The exchange of a draft, whose bytes are decided."""
    part = draft["exchange"]
    payload, buckets = part["payload"]["value"], part["buckets"]["value"]
    if not is_sharded(draft):
        return Moves(payload, buckets, part["last_bucket"]["value"])
    ahead = part["forward_bytes"]["value"], part["forward_count"]["value"]
    again = part["backward_bytes"]["value"], part["backward_count"]["value"]
    return Moves(payload, buckets, payload / buckets, (ahead, again), part["backend"]["chosen"] == "nccl")
