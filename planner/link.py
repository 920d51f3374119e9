"""Collectives over a ring, as formulas: P ranks, a link of so many bytes a second, a latency a step."""

from __future__ import annotations

# Bits a second and lane that the line code leaves: 8b/10b to generation 2, 128b/130b from 3 on, and from 6 on flits of
# 242 of 256 bytes (PCI Express base specification).
_LANE_BITS = {1: 2.5e9 * 0.8, 2: 5e9 * 0.8, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
_LANE_BITS[6] = 64e9 * 242 / 256


def lane_rate(generation: int) -> float:
    """Bytes a second of one lane of a PCI Express ``generation``. Raises KeyError for one that is not listed."""
    return _LANE_BITS[generation] / 8


def ring_volume(payload: float, world: int) -> float:
    """Bytes that each rank of a ring all-reduce sends: a reduce-scatter and an all-gather of 1/P slices."""
    return 2 * (world - 1) / world * payload


def all_reduce_seconds(payload: float, world: int, rate: float, latency: float, buckets: float) -> float:
    """Time of a ring all-reduce of ``payload`` bytes over a link of ``rate`` B/s, in so many buckets."""
    return buckets * 2 * (world - 1) * latency + ring_volume(payload, world) / rate


def all_gather_seconds(share: float, world: int, rate: float, latency: float) -> float:
    """Time of a ring all-gather in which every rank sends ``share`` bytes of its own."""
    return (world - 1) * (latency + share / rate)
