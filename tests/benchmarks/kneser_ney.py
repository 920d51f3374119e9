"""What counting alone reaches on a corpus: ``python tests/benchmarks/kneser_ney.py [--data PATH] [--order 5]``.

Modified Kneser-Ney over bytes, interpolated (Chen and Goodman 1998, section 3; formulas as in Heafield et al. 2013):

    p_n(w | h) = max(0, a(hw) - D(a(hw))) / a(h.) + gamma(h) p_{n-1}(w | h')       gamma(h) = sum_w D(a(hw)) / a(h.)

h' is h without its first byte, p_0 is 1/256, and a context never seen is passed over. At the highest order a counts
occurrences; below it a counts the distinct bytes that precede. D is one of three discounts, for a of 1, 2, and 3 or
more, each order's own, from how many n-grams have a of 1 to 4. Every distribution sums to 1 exactly, to round-off.

Trained on the training part of a corpus and scored on its last twentieth, as the executor's models are. A byte with
fewer bytes before it than the order asks for is scored by the model of that lower order, which counts occurrences.
What binds: sorting the corpus once an order; 12 MB took 4 s and 0.5 GB at order 5, 8 s and 0.7 GB at order 8.

Legend: N order, B windows, T length, w a byte, h the bytes before it, key the bytes of an n-gram as one integer.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Reals = NDArray[np.float64]

LARGEST_ORDER = 8  # the bytes of one key
FALLBACK = (0.5, 1.0, 1.5)
"""Discounts of an order whose counts are too few to tell (single bytes of a corpus), as KenLM has them."""


@dataclass(frozen=True)
class Table:
    """One order: its n-grams by key, ascending, and the contexts they share.

    ``kept`` is the discounted share of each n-gram, ``freed`` the gamma of each context.
    """

    order: int
    discounts: tuple[float, float, float]
    grams: Keys
    kept: Reals
    contexts: Keys
    freed: Reals

    def mixed(self, keys: Keys, lower: Reals) -> Reals:
        """p_n of the n-grams ``keys``, from p_{n-1} of them."""
        kept, _ = _looked_up(keys, self.grams, self.kept)
        freed, known = _looked_up(keys >> np.uint64(8), self.contexts, self.freed)
        return np.where(known, kept + freed * lower, lower)


def _looked_up(keys: Keys, among: Keys, values: Reals) -> tuple[Reals, NDArray[np.bool_]]:
    """(the value of each key, 0 where it is not ``among``; whether it is)."""
    places = np.searchsorted(among, keys).clip(max=len(among) - 1)
    known = among[places] == keys
    return np.where(known, values[places], 0.0), known


def _table(order: int, grams: Keys, counts: NDArray[np.int64]) -> Table:
    """The table of ascending ``grams`` that ``counts`` are adjusted counts of."""
    discounts = _discounts(counts)
    taken = np.array((0.0, *discounts))[counts.clip(max=3)]
    contexts, starts = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, starts).astype(np.float64)
    sizes = np.diff(starts, append=len(grams))
    kept = (counts - taken) / np.repeat(totals, sizes)
    return Table(order, discounts, grams, kept, contexts, np.add.reduceat(taken, starts) / totals)


def _discounts(counts: NDArray[np.int64]) -> tuple[float, float, float]:
    """D1, D2, D3+ by Chen and Goodman's estimate; `FALLBACK` where it is not within 0 and the count."""
    n1, n2, n3, n4 = (int(found) for found in np.bincount(counts.clip(max=5), minlength=6)[1:5])
    if not (n1 and n2 and n3):
        return FALLBACK
    share = n1 / (n1 + 2 * n2)
    found = (1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3)
    return found if all(0 <= each <= most for each, most in zip(found, (1, 2, 3), strict=True)) else FALLBACK


def keys_of(text: Bytes, order: int) -> Keys:
    """The key of each n-gram of ``text`` [..., T]: [..., T - order + 1]."""
    count = text.shape[-1] - order + 1
    keys = np.zeros((*text.shape[:-1], max(0, count)), dtype=np.uint64)
    for place in range(order if count > 0 else 0):
        keys = keys << np.uint64(8) | text[..., place : place + count]
    return keys


class KneserNey:
    """A model of bytes of order N (contexts of N - 1 bytes), trained on ``text``."""

    def __init__(self, text: Bytes, order: int = 5) -> None:
        if not 1 <= order <= LARGEST_ORDER:
            raise ValueError(f"order {order} must be within 1 and {LARGEST_ORDER}")
        if len(text) < order:
            raise ValueError(f"{len(text)} bytes hold no n-gram of order {order}")
        self.order = order
        self.occurring: list[Table] = []
        """Each order's table of occurrences: what is highest for a byte with so many before it."""
        self.preceded: list[Table] = []
        """Each lower order's table of distinct preceding bytes."""
        for n in range(1, order + 1):
            grams, counts = np.unique(keys_of(text, n), return_counts=True)
            self.occurring.append(_table(n, grams, counts))
            if n > 1:
                suffixes, distinct = np.unique(grams & np.uint64(2 ** (8 * n - 8) - 1), return_counts=True)
                self.preceded.append(_table(n - 1, suffixes, distinct))

    def probability(self, grams: Bytes) -> Reals:
        """p of the last byte of each row of ``grams`` [B, n], n at most N, given the bytes before it: [B]."""
        n = grams.shape[-1]
        return self._probability(grams, n - 1, n, n)[:, 0]

    def _probability(self, windows: Bytes, start: int, stop: int, order: int) -> Reals:
        """p of the bytes at places ``start`` to ``stop`` of ``windows`` [B, T], each given the order - 1 before it."""
        found = np.full((len(windows), stop - start), 1 / 256)
        for table in (*self.preceded[: order - 1], self.occurring[order - 1]):
            found = table.mixed(keys_of(windows[:, start - table.order + 1 : stop], table.order), found)
        return found

    def bits(self, windows: Bytes, before: int = 1) -> Reals:
        """Bits that each byte of ``windows`` [B, before + T] takes, after the first ``before``, which are context
        alone: [B, T]. No byte sees past the start of its window."""
        length, most = windows.shape[-1], self.order - 1
        short = [self._probability(windows, place, place + 1, place + 1) for place in range(before, min(most, length))]
        start = max(before, most)
        full = [self._probability(windows, start, length, self.order)] if start < length else []
        return -np.log2(np.concatenate(short + full, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out bits per byte of modified Kneser-Ney over bytes.")
    parser.add_argument("--data", metavar="PATH", help="default: the running Python's standard library")
    parser.add_argument("--order", type=int, nargs="+", default=[5])
    asked: Any = parser.parse_args()
    from executor.data import open_corpus, stdlib_corpus

    corpus = open_corpus(asked.data) if asked.data else stdlib_corpus()
    text = corpus.data[:]
    print(f"{corpus.name}: {len(text)} bytes, SHA-256 {corpus.digest.sha256}")
    for order in asked.order:
        start = time.perf_counter()
        model = KneserNey(text[: corpus.split], order)
        trained = time.perf_counter()
        bits = model.bits(text[None, corpus.split - order + 1 :], before=order - 1).mean()
        spent = f"trained in {trained - start:.1f} s, scored in {time.perf_counter() - trained:.1f} s"
        print(f"order {order}: {bits:.4f} bits per byte over {len(text) - corpus.split} held-out bytes; {spent}")


if __name__ == "__main__":
    main()
