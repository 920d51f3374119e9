"""Strict reading, and the one form on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.form import LARGEST_INTEGER, Unfaithful, parse, refuse_other_form, render, rounded, six

CASES = json.loads((Path(__file__).parent / "cases" / "bad_json.json").read_text(encoding="utf-8"))
FILLS = {"{5000 zeros}": "0" * 5000, "{5000000 brackets}": "[" * 5_000_000, "{40 brackets}": "[" * 40 + "]" * 40}

NUMBERS = st.integers(1 - 2**53, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"]))
KEYS = st.sampled_from(["value", "basis", "chosen", "seal", "zebra"]) | st.text(
    st.characters(exclude_categories=["Cs"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=25)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_is_not_strict_json_gets_one_message_that_says_what_and_where(case: dict) -> None:
    text = case.get("text", "")
    for mark, fill in FILLS.items():
        text = text.replace(mark, fill)
    data = bytes.fromhex(case["hex"]) if "hex" in case else text.encode("utf-8", "surrogatepass")
    with pytest.raises(Unfaithful) as caught:
        parse(data, "plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json: ") and case["says"] in message
    assert "\n" not in message and len(message) < 200


def test_what_is_wrong_is_told_in_one_line_whatever_the_document_holds() -> None:
    told = str(Unfaithful("plan.json: \x1b[31m\n\n" + "b" * 5000 + " is no name"))
    assert told.isprintable() and len(told) <= 1000
    assert told.startswith("plan.json: \\x1b[31m") and told.endswith("b is no name")


@given(VALUES)
def test_every_document_has_one_form_and_is_read_back_from_it(value: object) -> None:
    data = render(value)
    found = parse(data, "x")
    assert render(found) == data
    assert found == _six(value)
    refuse_other_form(data, found, "x")


def _six(value: object) -> object:
    if isinstance(value, float):
        return six(value)
    if isinstance(value, list):
        return [_six(item) for item in value]
    return {key: _six(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(VALUES.filter(lambda value: isinstance(value, dict | list) and len(value) > 0))
def test_the_same_content_in_another_form_is_found(value: object) -> None:
    other = json.dumps(parse(render(value), "x"), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    with pytest.raises(Unfaithful, match=r"x: line \d+"):
        refuse_other_form(other, parse(other, "x"), "x")


def test_a_reading_a_decision_and_a_measured_quantity_stand_on_one_line_each() -> None:
    reading = {"value": 1.5, "unit": "s", "basis": "probed", "weakest": "probed", "why": "w"}
    decision = {"asked": None, "chosen": [], "outcome": "default", "rejected": [{"option": 1, "why": "x"}], "why": "w"}
    measured = {"predicted": 1, "value": 2, "instrument": "clock"}
    lines = (
        render({"step": {"a": reading, "b": decision}, "runs": [{"measured": {"/a": measured}}]}).decode().split("\n")
    )
    assert sum('"basis"' in line and line.rstrip(",").endswith("}") for line in lines) == 1
    assert sum('"chosen"' in line and '"rejected"' in line for line in lines) == 1
    assert sum('"predicted"' in line and '"instrument"' in line for line in lines) == 1


def test_a_float_keeps_six_significant_digits() -> None:
    assert render([0.1 + 0.2, 8622000123.4, -0.0, 1e-7]) == b"[\n  0.3,\n  8622000000,\n  0,\n  1e-07\n]\n"


def test_an_integer_that_json_would_not_keep_is_kept_as_a_float_of_six_digits() -> None:
    kept = rounded({"bytes": [10**21 - 536_870_912, -(2**53)], "flag": True, "count": LARGEST_INTEGER})
    assert kept == {"bytes": [1e21, -9.0072e15], "flag": True, "count": LARGEST_INTEGER}
    assert all(isinstance(item, float) for item in kept["bytes"]) and kept["flag"] is True
