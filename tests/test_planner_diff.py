"""diff: predicted against measured, what --fail-over does not allow, and which input caused a change."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import handmade
from planner import diff, diff_render
from planner.page import Page
from planner.request import Usage
from schemas.document import resolve, unknown
from schemas.seal import seal

COMPUTE, TOTAL, PEAK = "/ranks/0/step/compute", "/ranks/0/step/total", "/ranks/0/memory/peak"


def _measured(**values: Any) -> dict[str, Any]:
    """A run of the handmade plan (compute 0.08 s, 0.04 to 0.16) that measured every measurable reading as predicted."""
    plan = handmade.plan()
    lines = {f"{pointer} @{rank}": resolve(plan, pointer)["value"] for pointer in _RANKED for rank in (0, 1)}
    lines |= {"/step/seconds": resolve(plan, "/step/seconds")["value"]}
    return handmade.run(plan, {**lines, **values})


_RANKED = (COMPUTE, "/ranks/0/step/exchange", TOTAL, PEAK)


def _row(document: Any, pointer: str, rank: int | None = None) -> Any:
    (row,) = (row for row in document["rows"] if (row["pointer"], row["rank"]) == (pointer, rank))
    return row


def _text(document: Any) -> str:
    stream = io.StringIO()
    diff_render.as_text(document, Page(stream))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("value", "verdict", "error"),
    [
        (0.08, "inside", 0.0),
        (0.1, "inside", 25.0),
        (0.04, "inside", -50.0),
        (0.17, "outside", 112.5),
        (0.0, "outside", -100.0),
    ],
)
def test_a_measured_number_is_inside_or_outside_of_what_was_predicted(value: float, verdict: str, error: float) -> None:
    row = _row(diff.measured(_measured(**{f"{COMPUTE} @1": value})), COMPUTE, 1)
    assert (row["verdict"], row["error"]) == (verdict, pytest.approx(error))
    assert (row["predicted"], row["low"], row["high"], row["weakest"]) == (0.08, 0.04, 0.16, "assumed")


def test_a_number_without_a_range_is_equal_or_has_no_range() -> None:
    pointer = "/ranks/0/step/exchange"
    document = diff.measured(_measured(**{f"{pointer} @1": 0.008}))
    assert [_row(document, pointer, rank)["verdict"] for rank in (0, 1)] == ["equal", "no range"]


def test_a_word_compares_equal_or_differs_and_a_difference_is_over_every_limit() -> None:
    run = _measured(**{"/ranks/0/dtype @0": "fp32", "/ranks/0/dtype @1": "bf16"})
    document = diff.measured(run, limits=[(None, 1e9)])
    assert [_row(document, "/ranks/0/dtype", rank)["verdict"] for rank in (0, 1)] == ["equal", "differs"]
    assert [(row["pointer"], row["rank"]) for row in document["failures"]] == [("/ranks/0/dtype", 1)]


def test_a_prediction_of_zero_has_no_percentage_but_fails_where_something_was_measured() -> None:
    body = handmade.body()
    body["ranks"][0]["step"]["exchange"]["value"] = 0
    pointer = "/ranks/0/step/exchange"
    run = handmade.run(seal(body), {f"{pointer} @0": 0, f"{pointer} @1": 0.1})
    document = diff.measured(run, limits=[("step", 50.0)])
    assert [_row(document, pointer, rank)["error"] for rank in (0, 1)] == [0.0, None]
    assert (pointer, 1) in [(row["pointer"], row["rank"]) for row in document["failures"]]


def test_what_could_be_measured_and_was_not_is_listed_by_rank_with_the_runs_reason() -> None:
    run = handmade.run(handmade.plan(), {f"{COMPUTE} @0": 0.08}, {f"{PEAK} @0": "a CPU has no allocator peak"})
    absent = {(row["pointer"], row["rank"]): row["reason"] for row in diff.measured(run)["absent"]}
    assert absent[(PEAK, 0)] == "a CPU has no allocator peak"
    assert absent[(COMPUTE, 1)] == absent[("/step/seconds", None)] == "the run gives no reason"
    assert (COMPUTE, 0) not in absent
    assert len(absent) == 4 * 2 - 1 + 1


def test_fail_over_allows_up_to_the_limit_and_a_kinds_own_limit_wins() -> None:
    run = _measured(**{f"{COMPUTE} @0": 0.1, f"{PEAK} @0": 2**30 * 1.25})
    failing = {
        name: [row["pointer"] for row in diff.measured(run, limits=limits)["failures"]]
        for name, limits in {
            "none": [],
            "enough": [(None, 25.0)],
            "all": [(None, 24.0)],
            "step": [("step", 10.0)],
            "step is free": [(None, 10.0), ("step", 30.0)],
            "other": [("exchange", 0.0)],
        }.items()
    }
    assert failing == {
        "none": [], "enough": [], "all": [COMPUTE, PEAK], "step": [COMPUTE], "step is free": [PEAK], "other": [],
    }  # fmt: skip


def test_fail_over_fails_on_what_was_not_measured_of_that_kind() -> None:
    run = handmade.run(handmade.plan(), {"/step/seconds": 0.094}, {f"{PEAK} @0": "no allocator"})
    failures = diff.measured(run, limits=[("memory", 1000.0)])["failures"]
    assert [(row["pointer"], row["rank"]) for row in failures] == [(PEAK, 0), (PEAK, 1)]
    assert failures[0]["why"] == "was not measured: no allocator"


@pytest.mark.parametrize(
    ("pointer", "kind"),
    [
        ("/ranks/0/memory/peak", "memory"), ("/ranks/12/step/total", "step"), ("/step/seconds", "step"),
        ("/exchange/payload", "exchange"), ("/ranks/0/step/tokens_per_second", "tokens"),
        ("/step/tokens_per_second", "tokens"), ("/ranks/0/dtype", "dtype"), ("/fit/process_bytes", "fit"),
    ],
)  # fmt: skip
def test_the_kind_of_a_quantity_is_the_part_of_the_plan_it_stands_in(pointer: str, kind: str) -> None:
    assert diff.kind(pointer) == kind


def test_a_plan_without_runs_says_so_and_fails_only_where_a_limit_was_set() -> None:
    plan = handmade.plan()
    assert diff.measured(plan)["failures"] == []
    assert len(diff.measured(plan, limits=[(None, 5.0)])["failures"]) == 1
    assert "not run yet" in _text(diff.measured(plan))


def test_the_newest_run_is_compared_unless_another_is_named() -> None:
    plan = handmade.run(_measured(), {"/step/seconds": 0.2})
    assert _row(diff.measured(plan), "/step/seconds")["value"] == 0.2
    assert _row(diff.measured(plan, 0), "/step/seconds")["value"] == 0.094
    with pytest.raises(Usage, match="the plan has 2 runs"):
        diff.measured(plan, 2)


# --- two plans ---


def test_a_change_names_the_changed_leaves_it_was_computed_from_and_they_come_first() -> None:
    old, new = handmade.plan(rate=50e9, batch=4), handmade.plan(rate=25e9, batch=8)
    changes = diff.changed(old, new)["changes"]
    rate, batch = "/fleet/devices/cpu-0/rate_fp32", "/request/batch"
    causes = {row["pointer"]: row["causes"] for row in changes}
    assert causes[rate] == causes[batch] == []
    assert causes["/step/seconds"] == sorted([rate, batch])
    assert causes["/ranks/0/memory/activations"] == [batch]
    assert [row["pointer"] for row in changes[:2]] == [batch, rate]
    assert all(row["causes"] for row in changes[2:])


def test_a_change_that_does_not_come_through_is_no_cause() -> None:
    """Only the rate changed: the batch decision and what rests on it alone are not listed."""
    pointers = [row["pointer"] for row in diff.changed(handmade.plan(), handmade.plan(rate=60e9))["changes"]]
    assert "/ranks/0/memory/activations" not in pointers
    assert "/ranks/0/batch" not in pointers
    assert "/step/seconds" in pointers


def test_the_same_plan_has_no_change_and_other_wording_is_said_to_be_only_that() -> None:
    plan, body = handmade.plan(), handmade.body()
    assert diff.changed(plan, plan)["changes"] == []
    assert "the same plan twice" in _text(diff.changed(plan, plan))
    body["toolchain"]["torch"]["why"] = "other words"
    assert "only the wording" in _text(diff.changed(plan, seal(body)))


def test_what_only_one_plan_holds_is_added_or_removed_as_a_whole() -> None:
    body = handmade.body()
    second = json.loads(json.dumps(body["ranks"][0]))
    body["ranks"] = [
        {**body["ranks"][0], "members": [0], "devices": ["cpu-0"]},
        {**second, "members": [1], "devices": ["cpu-1"]},
    ]
    forth = diff.changed(handmade.plan(), seal(body))["changes"]
    assert ("/ranks/1", "added") in [(row["pointer"], row["change"]) for row in forth]
    assert [row["new"] for row in forth if row["pointer"] == "/ranks/0/members"] == [[0]]
    back = diff.changed(seal(body), handmade.plan())["changes"]
    assert ("/ranks/1", "removed") in [(row["pointer"], row["change"]) for row in back]


def test_inputs_that_run_in_a_circle_across_two_plans_end() -> None:
    """Each plan is free of circles; a rests on b in the old one and b on a in the new one."""
    old, new = handmade.body(), handmade.body()
    a, b = "/step/global_batch", "/step/global_tokens"
    for body, target, source, value in ((old, a, b, 1), (new, b, a, 2)):
        body["step"][target.split("/")[2]]["inputs"] = [source]
        for pointer in (a, b):
            body["step"][pointer.split("/")[2]]["value"] = value
    changes = diff.changed(seal(old), seal(new))["changes"]
    assert {a, b} <= {row["pointer"] for row in changes}


# --- forms ---


@pytest.mark.parametrize("document", [diff.measured(_measured(), limits=[(None, 0.0)]), diff.measured(handmade.plan()),
                                      diff.changed(handmade.plan(), handmade.plan(batch=8))],
                         ids=["measured", "not run", "changed"])  # fmt: skip
def test_every_form_tells_the_same_rows(document: Any) -> None:
    assert json.loads(diff_render.as_json(document)) == document
    markdown, text = diff_render.as_markdown(document), _text(document)
    for row in [*document.get("rows", []), *document.get("changes", []), *document.get("absent", [])]:
        assert row["pointer"] in markdown
        assert row["pointer"] in text


def test_markdown_cells_keep_their_bars() -> None:
    plan = handmade.run(handmade.plan(), {"/ranks/0/dtype @0": "a|b"})
    row = next(line for line in diff_render.as_markdown(diff.measured(plan)).splitlines() if "a\\|b" in line)
    assert row.replace("\\|", "").count("|") == 10


def test_what_was_not_predicted_is_no_miss_to_be_read_but_fails_a_gate() -> None:
    made = handmade.body()
    made["step"]["seconds"] = unknown("s", "no rate is known", measurable=True)
    ran = handmade.run(seal(made), {"/step/seconds": 0.25})
    document = diff.measured(ran, limits=[(None, 1000.0)])
    row = next(row for row in document["rows"] if row["pointer"] == "/step/seconds")
    assert row["verdict"] == "not predicted" and row["error"] is None
    assert {"pointer": "/step/seconds", "rank": None, "why": "was not predicted; 1000 % is allowed"} in document[
        "failures"
    ]
