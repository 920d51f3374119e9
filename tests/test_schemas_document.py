"""Readings, decisions, weakest bases, and the tally of them."""

from __future__ import annotations

import pytest

from schemas.document import BASES, decision, reading, resolve, settle, tally, unknown, walk
from schemas.form import Unfaithful


def _document(**items: dict) -> dict:
    return {"fleet": items}


def test_a_number_computed_from_an_assumption_is_an_assumption() -> None:
    document = settle(
        _document(
            probed=reading(1, "B", "probed", "w"),
            assumed=reading(2, "B", "assumed", "w"),
            strong=reading(3, "B", "computed", "w", inputs=["/fleet/probed"]),
            weak=reading(3, "B", "computed", "w", inputs=["/fleet/probed", "/fleet/assumed"]),
            far=reading(3, "B", "computed", "w", inputs=["/fleet/weak"]),
        )
    )
    weakest = {key: item["weakest"] for key, item in document["fleet"].items()}
    assert weakest == {
        "probed": "probed",
        "assumed": "assumed",
        "strong": "probed",
        "weak": "assumed",
        "far": "assumed",
    }


def test_weakness_passes_through_a_decision() -> None:
    document = _document(
        rate=unknown("B/s", "not timed"),
        batch=decision(None, 4, "default", "w", inputs=["/fleet/rate"]),
        tokens=reading(8, "", "computed", "w", inputs=["/fleet/batch"]),
    )
    assert settle(document)["fleet"]["tokens"]["weakest"] == "unknown"


def test_an_input_that_names_nothing_and_a_circle_are_refused() -> None:
    with pytest.raises(Unfaithful, match=r"/fleet/a: its input /fleet/b names nothing"):
        settle(_document(a=reading(1, "", "computed", "w", inputs=["/fleet/b"])))
    circle = _document(
        a=reading(1, "", "computed", "w", inputs=["/fleet/b"]), b=reading(1, "", "computed", "w", inputs=["/fleet/a"])
    )
    with pytest.raises(Unfaithful, match="is computed from itself: /fleet/a <- /fleet/b <- /fleet/a"):
        settle(circle)


def test_an_unknown_has_no_value_and_a_value_is_never_unknown() -> None:
    assert unknown("B", "the driver does not say")["value"] is None
    with pytest.raises(ValueError, match="an unknown has the value None"):
        reading(0, "B", "unknown", "w")
    with pytest.raises(ValueError, match="an unknown has the value None"):
        reading(None, "B", "probed", "w")


def test_the_tally_counts_each_reading_once_and_each_member_of_a_rank() -> None:
    able, unable = reading(True, "", "probed", "w"), reading(False, "", "probed", "w")
    rank = {
        "members": [0, 2, 3],
        "dtype": decision("auto", "fp32", "fallback", "w"),
        "capability": {"bf16": unable, "fp16": able, "fp32": able},
    }
    counts = tally({"ranks": [rank], "counts": {"basis": 7}, "seal": {}, "runs": [{"basis": "x"}]})
    assert counts["readings"] == 3 and counts["basis"]["probed"] == 3 and counts["fallbacks"] == 1
    assert counts["dtype"] == {"bf16": 0, "fp16": 0, "fp32": 3}
    assert counts["capability"] == {"bf16": 0, "fp16": 3, "fp32": 3}
    assert set(counts["basis"]) == set(BASES)


def test_pointers_reach_keys_with_slashes_and_tildes() -> None:
    item = reading(1, "", "probed", "w")
    document = {"a/b": {"c~d": item}, "list": [item]}
    assert dict(walk(document)) == {"/a~1b/c~0d": item, "/list/0": item}
    assert all(resolve(document, pointer) is item for pointer, _ in walk(document))
    with pytest.raises(KeyError):
        resolve(document, "/list/1")
