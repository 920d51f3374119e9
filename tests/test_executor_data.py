"""Which bytes a slot reads: disjoint within an epoch, the same union for every split, a bijection, held-out apart."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import files
from executor.data import (
    BadData,
    Corpus,
    Reader,
    _round_keys,
    open_corpus,
    permute,
    schedule,
    stdlib_corpus,
)


def corpus(length: int, name: str = "made", seed: int = 0) -> Corpus:
    return Corpus(name, np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8))


def numbered(length: int) -> Corpus:
    """Bytes that tell their place: the low byte of it."""
    return Corpus("numbered", np.arange(length).astype(np.uint8))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    keys = _round_keys(seed, 0, epoch)
    assert sorted(permute(i, size, keys) for i in range(size)) == list(range(size))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_period_of_the_mixture_holds_each_source_as_often_as_it_weighs(weights: list[int]) -> None:
    order = schedule(weights)
    assert [order.count(i) for i in range(len(weights))] == weights


def test_an_order_is_not_the_identity_and_differs_by_seed_source_and_epoch() -> None:
    orders = {
        tuple(permute(i, 500, _round_keys(*key)) for i in range(500))
        for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(orders) == 4
    assert tuple(range(500)) not in orders


def test_a_window_is_read_by_one_rank_and_step_only_within_an_epoch() -> None:
    reader = Reader([(corpus(40_000), 1)], seed=3, stride=15)
    size = reader.corpora[0].windows(15)
    steps = size // 6
    seen = [reader.window(step * 6 + i) for step in range(steps) for i in range(6)]
    assert len(set(seen)) == len(seen)
    starts = sorted(start for _, start in seen)
    assert all(b - a >= 16 for a, b in pairwise(starts)), "two windows share a byte"
    assert starts[-1] + 16 <= reader.corpora[0].split, "a window reaches into the held-out part"


def test_every_window_is_read_once_an_epoch_and_again_in_the_next() -> None:
    reader = Reader([(corpus(5_000), 1)], seed=3, stride=15)
    size = reader.corpora[0].windows(15)
    first, second = [[reader.window(e * size + i) for i in range(size)] for e in range(2)]
    assert len(set(first)) == size
    assert set(first) == set(second)
    assert first != second


def test_two_ranks_at_4_and_2_read_what_one_process_at_6_reads() -> None:
    sources = [(corpus(40_000, "a"), 2), (corpus(30_000, "b", 1), 1)]
    one, two = Reader(sources, 7, 32), Reader(sources, 7, 32)
    for step in range(5):
        whole = one.batch(step, 6, 0, 6, 32)
        parts = [two.batch(step, 6, 0, 4, 32), two.batch(step, 6, 4, 2, 32)]
        for i in range(2):
            assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))
    # The fault to be caught: a rank that reads another offset.
    assert not torch.equal(whole[0][4:], two.batch(4, 6, 3, 2, 32)[0])


def test_a_shorter_sequence_is_the_prefix_of_the_same_window() -> None:
    reader = Reader([(corpus(40_000), 1)], 0, stride=64)
    long, short = reader.batch(2, 4, 0, 4, 64), reader.batch(2, 4, 0, 4, 24)
    assert torch.equal(long[0][:, :24], short[0])
    assert torch.equal(long[1][:, :24], short[1])


def test_targets_are_the_inputs_one_byte_on() -> None:
    inputs, targets = Reader([(numbered(20_000), 1)], 0, 32).batch(0, 3, 0, 3, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % 256)


def test_the_seed_changes_what_is_read_and_nothing_else_does() -> None:
    source = corpus(40_000)
    first, again, other = (Reader([(source, 1)], seed, 32).batch(9, 4, 1, 3, 32)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_mixture_reads_its_sources_in_exact_proportion() -> None:
    reader = Reader([(corpus(40_000, "a"), 3), (corpus(40_000, "b"), 1)], 0, 15)
    sources = [reader.window(slot)[0] for slot in range(400)]
    assert sources.count(0) == 300
    assert [reader.window(slot)[1] for slot in range(0, 400, 4)] != [
        reader.window(slot)[1] for slot in range(1, 400, 4)
    ]


def test_held_out_windows_are_the_last_twentieth_and_always_the_same() -> None:
    source = numbered(20_000)
    reader = Reader([(source, 1)], 0, 32)
    inputs, targets = reader.held_out(8, 32)
    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs, Reader([(source, 1)], 99, 32).held_out(8, 32)[0])
    places = [reader.corpora[0].split, 20_000 - 33]
    assert inputs[0, 0] == places[0] % 256
    assert inputs[-1, 0] == places[1] % 256


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little free memory that no file is held in it."""
    monkeypatch.setattr(files, "HELD_SHARE", 10**18)


def test_a_file_is_named_by_length_and_digest_and_read_alike_from_memory_and_disk(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(np.random.default_rng(0).bytes(40_000))
    held = open_corpus(path)
    request.getfixturevalue("no_memory")
    on_disk = open_corpus(path)
    assert isinstance(held.data, np.ndarray) and isinstance(on_disk.data, files.OnDisk)
    for found in (held, on_disk):
        assert found.digest == ("book.txt", 40_000, hashlib.sha256(path.read_bytes()).hexdigest())
        assert Reader([(found, 1)], 0, 16).digests() == [found.digest]
    readers = [Reader([(found, 1)], 0, 16) for found in (held, on_disk)]
    assert torch.equal(*(reader.batch(3, 8, 0, 8, 16)[0] for reader in readers))
    assert torch.equal(*(reader.held_out(8, 16)[1] for reader in readers))


CHANGES = {
    "cut": lambda path: os.truncate(path, 100),
    "grown": lambda path: path.open("ab").write(b"more"),
    "written over": lambda path: path.write_bytes(bytes(40_000)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_while_it_is_held_changes_nothing(tmp_path: Path, change: str) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"All work and no play " * 2000)
    found = open_corpus(path)
    CHANGES[change](path)
    assert found.digest == ("book.txt", 42_000, hashlib.sha256(b"All work and no play " * 2000).hexdigest())


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_while_it_is_read_from_disk_is_told(
    tmp_path: Path, change: str, no_memory: None
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"All work and no play " * 2000)
    os.utime(path, (1, 1))
    reader = Reader([(open_corpus(path), 1)], 0, 16)
    reader.batch(0, 4, 0, 4, 16)
    CHANGES[change](path)
    with pytest.raises(files.DataChanged, match=r"data-changed while running: .*book.txt: 42000 bytes at the start"):
        reader.batch(1, 4, 0, 4, 16)


def test_a_file_with_another_in_its_place_is_read_to_its_end(tmp_path: Path, no_memory: None) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"All work and no play " * 2000)
    found = open_corpus(path)
    path.unlink()
    path.write_bytes(bytes(10))
    assert bytes(found.data[42:57]) == b"All work and no"


def test_missing_empty_and_short_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 500)
    for name, message in (("none", "no such file"), ("empty", "the file is empty"), (".", "is not a file")):
        with pytest.raises(BadData, match=message):
            open_corpus(tmp_path / name)
    with pytest.raises(BadData, match=r"short: 500 bytes are too few for sequences of 128: .* at least 2580"):
        Reader([(open_corpus(tmp_path / "short"), 1)], 0, 128)
    Reader([(corpus(2580), 1)], 0, 128)
    with pytest.raises(BadData, match="weight 0 must be a positive whole number"):
        Reader([(corpus(40_000), 0)], 0, 128)


def test_stdlib_is_its_python_text_in_order_without_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "a/notes.txt", "a/__pycache__/z.py", "a-b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    assert bytes(stdlib_corpus(tmp_path).data) == b"<a-b.py><a/z.py><b.py>"
    real = stdlib_corpus()
    assert len(real.data) > 5_000_000
    assert real.digest == stdlib_corpus().digest
    with pytest.raises(BadData, match="no Python text"):
        stdlib_corpus(tmp_path / "a" / "none")


@pytest.mark.parametrize(("offset", "count", "seq"), [(5, 2, 32), (-1, 2, 32), (0, 0, 32), (0, 2, 33), (0, 2, 0)])
def test_slots_outside_the_global_batch_and_lengths_beyond_the_stride_are_errors(
    offset: int, count: int, seq: int
) -> None:
    with pytest.raises(ValueError, match=r"must be within|not within"):
        Reader([(corpus(40_000), 1)], 0, 32).batch(0, 6, offset, count, seq)
