"""Readings and decisions: the only ways a number or a choice enters a document, and the tally of them.

A reading is a number with its basis; a decision is a choice with its reason (see docs/architecture.md). Both are plain
dicts, so that a document is plain JSON everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from schemas.form import Json, Unfaithful, rounded

# From the strongest to the weakest: what a number rests on. "computed" is strongest only where a formula has no
# reading beneath it (a count of parameters); else a computed number is as weak as the weakest it was computed from.
BASES = ("computed", "probed", "benchmarked", "declared", "datasheet", "assumed", "unknown")
OUTCOMES = ("granted", "fallback", "default")
RUNGS = ("bf16", "fp16", "fp32")
UNSEALED = ("seal", "runs")
_UNWALKED = (*UNSEALED, "counts")


def reading(
    value: Any,
    unit: str,
    basis: str,
    why: str,
    *,
    inputs: Iterable[str] = (),
    low: float | None = None,
    high: float | None = None,
    measurable: bool = False,
) -> dict[str, Json]:
    """A number (or a short text) with where it comes from.

    ``unit`` is "" for a pure number. ``inputs`` are JSON pointers into the same document and belong to basis
    "computed". ``weakest`` is set by `settle`.
    """
    if basis not in BASES:
        raise ValueError(f"basis {basis!r} is none of {', '.join(BASES)}")
    if (value is None) != (basis == "unknown"):
        raise ValueError(f"value {value!r} with basis {basis!r}: an unknown has the value None, and nothing else has")
    item: dict[str, Json] = {"value": rounded(value)}
    if low is not None and high is not None and value is not None:
        item |= {"low": rounded(low), "high": rounded(high)}
    item |= {"unit": unit, "basis": basis, "weakest": basis}
    pointers = list(dict.fromkeys(inputs))
    if pointers:
        item["inputs"] = pointers
    if measurable:
        item["measurable"] = True
    item["why"] = why
    return item


def unknown(unit: str, why: str, *, inputs: Iterable[str] = (), measurable: bool = False) -> dict[str, Json]:
    """A reading that could not be had; ``why`` says what could not be read."""
    return reading(None, unit, "unknown", why, inputs=inputs, measurable=measurable)


def decision(
    asked: Json,
    chosen: Json,
    outcome: str,
    why: str,
    *,
    inputs: Iterable[str] = (),
    rejected: Sequence[Mapping[str, Json]] = (),
) -> dict[str, Json]:
    """A choice: what was asked (None: nothing), what was chosen, and why.

    ``rejected`` rows hold ``option`` and ``why``, and where known ``saves_bytes`` and ``costs_seconds``.
    """
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome {outcome!r} is none of {', '.join(OUTCOMES)}")
    item: dict[str, Json] = {"asked": asked, "chosen": rounded(chosen), "outcome": outcome}
    pointers = list(dict.fromkeys(inputs))
    if pointers:
        item["inputs"] = pointers
    if rejected:
        item["rejected"] = rounded([dict(row) for row in rejected])
    item["why"] = why
    return item


def is_reading(item: Json) -> bool:
    return isinstance(item, dict) and isinstance(item.get("basis"), str)


def is_decision(item: Json) -> bool:
    return isinstance(item, dict) and "outcome" in item and "chosen" in item


def walk(document: Json, pointer: str = "") -> Iterator[tuple[str, dict[str, Json]]]:
    """Every (pointer, reading or decision) of ``document`` outside of ``counts``, ``seal`` and ``runs``."""
    if is_reading(document) or is_decision(document):
        yield pointer, document
        return
    entries: Iterable[tuple[Any, Json]] = ()
    if isinstance(document, dict):
        entries = document.items()
    elif isinstance(document, list):
        entries = enumerate(document)
    for key, value in entries:
        if not (pointer == "" and key in _UNWALKED):
            yield from walk(value, f"{pointer}/{escape(str(key))}")


def escape(key: str) -> str:
    """``key`` as a token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def resolve(document: Json, pointer: str) -> Json:
    """What ``pointer`` (RFC 6901) names in ``document``. Raises KeyError when it names nothing."""
    found = document
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(pointer) from None
    return found


def settle(document: dict[str, Json]) -> dict[str, Json]:
    """Set every reading's ``weakest`` in place, and give ``document`` back. Raises Unfaithful as `weakest_bases`."""
    for pointer, basis in weakest_bases(document).items():
        resolve(document, pointer)["weakest"] = basis
    return document


def weakest_bases(document: Json) -> dict[str, str]:
    """For each reading, by pointer, the weakest basis reached through ``inputs``, those of decisions included.

    Computed from the bases alone, never from a stored ``weakest``, so it also judges a stored one.

    Raises:
        Unfaithful: an input that names nothing, or a circle of inputs.
    """
    found: dict[str, str] = {}
    return {pointer: _weakest(document, pointer, (), found) for pointer, item in walk(document) if is_reading(item)}


def _weakest(document: Json, pointer: str, above: tuple[str, ...], found: dict[str, str]) -> str:
    if pointer in above:
        raise Unfaithful(f"{pointer}: is computed from itself: {' <- '.join((*above, pointer))}")
    if pointer not in found:
        try:
            item = resolve(document, pointer)
        except KeyError:
            raise Unfaithful(f"{above[-1] if above else pointer}: its input {pointer} names nothing") from None
        # A plain value (of the request, a digest) is given, not measured: it weakens nothing.
        bases = [BASES[0]] + ([item["basis"]] if is_reading(item) else [])
        inputs = item.get("inputs", ()) if isinstance(item, dict) else ()
        bases += [_weakest(document, source, (*above, pointer), found) for source in inputs]
        found[pointer] = max(bases, key=BASES.index)
    return found[pointer]


def tally(document: Json) -> dict[str, Json]:
    """Counts of what ``document`` holds: readings by basis and by weakest basis, decisions by outcome, measurable
    readings and, where there are ranks, how many run which dtype and could run which."""
    items = [item for _, item in walk(document)]
    readings = [item for item in items if is_reading(item)]
    outcomes = [item["outcome"] for item in items if is_decision(item)]
    counts: dict[str, Json] = {
        "readings": len(readings),
        "basis": {basis: sum(item["basis"] == basis for item in readings) for basis in BASES},
        "weakest": {basis: sum(item["weakest"] == basis for item in readings) for basis in BASES},
        "decisions": {outcome: outcomes.count(outcome) for outcome in OUTCOMES},
        "fallbacks": outcomes.count("fallback"),
        "measurable": sum(item.get("measurable", False) for item in readings),
    }
    ranks = document.get("ranks") if isinstance(document, dict) else None
    if ranks is not None:
        counts["dtype"] = {
            rung: sum(len(rank["members"]) for rank in ranks if rank["dtype"]["chosen"] == rung) for rung in RUNGS
        }
        counts["capability"] = {
            rung: sum(len(rank["members"]) for rank in ranks if rank["capability"][rung]["value"]) for rung in RUNGS
        }
    return counts
