"""What differs between two plans: every change once, in texts that differ, with the inputs that caused it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import handmade
import worlds
from planner.machine import catalogue
from planner.passes.compile import compile_plan
from planner.views import diff_render
from planner.views.changes import changed
from planner.views.page import Page
from schemas.seal import seal


def _text(document: Any, width: int | None = None) -> str:
    stream = io.StringIO()
    diff_render.as_text(document, Page(stream, width))
    return stream.getvalue()


def test_a_change_names_the_changed_leaves_it_was_computed_from_and_they_come_first() -> None:
    old, new = handmade.plan(rate=50e9, batch=4), handmade.plan(rate=25e9, batch=8)
    changes = changed(old, new)["changes"]
    rate, batch = "/fleet/devices/cpu-0/rate_fp32", "/request/batch"
    causes = {row["pointer"]: row["causes"] for row in changes}
    assert causes[rate] == causes[batch] == []
    assert causes["/step/seconds"] == sorted([rate, batch])
    assert causes["/ranks/0/memory/activations"] == [batch]
    assert [row["pointer"] for row in changes[:2]] == [batch, rate]
    assert all(row["causes"] for row in changes[2:])


def test_a_change_that_does_not_come_through_is_no_cause() -> None:
    """Only the rate changed: the batch decision and what rests on it alone are not listed."""
    pointers = [row["pointer"] for row in changed(handmade.plan(), handmade.plan(rate=60e9))["changes"]]
    assert "/ranks/0/memory/activations" not in pointers
    assert "/ranks/0/batch" not in pointers
    assert "/step/seconds" in pointers


def test_the_same_plan_has_no_change_and_other_wording_is_said_to_be_only_that() -> None:
    plan, body = handmade.plan(), handmade.body()
    assert changed(plan, plan)["changes"] == []
    assert "the same plan twice" in _text(changed(plan, plan))
    body["toolchain"]["torch"]["why"] = "other words"
    assert "only the wording" in _text(changed(plan, seal(body)))


def test_what_only_one_plan_holds_is_added_or_removed_as_a_whole() -> None:
    body = handmade.body()
    second = json.loads(json.dumps(body["ranks"][0]))
    body["ranks"] = [
        {**body["ranks"][0], "members": [0], "devices": ["cpu-0"]},
        {**second, "members": [1], "devices": ["cpu-1"]},
    ]
    forth = changed(handmade.plan(), seal(body))["changes"]
    assert ("/ranks/1", "added") in [(row["pointer"], row["change"]) for row in forth]
    assert [row["new"] for row in forth if row["pointer"] == "/ranks/0/members"] == [[0]]
    back = changed(seal(body), handmade.plan())["changes"]
    assert ("/ranks/1", "removed") in [(row["pointer"], row["change"]) for row in back]


def test_inputs_that_run_in_a_circle_across_two_plans_end() -> None:
    """Each plan is free of circles; a rests on b in the old one and b on a in the new one."""
    old, new = handmade.body(), handmade.body()
    a, b = "/step/global_batch", "/step/global_tokens"
    for body, target, source, value in ((old, a, b, 1), (new, b, a, 2)):
        body["step"][target.split("/")[2]]["inputs"] = [source]
        for pointer in (a, b):
            body["step"][pointer.split("/")[2]]["value"] = value
    changes = changed(seal(old), seal(new))["changes"]
    assert {a, b} <= {row["pointer"] for row in changes}


# --- causes ---

RATE = "/fleet/devices/cpu-0/rate_fp32"


def _causes(old: Any, new: Any) -> dict[str, list[str]]:
    return {row["pointer"]: row["causes"] for row in changed(old, new)["changes"]}


CASES = worlds.cases("causes.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["pointer"] + " " + ", ".join(case["asked"]))
def test_what_was_asked_otherwise_is_named_as_the_cause(case: dict[str, Any]) -> None:
    causes = _causes(worlds.compiled(**case.get("before", {})), worlds.compiled(**case["asked"]))
    assert causes[case["pointer"]] == case["causes"]


def test_a_mechanism_asked_for_by_name_is_the_cause_of_all_that_it_changes() -> None:
    card = seal(catalogue.record_body("rtx-4090"))
    old, new = (
        compile_plan(worlds.request(mechanisms=asked), card, worlds.account("b1")) for asked in (None, ["engram_ram"])
    )
    causes = _causes(old, new)
    assert {"/ranks/0/mechanisms", "/ranks/0/memory/masters", "/ranks/0/demand/optimizer_bytes"} <= causes.keys()
    assert all(
        found == ["/request/mechanisms"] for pointer, found in causes.items() if pointer != "/request/mechanisms"
    )


def test_every_computed_change_of_a_real_plan_names_leaves_and_no_intermediate() -> None:
    old, new = worlds.compiled(batch=2), worlds.compiled(batch=4, seq=64, seed=3, reduce="bf16", dtype=["bf16"])
    causes = _causes(old, new)
    roots = {pointer for pointer, found in causes.items() if not found}
    assert roots == {f"/request/{name}" for name in ("batch", "seq", "seed", "reduce", "dtype")}
    assert {leaf for found in causes.values() for leaf in found} <= roots


def test_another_reading_of_the_record_is_a_leaf_and_another_card_is_what_was_asked() -> None:
    record = worlds.record()
    device = next(iter(record["devices"].values()))
    key = next(iter(record["devices"]))
    device["clock"]["value"] *= 2
    old = worlds.compiled()
    new = compile_plan(worlds.request(), seal(record), worlds.account())
    causes = _causes(old, new)
    assert causes[f"/fleet/devices/{key}/clock"] == []
    assert causes["/step/seconds"] == [f"/fleet/devices/{key}/clock"]
    body = handmade.body(rate=70e9, asked=handmade.request(batch=4, devices="gtx-1650"))
    body["fleet"]["devices"]["cpu-0"]["name"]["value"] = "Another"
    assert _causes(handmade.plan(), seal(body))[RATE] == ["/request/devices"]


def test_a_model_of_another_source_is_said_to_be_that() -> None:
    body = handmade.body()
    body["workload"]["digest"] = "ab" * 31 + "cd"
    document = changed(handmade.plan(), seal(body))
    assert _causes(handmade.plan(), seal(body)) == {"/workload/digest": []}
    assert "(another source of the model)" in _text(document)
    old, new = "ab" * 31 + "a", "ab" * 31 + "c"
    assert old in _text(document) and new in _text(document)


def test_a_choice_that_only_was_asked_for_is_no_cause_of_what_rests_on_it() -> None:
    """fp32 by itself, and fp32 as asked: the decision changed, and no number did."""
    causes = _causes(worlds.compiled(), worlds.compiled(dtype=["fp32"]))
    assert causes == {"/request/dtype": [], "/ranks/0/dtype": ["/request/dtype"]}


# --- texts ---


@pytest.mark.parametrize(
    ("old", "new", "unit", "texts"),
    [
        (2**30, 2**30 + 4 * 2**20, "B", ("1 GiB", "1.004 GiB")),
        (2**30, 2**30 + 1, "B", ("1,073,741,824 B", "1,073,741,825 B")),
        (1.54e9, 2e9, "FLOP", ("1.54 GFLOP", "2 GFLOP")),
        (0.01234, 0.012341, "s", ("12.34 ms", "12.341 ms")),
        (None, 3, "", ("unknown", "3")),
        ("ab" * 32, "cd" * 32, None, ("abababababab", "cdcdcdcdcdcd")),
        (list(range(9)), [*range(8), 9], None, ("[8] 8", "[8] 9")),
        ([0] * 9, [1] * 9, None, ("[0] 0, [1] 0, [2] 0, [3] 0, ... (9 of 9 differ)",
                                  "[0] 1, [1] 1, [2] 1, [3] 1, ... (9 of 9 differ)")),
    ],
)  # fmt: skip
def test_two_sides_of_a_change_are_never_told_alike(old: Any, new: Any, unit: Any, texts: tuple[str, str]) -> None:
    assert diff_render.apart(old, new, unit) == texts


def test_no_row_of_a_real_change_has_equal_sides_and_what_was_added_says_what() -> None:
    old = worlds.compiled()
    for asked in (
        {"dtype": ["fp32"]},
        {"opt": "adamw"},
        {"fit": [10**8]},
        {"set": {"width": "32"}},
        {"batch": 7, "seed": 1},
    ):
        for _, rows in diff_render.tables(changed(old, worlds.compiled(**asked))):
            for (_, how, before, after, caused), _ in rows:
                assert before != after
                assert caused
                assert how != "added" or after
                assert how != "removed" or before
    body = handmade.body()
    second = json.loads(json.dumps(body["ranks"][0])) | {"members": [2], "devices": ["cpu-2"]}
    body["ranks"].append(second)
    assert "rank 2 on cpu-2: fp32, 4 x 128" in _text(changed(handmade.plan(), seal(body)))


def test_a_budget_reads_as_it_was_asked_and_measured_plans_by_their_seals() -> None:
    row = {"seal": "12" * 32, "run": "r0"}
    body = handmade.body(asked=handmade.request(batch=4, fit=[50_000_000]))
    text = _text(changed(handmade.plan(), seal(body)))
    assert "not asked" in text and "0.05 GB" in text
    old = {**handmade.plan(), "request": {**handmade.request(batch=4), "calibrate": [row, row]}}
    (found,) = changed(handmade.plan(), old)["changes"]
    assert found["new"] == ["121212121212 (r0)"]
