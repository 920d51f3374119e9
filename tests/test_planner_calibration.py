"""The loop closes: what a run measured is what the next plan predicts."""

from __future__ import annotations

from typing import Any

import pytest

from planner.passes.calibration import rows
from planner.passes.compile import compile_plan
from planner.passes.cost import ratio_at
from planner.refusals.rules import Refused
from schemas.document import reading
from schemas.form import Unfaithful
from schemas.seal import append_run, seal, verify
from schemas.validate import refuse_other_shape
from worlds import account, compiled, fleet, record, request, run_of


def _measured(plan: dict[str, Any], factor: float) -> dict[str, Any]:
    """``plan`` with a run in which every part of the step took ``factor`` times what was predicted."""
    run = run_of(plan)
    for place, entry in enumerate(plan["ranks"]):
        for part, item in entry["step"].items():
            for rank in entry["members"]:
                line = {"predicted": item["value"], "value": item["value"] * factor, "unit": "s"}
                line |= {end: item[end] for end in ("low", "high") if end in item}
                line["spread"] = [line["value"] * 0.9, line["value"] * 1.1]
                run["measured"][f"/ranks/{place}/step/{part} @{rank}"] = {
                    **line, "statistic": "median", "samples": 9, "instrument": "perf_counter"
                }  # fmt: skip
    item = plan["exchange"]["seconds"]
    run["measured"]["/exchange/seconds"] = {
        **{end: item[end] for end in ("low", "high")},
        "predicted": item["value"], "value": item["value"] * factor, "unit": "s", "statistic": "median", "samples": 9,
        "instrument": "perf_counter",
    }  # fmt: skip
    return append_run(plan, run)


def _next(plan: dict[str, Any], **asked: Any) -> dict[str, Any]:
    found = compile_plan(request(calibrate=rows(plan, "plan.json"), **asked), record(), account())
    refuse_other_shape(found, "plan")
    verify(found, "plan")
    return found


def test_the_same_plan_again_predicts_what_was_measured() -> None:
    before = compiled()
    after = _next(_measured(before, 2.0))
    for part in ("compute", "optimizer", "owners", "total"):
        old, new = (plan["ranks"][0]["step"][part] for plan in (before, after))
        assert new["value"] == pytest.approx(2 * old["value"], rel=1e-4), part
    assert after["step"]["seconds"]["value"] == pytest.approx(2 * before["step"]["seconds"]["value"], rel=1e-4)
    compute = after["ranks"][0]["step"]["compute"]
    assert compute["low"] == pytest.approx(0.9 * compute["value"], rel=1e-4)
    assert compute["weakest"] == "benchmarked" and compiled()["ranks"][0]["step"]["compute"]["weakest"] == "assumed"


def test_another_batch_is_scaled_by_the_work_between() -> None:
    after = _next(_measured(compiled(), 2.0), batch=16)
    assert after["ranks"][0]["step"]["compute"]["value"] == pytest.approx(
        2 * compiled(batch=16)["ranks"][0]["step"]["compute"]["value"], rel=1e-4
    )


def test_gains_are_reckoned_with_the_measured_ratios() -> None:
    before, after = compiled(), _next(_measured(compiled(), 2.0))
    assert after["step"]["best_alone_seconds"]["value"] == pytest.approx(
        2 * before["step"]["best_alone_seconds"]["value"], rel=1e-4
    )
    assert after["step"]["gain_over_best"]["value"] == pytest.approx(
        before["step"]["gain_over_best"]["value"], rel=1e-3
    )


@pytest.mark.parametrize(("asked", "unlike"), [({"dtype": ["bf16"]}, "dtype"), ({"seq": 64}, "seq")])
def test_a_run_that_says_nothing_of_this_plan_is_refused_and_not_ignored(asked: dict[str, Any], unlike: str) -> None:
    with pytest.raises(Refused) as caught:
        _next(_measured(compiled(), 2.0), **asked)
    assert "calibration-unlike" in caught.value.text() and f"unlike in {unlike}" in caught.value.text()


def test_a_card_of_unknown_rates_is_known_by_its_run() -> None:
    found = fleet(1e12)
    for device in found["devices"].values():
        del device["rate_bf16"], device["rate_fp32"]
    plan = compile_plan(request(), found, account())
    assert plan["step"]["seconds"]["value"] is None
    run = run_of(compiled(), measured={})
    for part in ("compute", "optimizer"):
        run["measured"][f"/ranks/0/step/{part} @0"] = {
            "predicted": None, "value": 0.25, "unit": "s", "statistic": "median", "samples": 9, "instrument": "x"
        }  # fmt: skip
    taught = rows(append_run(plan, run), "plan.json")
    after = compile_plan(request(calibrate=taught), found, account())
    assert after["step"]["seconds"]["value"] == pytest.approx(0.5)
    twice = compile_plan(request(calibrate=taught, batch=8), found, account())
    assert 0.35 < twice["ranks"][0]["step"]["compute"]["value"] < 0.55


def test_an_exchange_teaches_nothing_of_another_path() -> None:
    for name, taught in (("h200-pair", True), ("h200-pair-staged", False)):
        before = compile_plan(request(), record("h200-pair"), account())
        found = compile_plan(request(calibrate=rows(_measured(before, 2.0), "plan.json")), record(name), account())
        refuse_other_shape(found, "plan")
        assert ("all_reduce" in found["exchange"].get("calibration", {})) is taught


def test_a_run_on_a_part_of_a_card_does_not_speak_of_the_whole_card() -> None:
    found = fleet(1e14, 1e14)
    for device, left in zip(found["devices"].values(), (132, 33), strict=True):
        device["name"] = reading("Card", "", "probed", "NVML")
        device["multiprocessors"] = reading(left, "", "probed", "what MPS leaves")
    whole, part = (
        seal({**found, "devices": {key: {**device, "order": [0]}}}) for key, device in found["devices"].items()
    )
    taught = [
        row
        for record_, factor in ((whole, 2.0), (part, 8.0))
        for row in rows(_alone(compile_plan(request(), record_, account()), factor), "plan.json")
    ]
    plan = compile_plan(request(calibrate=taught, capacity="equal"), seal(found), account())
    ratios = [entry["calibration"]["compute"]["value"][0][1] for entry in plan["ranks"]]
    assert ratios == pytest.approx([2.0, 8.0], rel=1e-4)


def _alone(plan: dict[str, Any], factor: float) -> dict[str, Any]:
    """A plan of one rank with a run whose compute took ``factor`` times what was predicted."""
    item = plan["ranks"][0]["step"]["compute"]
    line = {"predicted": item["value"], "value": item["value"] * factor, "unit": "s", "statistic": "median"}
    line |= {end: item[end] for end in ("low", "high") if end in item} | {"samples": 9, "instrument": "cuda events"}
    return append_run(plan, {**run_of(compiled()), "measured": {"/ranks/0/step/compute @0": line}})


def test_a_plan_without_a_finished_run_teaches_nothing_and_says_so() -> None:
    plan = compiled()
    with pytest.raises(Unfaithful, match=r"plan\.json: has no finished run"):
        rows(plan, "plan.json")
    with pytest.raises(Unfaithful, match="has no finished run"):
        rows(append_run(plan, run_of(plan, outcome="failed", reason="rank 1: killed")), "plan.json")
    with pytest.raises(Unfaithful, match="measured no compute time"):
        rows(append_run(plan, run_of(plan, measured={})), "plan.json")


def test_the_ratio_runs_straight_between_measured_batches_and_level_outside() -> None:
    points = [[4, 1.0, 0.9, 1.1], [8, 2.0, 1.9, 2.2]]
    assert [ratio_at(points, batch) for batch in (1, 4, 5, 6, 8, 99)] == [1.0, 1.0, 1.25, 1.5, 2.0, 2.0]
    assert ratio_at(points, 6, 2) == pytest.approx(1.4) and ratio_at([], 6) == 1.0
