"""Collectives over rings, as formulas: payload in bytes, rates in bytes a second, a latency in seconds a ring step.

Ranks of one node form a ring over the node's slowest path; nodes, where there are several, form a second ring over the
network: reduce-scatter within each node, all-reduce of the shards between nodes, all-gather within each node.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Bits a second and lane that the line code leaves: 8b/10b to generation 2, 128b/130b from 3 on, and from 6 on flits of
# 242 of 256 bytes (PCI Express base specification).
_LANE_BITS = {1: 2.5e9 * 0.8, 2: 5e9 * 0.8, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
_LANE_BITS[6] = 64e9 * 242 / 256


def lane_rate(generation: int) -> float:
    """Bytes a second of one lane of a PCI Express ``generation``; of one newer than listed, the newest listed's."""
    return _LANE_BITS[min(generation, max(_LANE_BITS))] / 8


def ring_volume(payload: float, ranks: int) -> float:
    """Bytes that each rank of a ring all-reduce sends: a reduce-scatter and an all-gather of 1/P slices."""
    return 2 * (ranks - 1) / ranks * payload


def at_size(curve: Sequence[Sequence[float]], size: float) -> float:
    """Seconds at ``size`` bytes from timed points [bytes, seconds] of rising size: between two, on the line through
    them, since a ring's time is a latency and a rate; below the first, its time; above the last, on the line through
    the last two, or in proportion where there is one."""
    if size <= curve[0][0]:
        return curve[0][1]
    if len(curve) == 1:
        return curve[0][1] * size / curve[0][0]
    place = min(bisect_left(curve, size, key=lambda point: point[0]), len(curve) - 1)
    (s0, t0), (s1, t1) = curve[place - 1], curve[place]
    return float(t0 + (t1 - t0) * (size - s0) / (s1 - s0))


@dataclass(frozen=True)
class Rings:
    """``per_node`` ranks on each of ``nodes`` nodes. ``rate`` and ``latency`` are the path's within a node;
    ``network_rate`` is what one node sends to others, all its ranks together (0 where there is one node).

    ``bucket_seconds`` is what each bucket costs beside its transfer. ``curve`` holds timed all-reduces within a node,
    and ``curve_rate`` the rate that was fitted to them: where there is a curve, it is taken at its word, and another
    ``rate`` scales it.
    """

    per_node: int
    nodes: int
    rate: float
    latency: float
    network_rate: float = 0.0
    network_latency: float = 0.0
    bucket_seconds: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    curve_rate: float = 0.0

    def all_reduce(self, payload: float, buckets: float) -> float:
        """Seconds to sum ``payload`` bytes over all ranks, in so many buckets."""
        if self.curve:
            within = buckets * at_size(self.curve, payload / buckets) * self.curve_rate / self.rate
        else:
            steps = buckets * 2 * (self.per_node - 1)
            within = steps * self.latency + ring_volume(payload, self.per_node) / self.rate
        within += buckets * self.bucket_seconds
        if self.nodes == 1:
            return within
        between = buckets * 2 * (self.nodes - 1) * self.network_latency
        return within + between + ring_volume(payload, self.nodes) / self.network_rate

    def half(self, payload: float, times: float) -> float:
        """Seconds of ``times`` reduce-scatters, or gathers, of ``payload`` bytes in all: each is half an all-reduce."""
        apart = times * self.bucket_seconds
        return apart + (self.all_reduce(payload, times) - apart) / 2 if times else 0.0

    def all_gather(self, share: float) -> float:
        """Seconds until every rank has the ``share`` bytes of every other."""
        within = (self.per_node - 1) * (self.latency + share / self.rate)
        if self.nodes == 1:
            return within
        # What comes over the network is passed on within the node as well.
        foreign = (self.nodes - 1) * self.per_node * share
        return within + (self.nodes - 1) * self.network_latency + foreign / self.network_rate + foreign / self.rate
