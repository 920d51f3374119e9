"""What the data is: name, length and SHA-256 of each source, and how much of it training takes. Where it lies is no
part of a plan.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter

from planner.request import Usage
from schemas.form import Json

_CHUNK = 2**20
HELD_OUT = 20
"""The last one part in this many of each source is held out of training."""
STDLIB: dict[str, Json] = {"name": "stdlib", "weight": 1, "length": None, "sha256": None}
"""The text of the running Python's standard library, which differs by Python: what it holds is bound at the run."""


def describe(sources: Json) -> list[dict[str, Json]]:
    """Rows of the request's ``data`` for what `planner.request.sources` gave; None is the standard library.

    Raises:
        Usage: a source that is no readable, non-empty regular file, or two of the same base name.
    """
    if sources is None or sources == "stdlib":
        return [dict(STDLIB)]
    names = [_name(path) for path, _ in sources]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise Usage(f"--data has two sources named {twice[0]}: a plan knows them by base name; rename or link one")
    rows = []
    for name, (path, weight) in zip(names, sources, strict=True):
        length, digest = measure(path)
        rows.append({"name": name, "weight": weight, "length": length, "sha256": digest})
    return rows


def measure(path: str) -> tuple[int, str]:
    """(length in bytes, SHA-256 in hex) of the regular file at ``path``, of the bytes that were read.

    Raises:
        Usage: it is not a regular file, is empty, or cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Usage(f"--data {path}: is not a regular file")
        digest, length = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                length += len(chunk)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise Usage(f"--data {path}: {getattr(error, 'strerror', None) or error}") from None
    if length == 0:
        raise Usage(f"--data {path}: is empty")
    return length, digest.hexdigest()


def first_held_out(length: int) -> int:
    """The place of the first held-out byte in a source of ``length`` bytes."""
    return length - length // HELD_OUT


def least_length(stride: int) -> int:
    """The fewest bytes of a source for sequences of ``stride``: its held-out part must hold one window of stride + 1
    bytes, and the rest of it then holds at least one too."""
    return (stride + 1) * HELD_OUT


def longest_stride(length: int) -> int:
    """The longest sequence that a source of ``length`` bytes serves; below 1 where it serves none."""
    return length // HELD_OUT - 1


def _name(path: str) -> str:
    name = os.path.basename(os.path.normpath(path))
    if name == "stdlib":
        raise Usage(f"--data {path}: a plan means the standard library by the name stdlib; rename or link the file")
    return name
