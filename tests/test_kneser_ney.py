"""The byte n-gram model that trained models are compared with: against a toy by hand and a slow one of dictionaries."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

from kneser_ney import FALLBACK, KneserNey, keys_of

from executor.data import stdlib_corpus


def text(length: int, seed: int = 0) -> np.ndarray:
    """Bytes of a Markov kind with a long tail: every count occurs often enough for discounts of its own."""
    random = np.random.default_rng(seed)
    found = np.zeros(length, dtype=np.uint8)
    for place in range(1, length):
        jump = random.geometric(0.4) - 1
        found[place] = (int(found[place - 1]) * 7 + min(jump * jump, 200)) % 251
    return found


def rows(words: list[bytes]) -> np.ndarray:
    return np.array([list(word) for word in words], dtype=np.uint8)


class Slow:
    """Modified Kneser-Ney by dictionaries, as the formulas read."""

    def __init__(self, data: bytes, order: int) -> None:
        self.occurring = [Counter(data[i : i + n] for i in range(len(data) - n + 1)) for n in range(1, order + 1)]
        self.preceded = [Counter(gram[1:] for gram in self.occurring[n]) for n in range(1, order)]

    def probability(self, gram: bytes) -> float:
        return self._mixed(gram, self.occurring[len(gram) - 1])

    def _mixed(self, gram: bytes, counts: Counter[bytes]) -> float:
        lower = self._mixed(gram[1:], self.preceded[len(gram) - 2]) if len(gram) > 1 else 1 / 256
        found = {bytes((w,)): counts[gram[:-1] + bytes((w,))] for w in range(256)}
        total = sum(found.values())
        if total == 0:
            return lower
        taken = self._discounts(counts)
        freed = sum(taken[min(count, 3)] for count in found.values())
        count = found[gram[-1:]]
        return (count - taken[min(count, 3)] + freed * lower) / total

    def _discounts(self, counts: Counter[bytes]) -> tuple[float, ...]:
        n = Counter(counts.values())
        if not (n[1] and n[2] and n[3]):
            return (0.0, *FALLBACK)
        y = n[1] / (n[1] + 2 * n[2])
        found = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
        return (0.0, *(found if all(0 <= d <= k for d, k in zip(found, (1, 2, 3), strict=True)) else FALLBACK))


def test_a_toy_has_the_probabilities_that_a_hand_finds() -> None:
    # "aab": pairs aa and ab, once each; a and b are each preceded by one byte. Too few to tell discounts: 1/2 of a 1.
    model = KneserNey(np.frombuffer(b"aab", dtype=np.uint8), 2)
    lower_seen, lower_unseen = 1 / 4 + 1 / 2 / 256, 1 / 2 / 256
    found = model.probability(rows([b"aa", b"ab", b"ac", b"ba", b"bc"]))
    wanted = [1 / 4 + lower_seen / 2, 1 / 4 + lower_seen / 2, lower_unseen / 2, lower_seen, lower_unseen]
    assert found == pytest.approx(wanted, rel=1e-14)
    # Without a byte before it occurrences count: a twice, b once; discounts 1 and 1/2 of 3 are freed.
    single = model.probability(rows([b"a", b"b", b"c"]))
    assert single == pytest.approx([1 / 3 + 0.5 / 256, 0.5 / 3 + 0.5 / 256, 0.5 / 256], rel=1e-14)


@pytest.mark.parametrize("order", [1, 3, 5])
def test_probabilities_are_those_of_the_formulas(order: int) -> None:
    data = np.concatenate((text(10_000), stdlib_corpus().data[:10_000]))
    model, slow = KneserNey(data, order), Slow(data.tobytes(), order)
    assert order == 1 or model.occurring[-1].discounts != FALLBACK
    random = np.random.default_rng(3)
    for length in range(1, order + 1):
        seen = data[random.integers(0, len(data) - length, 40)[:, None] + np.arange(length)]
        strange = random.integers(0, 256, (10, length)).astype(np.uint8)
        grams = np.concatenate((seen, strange))
        wanted = [slow.probability(gram.tobytes()) for gram in grams]
        assert model.probability(grams) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("length", range(1, 6))
def test_probabilities_of_all_bytes_sum_to_one(length: int) -> None:
    data = text(20_000)
    model, random = KneserNey(data, 5), np.random.default_rng(4)
    seen = data[random.integers(0, len(data) - length, 20)[:, None] + np.arange(length - 1)]
    strange = random.integers(0, 256, (20, length - 1)).astype(np.uint8)
    contexts = np.concatenate((seen, strange))
    grams = np.concatenate((np.repeat(contexts, 256, 0), np.tile(np.arange(256, dtype=np.uint8), 40)[:, None]), 1)
    found = model.probability(grams).reshape(40, 256)
    assert found.min() > 0
    assert np.abs(found.sum(1) - 1).max() < 1e-12


@pytest.mark.parametrize("before", [0, 1, 6])
def test_a_window_is_scored_byte_by_byte_and_sees_nothing_before_it(before: int) -> None:
    data = text(5_000)
    model = KneserNey(data[:4_000], 5)
    windows = np.stack((data[4_000:4_040], data[4_500:4_540]))
    wanted = [
        [-np.log2(model.probability(window[None, max(0, place - 4) : place + 1])[0]) for place in range(before, 40)]
        for window in windows
    ]
    assert model.bits(windows, before) == pytest.approx(np.array(wanted), rel=1e-12)


def test_keys_are_the_bytes_in_order_and_windows_shorter_than_an_n_gram_have_none() -> None:
    assert keys_of(np.array([1, 2, 255], dtype=np.uint8), 2).tolist() == [0x0102, 0x02FF]
    assert keys_of(np.array([255] * 8, dtype=np.uint8), 8).tolist() == [2**64 - 1]
    assert keys_of(np.array([1], dtype=np.uint8), 2).tolist() == []


def test_a_longer_context_predicts_real_text_better() -> None:
    data = stdlib_corpus().data[:400_000]
    bits = [KneserNey(data[:380_000], order).bits(data[None, 380_000:], 1).mean() for order in (1, 3, 5)]
    assert bits[0] > bits[1] + 1 > bits[2] + 1
    with pytest.raises(ValueError, match="order 9 must be within 1 and 8"):
        KneserNey(data, 9)
