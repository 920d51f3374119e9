"""A file too short for the planned length is refused while planning, by the arithmetic that the run reads by."""

from __future__ import annotations

from typing import Any

import pytest

from planner.data import first_held_out, least_length, longest_stride
from planner.passes.compile import compile_plan
from planner.refusals.rules import Refused
from worlds import account, record, request


def _source(length: int | None, name: str = "a.txt") -> dict[str, Any]:
    return {"name": name, "weight": 1, "length": length, "sha256": None if length is None else "ab" * 32}


def _refused(*sources: dict[str, Any], **asked: Any) -> str:
    with pytest.raises(Refused) as caught:
        compile_plan(request(data=list(sources), **asked), record(), account())
    assert {refusal.code for refusal in caught.value.refusals} == {"data-too-short"}
    return caught.value.text()


def test_a_file_one_byte_too_short_is_refused_with_its_length_the_least_and_the_longest_sequence() -> None:
    least = 129 * 20
    said = _refused(_source(least - 1), seq=128)
    for words in ("sequences of 128 bytes from a.txt", f"a.txt has {least - 1} bytes", f"the least is {least}"):
        assert words in said
    assert f"give --data a file of at least {least} bytes, or sequences of at most 127 (--seq 127)" in said
    compile_plan(request(data=[_source(least)], seq=128), record(), account())
    compile_plan(request(data=[_source(least - 1)], seq=127), record(), account())


def test_each_file_that_is_too_short_is_named_and_the_longest_rank_decides() -> None:
    said = _refused(_source(3000), _source(10, "b.txt"), _source(10**6, "c.txt"), capacity=[[4, 64], [2, 256]])
    assert "from a.txt" in said and "sequences of at most 149" in said
    assert "from b.txt" in said and said.count("--seq") == 1, "no sequence is short enough for ten bytes"
    assert "c.txt" not in said


def test_the_standard_library_whose_length_is_bound_at_the_start_is_not_judged() -> None:
    plan = compile_plan(request(data=[_source(None, "stdlib")], seq=128), record(), account())
    assert plan["workload"]["data"]["sources"][0]["length"]["value"] is None


def test_what_planning_takes_for_long_enough_the_run_can_read() -> None:
    import numpy as np

    from executor.data import BadData, Corpus, Reader

    for stride in (2, 33, 128):
        least = least_length(stride)
        corpus = Corpus("a", np.zeros(least, dtype=np.uint8))
        assert corpus.split == first_held_out(least)
        Reader([(corpus, 1)], 0, stride)
        with pytest.raises(BadData, match=f"at least {least} "):
            Reader([(Corpus("a", np.zeros(least - 1, dtype=np.uint8)), 1)], 0, stride)


@pytest.mark.parametrize("stride", [1, 2, 16, 128, 4095])
def test_the_least_length_holds_a_window_in_each_part_and_a_byte_less_does_not(stride: int) -> None:
    least = least_length(stride)
    split = first_held_out(least)
    assert least - split == stride + 1 and split >= stride + 1
    assert least - 1 - first_held_out(least - 1) == stride
    assert (longest_stride(least), longest_stride(least - 1)) == (stride, stride - 1)
