"""Numbers and texts of a document as a person reads them: prefixes, ranges, and nothing that moves a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping

from schemas.form import Json

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_PREFIXED = ("B/s", "FLOP/s", "FLOP", "Hz")
_COUNTED = ("elements", "sequences", "tokens")  # units that are plurals
DIGITS, MOST_DIGITS = 3, 6  # what is shown, and what a document keeps of a float


def plural(count: Json, noun: str, many: str | None = None) -> str:
    """``1 step``, ``4 steps``, ``unknown steps``; ``many`` is the plural where an s does not make it."""
    number = "unknown" if count is None else f"{count:,}"
    return f"{number} {noun if count == 1 else many or noun + 's'}"


def amount(value: Json, unit: str = "", digits: int = DIGITS) -> str:
    """``value`` of ``unit`` in a few characters: 1.5 GiB, 12.3 ms, 93.8 GFLOP/s; "unknown" for None.

    A number with a prefix is shown with ``digits`` digits.
    """
    if value is None:
        return "unknown"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if unit == "B":
        return size(value, digits)
    if unit == "s":
        return seconds(value, digits)
    if unit in _PREFIXED:
        return _prefixed(value, unit, digits)
    if unit.endswith("/s"):
        return f"{_short(float(value), digits)} {unit}"
    number = f"{value:,}" if isinstance(value, int) else _short(value, MOST_DIGITS)
    return f"{number} {unit[:-1] if value == 1 and unit in _COUNTED else unit}".rstrip()


def _short(value: float, digits: int) -> str:
    """``value`` with ``digits`` digits, and all those before the point: 1,234 rather than 1.23e+03."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def size(value: float, digits: int = DIGITS) -> str:
    """Bytes with a binary prefix."""
    scaled, place = float(value), 0
    while abs(scaled) >= 1000 and place < len(_BINARY) - 1:
        scaled, place = scaled / 1024, place + 1
    return f"{value:,} B" if place == 0 and isinstance(value, int) else f"{_short(scaled, digits)} {_BINARY[place]}"


def gigabytes(budget: int) -> str:
    """Bytes in GB (10^9) with up to 6 digits: 16, 0.05."""
    return f"{budget / 1e9:.6g}"


def seconds(value: float, digits: int = DIGITS) -> str:
    """Seconds in s, ms or us."""
    for least, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if abs(value) >= least:
            return f"{_short(value * factor, digits)} {unit}"
    return "0 s" if value == 0 else f"{_short(value * 1e6, digits)} us"


def _prefixed(value: float, unit: str, digits: int) -> str:
    scaled, place = float(value), 0
    while abs(scaled) >= 1000 and place < len(_DECIMAL) - 1:
        scaled, place = scaled / 1000, place + 1
    return f"{_short(scaled, digits)} {_DECIMAL[place]}{unit}"


def exactly(value: Json, unit: str = "") -> str:
    """``value`` as its document has it, in its own unit, whole numbers with separators."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,} {unit}".rstrip()
    return f"{clean(json.dumps(value, ensure_ascii=False))} {unit}".rstrip()


def span(item: Mapping[str, Json]) -> str:
    """``low .. high unit`` of a reading or a measured line; empty where it has none, or ends that read alike."""
    if item.get("low") is None or item.get("high") is None:
        return ""
    return ends(item["low"], item["high"], item["unit"])


def ends(low: float, high: float, unit: str) -> str:
    """``3.69 .. 20.8 ms``: the unit once where both have it; empty where both read alike."""
    first, last = amount(low, unit), amount(high, unit)
    number, _, prefixed = first.rpartition(" ")
    if first == last:
        return ""
    return f"{number if number and last.endswith(' ' + prefixed) else first} .. {last}"


def told(item: Mapping[str, Json]) -> str:
    """A reading with its range, or what a decision chose."""
    if "chosen" in item:
        return choice(item["chosen"])
    text, range_ = amount(item["value"], item["unit"]), span(item)
    return f"{text} ({range_})" if range_ else text


def named(key: str, item: Mapping[str, Json]) -> tuple[str, str]:
    """How ``key`` and ``item`` read beside each other; what the unit or the name says is not said twice."""
    label, text = key.replace("_", " "), told(item)
    if label == "seconds" or label.endswith(" seconds"):
        return f"{label.removesuffix('seconds')}time", text
    unit = item.get("unit", "")
    if unit and label.endswith(f" {unit}s"):  # vector bits: 512 bit
        return label.removesuffix(f" {unit}s"), text
    if unit.removesuffix("/s") in _COUNTED and unit.replace("/s", " per second") in label:  # global tokens: 128 tokens
        return label, text.replace(f" {unit}", "")
    return label, text


def choice(chosen: Json) -> str:
    """A decision's value: lists joined, an empty one and None as "none"."""
    if isinstance(chosen, list):
        return ", ".join(f"({choice(part)})" if isinstance(part, list) else choice(part) for part in chosen) or "none"
    return "none" if chosen is None else amount(chosen)


def ranks(members: list[int]) -> str:
    """Rank numbers with runs drawn together: 0-2, 5."""
    parts: list[list[int]] = []
    for member in sorted(members):
        if parts and member == parts[-1][-1] + 1:
            parts[-1].append(member)
        else:
            parts.append([member])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def clean(text: str) -> str:
    """``text`` with every character that is not printed (escape sequences, newlines) shown as its code."""
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
