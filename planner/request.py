"""What was asked: each option's text as a JSON value, and the request document they make together.

Each parser takes the text of one option and gives its normalised value, or raises Usage with the words a person needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from planner.machine import cards
from schemas.form import Json

DTYPES = ("auto", "bf16", "fp16", "fp32")
LARGEST_SEED = 2**32 - 1
LARGEST_COUNT = 2**53 - 1  # beyond it a JSON number is not exact
MOST_RANKS = 4096
LARGEST_WEIGHT = 10**6
MOST_SET_KEYS = 256
PLAIN = (
    *("model", "batch", "seq", "steps", "seed", "dtype", "capacity", "fit", "fit_policy", "mechanisms", "opt"),
    *("shard", "reduce"),
)
"""The request's keys that hold an option's parsed value as it is."""

_FIT_UNITS = {"": 10**9, "GB": 10**9, "GIB": 2**30}
_FIT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(GB|GiB|)", re.IGNORECASE)
_SHAPE = re.compile(r"([0-9]+)(?:x([0-9]+))?")
_KEY = re.compile(r"[a-z][a-z0-9_]*")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z_][A-Za-z0-9_.]*)?")


class Usage(Exception):
    """What was asked cannot be read. The message says what and what would be; the exit code is 2."""


def whole(text: str, least: int, most: int, what: str) -> int:
    """``text`` as a whole number of ``least`` to ``most``; ``what`` names it in the message."""
    if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) or len(text) > 20:
        raise Usage(f"{what} is {_shown(text)}: not a whole number")
    number = int(text)
    if number < least:
        raise Usage(f"{what} is {number}: the least is {least}")
    if number > most:
        raise Usage(f"{what} is {number}: the most is {most}")
    return number


def batch(text: str) -> int:
    return whole(text, 1, LARGEST_COUNT, "--batch")


def seq(text: str) -> int:
    return whole(text, 2, LARGEST_COUNT, "--seq")


def steps(text: str) -> int:
    return whole(text, 1, LARGEST_COUNT, "--steps")


def seed(text: str) -> int:
    return whole(text, 0, LARGEST_SEED, "--seed")


def model(text: str) -> str:
    """A workload's name, or ``module:attribute``."""
    if not _MODEL.fullmatch(text):
        raise Usage(f"--model is {_shown(text)}: neither a workload's name nor module:attribute")
    return text


def dtype(text: str) -> list[str]:
    """One dtype for every rank, or one a rank, of auto, bf16, fp16 and fp32."""
    return [_one_of(part, DTYPES, "--dtype") for part in _parts(text, "--dtype")]


def capacity(text: str) -> Json:
    """``auto``, ``equal``, or one [batch, length or None] a rank from ``B0,B1,...`` or ``B0xT0,...``."""
    if text in ("auto", "equal"):
        return text
    return [_shape(part) for part in _parts(text, "--capacity")]


def _shape(part: str) -> list[int | None]:
    found = _SHAPE.fullmatch(part)
    if not found:
        raise Usage(f"--capacity has {_shown(part)}: auto, equal, or one B or BxT a rank, as in 4,2 or 4x128,2x64")
    sequences = whole(found[1], 1, LARGEST_COUNT, "--capacity's batch")
    length = None if found[2] is None else whole(found[2], 2, LARGEST_COUNT, "--capacity's length")
    return [sequences, length]


def fit(text: str) -> Json:
    """``off``, ``auto``, or bytes, one for all ranks or one a rank: 16 is 16 x 10^9; 16GB and 16GiB are read too."""
    if text in ("off", "auto"):
        return text
    return [_budget(part) for part in _parts(text, "--fit")]


def _budget(part: str) -> int:
    found = _FIT.fullmatch(part)
    if part in ("off", "auto"):
        raise Usage(f"--fit has {part} beside other entries: off and auto stand alone, for all ranks")
    if not found:
        raise Usage(f"--fit has {_shown(part)}: off, auto, or a number of GB (10^9 bytes), as in 16, 7.5 or 16GiB")
    try:
        size = int(Decimal(found[1]) * _FIT_UNITS[found[2].upper()])
    except InvalidOperation:
        raise Usage(f"--fit has {_shown(part)}: too many digits") from None
    if not 0 < size <= LARGEST_COUNT:
        raise Usage(f"--fit has {_shown(part)}: that is {size} bytes; it is 1 byte to 2^53 - 1")
    return size


def mechanisms(text: str) -> list[str]:
    """Names of memory mechanisms, each once; which there are is the workload's."""
    names = _parts(text, "--mechanisms")
    strange = [name for name in names if not _KEY.fullmatch(name)]
    if strange:
        raise Usage(f"--mechanisms has {_shown(strange[0])}: not a mechanism's name, as in recompute or act_ckpt")
    if len(set(names)) < len(names):
        raise Usage("--mechanisms names one twice")
    return names


def setting(text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of the workload's own configuration; the value stays text, its meaning is the workload's."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key) or not value:
        raise Usage(f"--set has {_shown(text)}: KEY=VALUE, as in layers=6")
    if not _faithful(value):
        raise Usage(f"--set {key} has a value that is not text")
    return key, value


def settings(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Every ``--set``; a key given twice is refused, since one of the two would be dropped unseen."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise Usage(f"--set {key} is given twice ({found[key]} and {value})")
        found[key] = value
    if len(found) > MOST_SET_KEYS:
        raise Usage(f"--set is given {len(found)} times; the most is {MOST_SET_KEYS}")
    return found


def devices(text: str) -> Json:
    """What ``--devices`` names: "auto", "cpu:N", the list of paths of records, or cards of the catalogue.

    Cards come back as their one text, ``rtx-3090x4+gtx-1650``, whatever they were called.
    """
    if text == "auto":
        return text
    if text == "cpu":
        return "cpu:1"
    if text.startswith("cpu:"):
        return f"cpu:{whole(text[4:], 1, MOST_RANKS, 'the N of --devices cpu:N')}"
    parts = _parts(text, "--devices")
    strange = [part for part in parts if not part.endswith(".json")]
    if not strange:
        return parts
    if len(parts) > 1:
        raise Usage(
            f"--devices has {_shown(strange[0])} in a list: commas join records (RECORD.json), cards join with +"
        )
    return _cards(text)


def _cards(text: str) -> str:
    try:
        asked = cards.fleet(text)
    except cards.UnknownCard as error:
        raise Usage(f"--devices: {error} (or auto, cpu, cpu:N, RECORD.json[,RECORD.json...])") from None
    count = sum(number for _, number in asked)
    if count > MOST_RANKS:
        raise Usage(f"--devices asks for {count} cards; the most is {MOST_RANKS}")
    return cards.spec(asked)


def sources(text: str) -> Json:
    """The word stdlib, or the list of [path, weight] of ``PATH[:WEIGHT][,...]``."""
    if text == "stdlib":
        return text
    found = [_source(part) for part in _parts(text, "--data")]
    if any(path == "stdlib" for path, _ in found):
        raise Usage("--data has stdlib among others: it stands alone (a file of that name is ./stdlib)")
    return [list(pair) for pair in found]


def _source(part: str) -> tuple[str, int]:
    path, colon, tail = part.rpartition(":")
    if not colon or not re.fullmatch(r"[-+0-9.][0-9.eE+-]*|inf|nan", tail):
        return part, 1
    if not path:
        raise Usage(f"--data has {_shown(part)}: no path before the weight")
    return path, whole(tail, 1, LARGEST_WEIGHT, "a weight of --data")


def compose(
    asked: Mapping[str, Any], data: Sequence[Mapping[str, Json]], source: str, calibration: Sequence[Mapping[str, Json]]
) -> Json:
    """The request document: the normalised asked values, None where nothing was asked.

    Args:
        asked: each option's parsed value by its name.
        data: rows of name, weight, length in bytes and sha256.
        source: "auto", "cpu:N", cards of the catalogue or, where records were given, "record:" and the beginnings of
            their digests, not a path.
        calibration: what the measured plans teach, as rows (see planner.passes.calibration).
    """
    return {
        "devices": source,
        "set": settings(asked.get("set") or ()),
        "data": [dict(row) for row in data],
        "benchmark": bool(asked.get("benchmark")),
        "calibrate": list(calibration),
        **{name: asked.get(name) for name in PLAIN},
    }


def lengths(wanted: Mapping[str, Json]) -> list[int]:
    """Of the sequences that a request asks for; none where it leaves them to the workload."""
    rows = wanted["capacity"] if isinstance(wanted["capacity"], list) else [(0, None)]
    return [length or wanted["seq"] for _, length in rows if length or wanted["seq"]]


def _parts(text: str, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise Usage(f"{what} is {_shown(text)}: an entry is empty")
    if len(parts) > MOST_RANKS:
        raise Usage(f"{what} has {len(parts)} entries; the most is {MOST_RANKS}")
    if not _faithful(text):
        raise Usage(f"{what} is not text")
    return parts


def _one_of(text: str, known: Sequence[str], what: str) -> str:
    if text not in known:
        raise Usage(f"{what} has {_shown(text)}: one of {', '.join(known)}")
    return text


def _faithful(text: str) -> bool:
    """Whether ``text`` can stand in a JSON document (the bytes of an argument need not be UTF-8)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(text: str) -> str:
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return repr(clean if len(clean) <= 60 else clean[:57] + "...")
