"""The one form of a document on disk: strict reading of JSON bytes, and the only rendering of it.

``render(parse(data)) == data`` holds for every faithful file, so a byte changed by hand is always found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Json = Any
"""A JSON value as ``json.loads`` gives it: dict, list, str, int, float, bool or None."""

LARGEST_INTEGER = 2**53 - 1  # above it a double, and so RFC 8785, does not tell all neighbours apart
DEEPEST_NESTING = 32

# Known keys stand in this order wherever they meet in one object; other keys (names of devices, configuration) follow
# sorted. It lists each artifact from the outside in, so that a file reads from identity to evidence.
# fmt: off
_ORDER = (
    "format", "format_version", "made_from", "request", "id", "start", "end", "reason", "toolchain", "nodes",
    "fleet", "workload", "ranks", "ids", "order", "node", "kind", "name", "uuid", "members", "devices", "links",
    "model", "set", "opt", "data", "weight", "length", "sha256", "threads", "capability", "served", "rates",
    "calibration", "dtype", "kernels", "tuned", "batch", "seq", "steps", "seed", "tokens", "token_weight", "mechanisms",
    "worth", "demand", "memory", "exchange", "fit", "step", "capacity", "fit_policy", "shard", "reduce", "benchmark",
    "calibrate", "config", "defaults", "granule", "parameters", "tensors", "units", "sources", "masters", "gradients",
    "muon_momentum", "adamw_state", "tables_state", "staging", "activations", "backend", "reduce_dtype",
    "bucket_bytes", "path", "forward_bytes", "forward_count", "backward_bytes", "backward_count", "gathered",
    "payload", "volume", "buckets", "update", "workspace", "model_buffers", "hosted", "pinned",
    "backward_peak", "optimizer_peak", "peak", "host", "limit",
    "global_batch", "global_tokens", "compute", "optimizer", "owners", "total", "rate", "latency",
    "forward_seconds", "seconds", "owners_payload", "owners_seconds", "tokens_per_second", "regime",
    "even_seconds", "best_alone_seconds",
    "gain_over_even", "gain_over_best", "verdict", "asked", "option", "chosen", "predicted", "value", "low",
    "high", "unit", "outcome", "basis", "weakest", "statistic", "samples", "spread", "instrument", "readings",
    "decisions", "fallbacks", "counts", "final_loss", "bits_per_byte", "evaluations", "fingerprint",
    "fingerprints_compared", "skipped_steps", "resumed", "conditions", "measured", "absent", "inputs", "measurable",
    "rejected", "saves_bytes", "costs_seconds", "why", "source", "previous", "digest", "seal", "locator", "runs",
)
# fmt: on
_PLACE = {key: place for place, key in enumerate(_ORDER)}
_LEAF_MARKS = ("basis", "chosen", "instrument")
_LONGEST = 1000  # characters of a message, which may name what a document holds
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]')


class Unfaithful(Exception):
    """A document that is not what it claims to be. The message, one line, says what is wrong and where; the exit code
    is 2."""

    def __init__(self, message: str) -> None:
        line = "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in message)
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 200]} ... {line[-150:]}")


def six(number: float) -> float:
    """``number`` rounded to the 6 significant digits that a document keeps; -0.0 becomes 0.0."""
    return float(f"{number:.6g}") + 0.0


def rounded(value: Json) -> Json:
    """``value`` with every float in it as a document keeps it, and as one every integer that JSON would not keep."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        value = float(value)
    return six(value) if isinstance(value, float) else value


def parse(data: bytes, name: str) -> Json:
    """Read JSON strictly; ``name`` is how messages call the document.

    Raises:
        Unfaithful: not UTF-8, empty, not JSON, a duplicate key, NaN or Infinity, a number beyond double precision or
            an integer of 2^53 or more, a lone surrogate, or nesting deeper than 32.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unfaithful(f"{name}: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise Unfaithful(f"{name}: is empty (was planning refused, and its message lost?)")
    _refuse_depth(text, name)
    try:
        document = json.loads(text, **_hooks(text, name))
    except json.JSONDecodeError as error:
        raise Unfaithful(f"{name}: line {error.lineno} column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise Unfaithful(f"{name}: {error}") from None
    _refuse_surrogates(document, text, name)
    return document


def _refuse_depth(text: str, name: str) -> None:
    depth = 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
        if depth > DEEPEST_NESTING:
            line = text.count("\n", 0, token.start()) + 1
            raise Unfaithful(f"{name}: line {line}: nested deeper than {DEEPEST_NESTING} levels")


def _refuse_surrogates(document: Json, text: str, name: str) -> None:
    if "\\u" not in text:
        return
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(error.object[error.start]):04x}"
        raise Unfaithful(f"{name}: {_line_of(text, lone)}: lone surrogate {lone}") from None


def _line_of(text: str, token: str) -> str:
    place = text.lower().find(token.lower())
    return "somewhere" if place < 0 else f"line {text.count(chr(10), 0, place) + 1}"


def _hooks(text: str, name: str) -> dict[str, Any]:
    def refuse(token: str, what: str) -> None:
        shown = token if len(token) <= 40 else token[:37] + "..."
        raise Unfaithful(f"{name}: {_line_of(text, token)}: {shown} {what}")

    def constant(token: str) -> None:
        refuse(token, "is not a JSON number")

    def real(token: str) -> float:
        number = float(token)
        if not math.isfinite(number):
            refuse(token, "is beyond double precision")
        return number

    def integer(token: str) -> int:
        if len(token) > 17 or abs(int(token)) > LARGEST_INTEGER:
            refuse(token, "is 2^53 or more: not exact as a JSON number")
        return int(token)

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for key, value in pairs:
            if key in found:
                refuse(json.dumps(key), "appears twice in one object")
            found[key] = value
        return found

    return {"parse_constant": constant, "parse_float": real, "parse_int": integer, "object_pairs_hook": unique}


def render(document: Json) -> bytes:
    """The only form of ``document`` on disk: UTF-8, two spaces a level, known keys in a fixed order and the rest
    sorted, floats with 6 significant digits and whole ones as integers, and each reading, decision and measured
    quantity on a line of its own."""
    return ("".join(_pieces(document, 0)) + "\n").encode("utf-8")


def inner_lines(block: Json, level: int) -> list[bytes]:
    """The lines between the braces of ``block`` as it stands ``level`` levels deep, without indent and last comma.

    The comma after a block's last line depends on what follows the block, so it is left to the check of the form."""
    lines = "".join(_pieces(block, level)).encode("utf-8").split(b"\n")[1:-1]
    return [line.strip().rstrip(b",") for line in lines]


def refuse_other_form(data: bytes, document: Json, name: str) -> None:
    """Raise Unfaithful, naming the first line that differs, unless ``data`` is the one form of ``document``."""
    expected = render(document)
    if data == expected:
        return
    found_lines, expected_lines = data.split(b"\n"), expected.split(b"\n")
    for number, (found, wanted) in enumerate(zip(found_lines, expected_lines, strict=False), start=1):
        if found != wanted:
            column = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(wanted)) + 1
            raise Unfaithful(f"{name}: line {number} column {column}: not in the form Dormouse writes")
    last = min(len(found_lines), len(expected_lines))
    raise Unfaithful(f"{name}: line {last}: lines were added or removed at the end")


def ordered(mapping: Mapping[str, Json]) -> list[str]:
    """The keys of ``mapping`` in the order a document keeps them."""
    return sorted(mapping, key=lambda key: (_PLACE.get(key, len(_PLACE)), key))


def _is_flat(value: Json) -> bool:
    """Whether ``value`` stands on one line: a scalar, a leaf such as a reading, or a container of scalars."""
    if isinstance(value, dict):
        return any(mark in value for mark in _LEAF_MARKS) or all(_is_plain(item) for item in value.values())
    return _is_plain(value)


def _is_plain(value: Json) -> bool:
    """A scalar, or a list of scalars or of lists of them."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, dict)


def _pieces(value: Json, level: int) -> Iterator[str]:
    if not value or not isinstance(value, dict | list) or (level >= 2 and _is_flat(value)):
        yield _inline(value)
        return
    indent = "  " * (level + 1)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    keys: list[Any] = ordered(value) if isinstance(value, dict) else list(range(len(value)))
    yield opening
    for place, key in enumerate(keys):
        yield ("\n" if place == 0 else ",\n") + indent
        if isinstance(value, dict):
            yield _string(key) + ": "
        yield from _pieces(value[key], level + 1)
    yield "\n" + "  " * level + closing


def _inline(value: Json) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_string(key)}: {_inline(value[key])}" for key in ordered(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, float):
        number = six(value)
        return str(int(number)) if number.is_integer() and abs(number) <= LARGEST_INTEGER else repr(number)
    return _string(value) if isinstance(value, str) else json.dumps(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
