"""diff: predicted against measured, what --fail-over does not allow, and which input caused a change."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import handmade
from planner.request import Usage
from planner.views import changes, diff, diff_render
from planner.views.page import Page
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
    run = _measured(**{f"{COMPUTE} @0": 0.1, f"{PEAK} @0": 2**30 * 5 // 4})
    failing = {
        name: [row["pointer"] for row in diff.measured(run, limits=limits)["failures"]]
        for name, limits in {
            "none": [],
            "enough": [(None, 25.0)],
            "all": [(None, 24.0)],
            "step": [("step", 10.0)],
            "step is free": [(None, 10.0), ("step", 30.0)],
            "other": [("memory", 30.0)],
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
    assert _row(diff.measured(plan, 1), "/step/seconds")["value"] == 0.094
    with pytest.raises(Usage, match="the plan has 2 runs"):
        diff.measured(plan, 3)


# --- forms ---


@pytest.mark.parametrize("document", [diff.measured(_measured(), limits=[(None, 0.0)]), diff.measured(handmade.plan()),
                                      changes.changed(handmade.plan(), handmade.plan(batch=8))],
                         ids=["measured", "not run", "changed"])  # fmt: skip
def test_every_form_tells_the_same_rows(document: Any) -> None:
    assert json.loads(diff_render.as_json(document)) == document
    markdown, text = diff_render.as_markdown(document), _text(document)
    for row in [*document.get("rows", []), *document.get("changes", []), *document.get("absent", [])]:
        assert row["pointer"] in markdown
        assert row["pointer"] in text


def _terminal(document: Any, width: int) -> str:
    stream = io.StringIO()
    diff_render.as_text(document, Page(stream, width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 99, 120])
@pytest.mark.parametrize(
    "document",
    [diff.measured(_measured()), changes.changed(handmade.plan(), handmade.plan(batch=8))],
    ids=["measured", "changed"],
)
def test_no_terminal_is_so_narrow_that_a_pointer_breaks_and_nothing_is_left_out(document: Any, width: int) -> None:
    text = _terminal(document, width)
    for row in [*document.get("rows", []), *document.get("changes", [])]:
        assert row["pointer"] in text
        assert row.get("instrument", "") in text
    for line in text.splitlines():
        assert len(line.rstrip()) <= width or " " not in line.strip()


def test_a_narrow_terminal_shows_a_block_a_row_and_a_file_one_line() -> None:
    document = diff.measured(_measured())
    assert "\n  measured: 80 ms\n" in _terminal(document, 80)
    assert any(COMPUTE in line and "perf_counter" in line for line in _text(document).splitlines())


def test_the_spread_of_what_was_measured_stands_beside_it() -> None:
    plan = handmade.run(handmade.plan(), {"/step/seconds": 0.094}, spread=[0.09, 0.1021])
    document = diff.measured(plan)
    assert _row(document, "/step/seconds")["spread"] == [0.09, 0.1021]
    assert "90 .. 102 ms" in _text(document)
    assert "10 .. 90 %" in diff_render.as_markdown(document)


@pytest.mark.parametrize(
    ("outcome", "reason", "words"),
    [
        ("stopped", "SIGINT after 60 steps", "stopped (SIGINT after 60 steps)."),
        ("finished", None, "finished after 60 steps."),
        ("failed", "disk is full", "failed (disk is full) after 60 steps."),
    ],
)
def test_how_far_a_run_came_is_said_once(outcome: str, reason: str | None, words: str) -> None:
    document = diff.measured(_measured())
    document["run"] |= {"outcome": outcome, "reason": reason}
    assert diff_render.heading(document).endswith(words)


def test_markdown_cells_keep_their_bars() -> None:
    plan = handmade.run(handmade.plan(), {"/ranks/0/dtype @0": "a|b"})
    row = next(line for line in diff_render.as_markdown(diff.measured(plan)).splitlines() if "a\\|b" in line)
    assert row.replace("\\|", "").count("|") == 11


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
