"""Numbers and texts of a document as a person reads them: prefixes, ranges, and nothing that moves a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping

from schemas.form import Json

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_PREFIXED = ("B/s", "FLOP/s", "Hz")


def amount(value: Json, unit: str = "") -> str:
    """``value`` of ``unit`` in a few characters: 1.5 GiB, 12.3 ms, 93.8 GFLOP/s; "unknown" for None."""
    if value is None:
        return "unknown"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if unit == "B":
        return size(value)
    if unit == "s":
        return seconds(value)
    if unit in _PREFIXED:
        return _prefixed(value, unit)
    if unit.endswith("/s"):
        return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"{text} {unit}".rstrip()


def size(value: float) -> str:
    """Bytes with a binary prefix and 3 digits."""
    scaled, place = float(value), 0
    while abs(scaled) >= 1000 and place < len(_BINARY) - 1:
        scaled, place = scaled / 1024, place + 1
    return f"{value:,} B" if place == 0 and isinstance(value, int) else f"{scaled:.3g} {_BINARY[place]}"


def seconds(value: float) -> str:
    """Seconds with 3 digits, in s, ms or us."""
    for least, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if abs(value) >= least:
            return f"{value * factor:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} s"
    return "0 s" if value == 0 else f"{value * 1e6:.3g} us"


def _prefixed(value: float, unit: str) -> str:
    scaled, place = float(value), 0
    while abs(scaled) >= 1000 and place < len(_DECIMAL) - 1:
        scaled, place = scaled / 1000, place + 1
    return f"{scaled:.3g} {_DECIMAL[place]}{unit}"


def span(item: Mapping[str, Json]) -> str:
    """``low..high`` of a reading or a measured line; empty where it has none."""
    if item.get("low") is None or item.get("high") is None:
        return ""
    return f"{amount(item['low'], item['unit'])} .. {amount(item['high'], item['unit'])}"


def told(item: Mapping[str, Json]) -> str:
    """A reading with its range, or what a decision chose."""
    if "chosen" in item:
        return choice(item["chosen"])
    text, ends = amount(item["value"], item["unit"]), span(item)
    return f"{text} ({ends})" if ends else text


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
