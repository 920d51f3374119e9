"""How many bytes of a budget a plan may fill, and the budget that so many bytes need.

What a card's allocator holds beyond the peak lies in gaps: pages of an expandable segment that are not wholly free,
blocks of separate segments that fit nothing. Plans that filled what is left here ran inside their budget on a card.
"""

from __future__ import annotations

import math

from planner.passes.constants import ALLOCATOR_PAGES_BYTES, FIT_HEADROOM, SEGMENTS_HEADROOM


def usable(budget: float, allocator: str) -> int:
    """Bytes that a peak may have within ``budget`` bytes."""
    if allocator == "segments":
        return int(SEGMENTS_HEADROOM * budget)
    pages = ALLOCATOR_PAGES_BYTES if allocator == "expandable" else 0
    return max(0, int(min(FIT_HEADROOM * budget, budget - pages)))


def needed(peak: float, allocator: str) -> int:
    """The least budget in bytes that takes a peak of ``peak`` bytes."""
    if allocator == "segments":
        return math.ceil(peak / SEGMENTS_HEADROOM) + 1
    pages = ALLOCATOR_PAGES_BYTES if allocator == "expandable" else 0
    return math.ceil(max(peak / FIT_HEADROOM, peak + pages)) + 1


def told(budget: int, allocator: str) -> str:
    """What `usable` takes of ``budget``, in words."""
    if allocator == "segments":
        return f"{SEGMENTS_HEADROOM} x {budget} B, for gaps between segments"
    if usable(budget, allocator) < int(FIT_HEADROOM * budget):
        return f"{budget} B - {ALLOCATOR_PAGES_BYTES // 2**20} MiB, for pages that are not whole free"
    return f"{FIT_HEADROOM} x {budget} B"
