"""What the value of a reading can be, by the place where it stands: a number, a text, a flag, a curve or versions.

The JSON Schemas say what a reading is; this says which of them a rate is, and which a name. So whatever reads a
document that was proved may reckon with its numbers: none is negative, and none leaves double precision when a few are
multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise

from schemas.document import is_reading, walk
from schemas.form import Json, Unfaithful

LEAST, MOST = 1e-30, 1e30
"""The magnitudes of a number that is not 0. No quantity of a machine or of a run comes near."""

_TEXTS = {"name", "uuid", "mig", "compute_mode", "ecc", "path", "ancestor", "regime", "verdict", "platform"}
_POSITIVE = re.compile(
    r"cores|vector_bits|clock\w*|memory_total|(rate|peak)_\w+|bandwidth\w*|host_to_device|device_to_host|(launch|operator)_seconds"
    r"|\w+_rate|\w+_latency|products|host_link|launch(_\w+)?|effective_cores|flops_\w+"
)
_VERSION = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def refuse_other_values(document: Mapping[str, Json], name: str) -> None:
    """Raise Unfaithful, naming the pointer, where a reading's value is of another kind than its place calls for, or its
    range does not hold it."""
    for pointer, item in walk(document):
        if not is_reading(item) or item["value"] is None:
            continue
        refuse_other_value(item, pointer, name)
        if "low" in item and not (_finite(item["low"]) and _finite(item["high"])):
            raise Unfaithful(f"{name}: {pointer}: its range is not one of numbers from {LEAST:g} to {MOST:g}")
        if "low" in item and not (_number(item["value"]) and item["low"] <= item["value"] <= item["high"]):
            raise Unfaithful(f"{name}: {pointer}: is not within its own range, {item['low']:g} to {item['high']:g}")


def refuse_other_value(item: Mapping[str, Json], pointer: str, name: str) -> None:
    """Raise Unfaithful where the value of ``item`` is of another kind than the reading at ``pointer`` has."""
    what, holds = _kind(pointer.split("/")[1:])
    if not holds(item["value"]):
        shown = str(item["value"])
        raise Unfaithful(f"{name}: {pointer}: {shown if len(shown) <= 60 else shown[:57] + '...'} is not {what}")


def _kind(place: list[str]) -> tuple[str, Callable[[Json], bool]]:
    """What the value of the reading at ``place`` is to be, in words, and whether a value is that."""
    key, above = place[-1], place[-2] if len(place) > 1 else ""
    if key == "arch_list":
        return "a list of compute capabilities", lambda value: isinstance(value, list) and all(map(_version, value))
    if key in _TEXTS or above in ("toolchain", "tuned"):
        return "a text", lambda value: isinstance(value, str) and value != ""
    if key == "sm":
        return "a compute capability, as in 8.6", _version
    if key == "sha256":
        return "a SHA-256", lambda value: isinstance(value, str) and bool(_DIGEST.fullmatch(value))
    if key == "peer_to_peer" or above in ("capability", "served"):
        return "true or false", lambda value: isinstance(value, bool)
    if key.endswith("_curve"):
        return "a curve of two numbers a row", lambda value: _curve(value, 2)
    if above == "calibration":
        return "a curve of four numbers a row", lambda value: _curve(value, 4)
    if key.startswith("pcie_"):
        return "a whole number from 1 to 64", lambda value: _whole(value) and 1 <= value <= 64
    if key in ("cores", "multiprocessors", "numa_nodes", "tokens", "global_batch", "global_tokens"):
        return "a whole number from 1", lambda value: _whole(value) and value >= 1
    if key == "nvlinks":
        return "a whole number from 0", lambda value: _whole(value) and value >= 0
    if _POSITIVE.fullmatch(key):
        return "a number above 0", lambda value: _number(value) and value > 0
    # What is left of a budget, and of a sum whose parts were counted apart; what a mechanism saves and costs.
    if key in ("limit", "saves", "costs") or above == "alive":
        return "a number", _number
    return "a number from 0", lambda value: _number(value) and value >= 0


def _version(value: Json) -> bool:
    return isinstance(value, str) and bool(_VERSION.fullmatch(value))


def _number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)


def _whole(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: float) -> bool:
    return value == 0 or LEAST <= abs(value) <= MOST


def _curve(value: Json, columns: int) -> bool:
    """Rows of so many numbers above 0, in the order of the first ones."""
    if not isinstance(value, list) or not value:
        return False
    rows = [row for row in value if isinstance(row, list) and len(row) == columns]
    if len(rows) < len(value) or not all(_number(cell) and cell > 0 for row in rows for cell in row):
        return False
    return all(one[0] < other[0] for one, other in pairwise(rows))
