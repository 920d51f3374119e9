"""Bytes to windows: which bytes a slot of the run reads is a function of (seed, slot) and nothing else.

Legend. A *slot* is one sequence of the whole run: slot = step x global batch + offset of the rank + i. A *window* is
seq + 1 bytes, inputs and the targets one byte on. The *stride* is the longest sequence of the fleet: windows lie
stride + 1 bytes apart, so no byte is in two of them, and a rank with a shorter sequence reads the prefix of its window.
The last twentieth of every corpus is held out. Within an epoch each training window is read once, in an order given by
a seeded bijection; no table of the order is kept, so a corpus may be of any size.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor.files import Bytes, OnDisk, read
from planner.data import first_held_out, least_length

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_MASK64 = 2**64 - 1


class BadData(Exception):
    """A corpus that cannot be read or is too short: one message that names it."""


class Digest(NamedTuple):
    """What a corpus is: its name, its length in bytes, the SHA-256 of its bytes."""

    name: str
    length: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """The bytes of one source. ``data`` is uint8 [length], in memory or on disk: what was read is what is named."""

    name: str
    data: Bytes | OnDisk

    @property
    def split(self) -> int:
        """The first held-out byte."""
        return first_held_out(len(self.data))

    @cached_property
    def digest(self) -> Digest:
        """Name, length and SHA-256, read in pieces."""
        sha = hashlib.sha256()
        for start in range(0, len(self.data), 2**24):
            sha.update(self.data[start : start + 2**24].tobytes())
        return Digest(self.name, len(self.data), sha.hexdigest())

    def windows(self, stride: int) -> int:
        """How many training windows of stride + 1 bytes lie apart from each other."""
        return self.split // (stride + 1)

    def require(self, stride: int) -> None:
        """Raise BadData unless one window fits each part."""
        least = least_length(stride)
        if len(self.data) < least:
            raise BadData(
                f"data {self.name}: {len(self.data)} bytes are too few for sequences of {stride}: the held-out part "
                f"must hold a window too, so at least {least} are needed; give more data or a smaller --seq"
            )


def open_corpus(path: Path | str, name: str | None = None) -> Corpus:
    """A file, read once into memory, or from disk where it is too large. Raises BadData where it is missing, unreadable
    or empty."""
    path = Path(path)
    try:
        if not path.is_file():
            raise BadData(f"data {path}: {'is not a file' if path.exists() else 'no such file'}")
        data = read(path)
    except OSError as error:
        raise BadData(f"data {path}: cannot be read: {error.strerror}") from error
    if len(data) == 0:
        raise BadData(f"data {path}: the file is empty")
    return Corpus(name or path.name, data)


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """The ``.py`` text of the running Python's standard library, joined in order of relative posix path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED]
        paths = (Path(folder, file) for file in files if file.endswith(".py"))
        found.extend((path.relative_to(root).as_posix(), path) for path in paths)
    text = b"".join(path.read_bytes() for _, path in sorted(found))
    if not text:
        raise BadData(f"data stdlib: no Python text under {root}; give --data PATH")
    return Corpus("stdlib", np.frombuffer(text, dtype=np.uint8))


@lru_cache(maxsize=64)
def _round_keys(seed: int, source: int, epoch: int) -> tuple[int, ...]:
    text = f"{seed}/{source}/{epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=32).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))


def _mix(x: int) -> int:
    """The finaliser of splitmix64: 64 bits to 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def permute(index: int, size: int, keys: Sequence[int]) -> int:
    """A bijection of range(size): a balanced Feistel network on the next even number of bits, walked until inside.

    Walking a permutation of a larger domain until it lands inside is itself a permutation of the smaller one; the
    domain is less than four times ``size``, so it takes under four walks on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for key in keys:
            left, right = right, left ^ (_mix((right + key) & _MASK64) & low)
        index = left << half | right
        if index < size:
            return index


def schedule(weights: Sequence[int]) -> list[int]:
    """One period of sources, as evenly mixed as can be: source i stands weights[i] times in sum(weights) places."""
    period = sum(weights)
    credit = [0] * len(weights)
    order = []
    for _ in range(period):
        credit = [c + w for c, w in zip(credit, weights, strict=True)]
        chosen = max(range(len(weights)), key=lambda i: (credit[i], -i))
        credit[chosen] -= period
        order.append(chosen)
    return order


class Reader:
    """Windows of a weighted mixture of corpora, by slot."""

    def __init__(self, sources: Sequence[tuple[Corpus, int]], seed: int, stride: int) -> None:
        """``sources``: corpora with positive whole weights. Raises BadData."""
        if not sources:
            raise BadData("no data: name at least one source")
        for corpus, weight in sources:
            if weight < 1:
                raise BadData(f"data {corpus.name}: weight {weight} must be a positive whole number")
            corpus.require(stride)
        self.corpora = [corpus for corpus, _ in sources]
        self.weights = [weight for _, weight in sources]
        self.seed, self.stride = seed, stride
        self._order = schedule(self.weights)
        self._before = [self._order[:i].count(source) for i, source in enumerate(self._order)]

    def window(self, slot: int) -> tuple[int, int]:
        """(source, first byte) of a slot: a function of (seed, slot) for given corpora and stride."""
        period, place = divmod(slot, len(self._order))
        source = self._order[place]
        read = period * self.weights[source] + self._before[place]  # windows of this source read before
        size = self.corpora[source].windows(self.stride)
        epoch, index = divmod(read, size)
        return source, permute(index, size, _round_keys(self.seed, source, epoch)) * (self.stride + 1)

    def batch(self, step: int, global_batch: int, offset: int, count: int, seq: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [count, seq] each, of the rank whose first slot in the step is ``offset``."""
        if not 1 <= seq <= self.stride:
            raise ValueError(f"seq {seq} must be within 1 and the stride {self.stride}")
        if offset < 0 or count < 1 or offset + count > global_batch:
            raise ValueError(f"slots {offset} to {offset + count} are not within the global batch of {global_batch}")
        first = step * global_batch + offset
        return self._read([self.window(slot) for slot in range(first, first + count)], seq)

    def held_out(self, windows: int, seq: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [windows, seq], of the held-out windows: the same bytes at every call and for every
        seed."""
        return self._read(self.held_out_places(windows, seq), seq)

    def held_out_places(self, windows: int, seq: int) -> list[tuple[int, int]]:
        """(source, first byte) of each held-out window: spread evenly over the held-out parts in the mixture's
        proportion."""
        wanted = [self._order[i % len(self._order)] for i in range(windows)]
        totals, seen = [wanted.count(i) for i in range(len(self.corpora))], [0] * len(self.corpora)
        places = []
        for source in wanted:
            corpus = self.corpora[source]
            room = len(corpus.data) - corpus.split - (seq + 1)
            if room < 0:
                raise BadData(f"data {corpus.name}: the held-out part holds no window of {seq + 1} bytes")
            places.append((source, corpus.split + room * seen[source] // max(1, totals[source] - 1)))
            seen[source] += 1
        return places

    def _read(self, places: Sequence[tuple[int, int]], seq: int) -> tuple[Tensor, Tensor]:
        rows = np.stack([self.corpora[source].data[start : start + seq + 1] for source, start in places])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def digests(self) -> list[Digest]:
        """Name, length and SHA-256 of each source, in order."""
        return [corpus.digest for corpus in self.corpora]
