"""What a machine's cards may run, by the specification's matrix, and what of a machine is refused."""

from __future__ import annotations

from typing import Any

import pytest

from planner.machine.wheels import WHEELS, holds, serving
from planner.passes.compile import compile_plan
from planner.passes.legality import kernel_veto, legal
from schemas.document import reading
from worlds import account, cases, machine, request

MATRIX = cases("matrix.json")


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row["generation"])
def test_the_matrix_of_the_specification_holds_row_by_row(row: dict[str, Any]) -> None:
    for feature in ("bf16", "fp16", "triton_moe", "fla_kda"):
        assert legal(feature, "cuda", row["sm"])[0] == row[feature], feature
    ladder = [rung for rung in ("bf16", "fp16", "fp32") if legal(rung, "cuda", row["sm"])[0]]
    assert ladder[0] == row["auto"]


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row["generation"])
def test_a_plan_runs_what_the_matrix_says_runs_and_counts_what_it_could(row: dict[str, Any]) -> None:
    plan = compile_plan(request(), machine({"sm": [row["sm"]], "device": {"name": row["example"]}}), account())
    dtype = plan["ranks"][0]["dtype"]
    assert dtype["chosen"] == row["runs"]
    assert dtype["outcome"] == ("fallback" if row["runs"] == "fp32" else "default")
    assert plan["counts"]["dtype"][row["runs"]] == 1
    assert plan["counts"]["capability"] == {"bf16": int(row["bf16"]), "fp16": int(row["fp16"]), "fp32": 1}
    assert f"bf16={int(row['bf16'])} fp16={int(row['fp16'])}" in dtype["why"] or row["bf16"]


def test_a_gtx_16xx_is_kept_from_half_precision_for_a_reason_of_its_own() -> None:
    found = machine({"sm": ["7.5"], "device": {"name": "NVIDIA GeForce GTX 1650"}})
    rejected = compile_plan(request(), found, account())["ranks"][0]["dtype"]["rejected"]
    assert "GTX 16xx" in next(row["why"] for row in rejected if row["option"] == "fp16")
    other = machine({"sm": ["7.5"], "device": {"name": "NVIDIA GeForce RTX 2060"}})
    assert "GTX 16xx" not in str(compile_plan(request(), other, account())["ranks"][0]["dtype"]["rejected"])


def test_an_exclusive_card_that_is_free_is_planned() -> None:
    found = machine({"sm": ["8.6"], "device": {"compute_mode": "exclusive_process"}})
    assert compile_plan(request(), found, account())["ranks"][0]["dtype"]["chosen"] == "bf16"


def test_legality_and_the_toolchains_word_are_two_readings_and_the_stricter_wins() -> None:
    row = {"name": "fused", "devices": ["cuda"], "min_sm": "5.3", "dtypes": ["fp32", "fp16"], "toolchain": ["triton"]}
    triton = {"triton": reading("3.6.0", "", "probed", "made up")}
    assert kernel_veto(row, "cuda", "7.5", "fp32", triton, {}) is None
    assert "the toolchain rules it out" in (kernel_veto(row, "cuda", "6.1", "fp32", triton, {}) or "")
    assert "its operands rule it out" in (kernel_veto(row, "cuda", "5.2", "fp32", triton, {}) or "")
    wide = {**row, "most": {"head": 256}}
    assert kernel_veto(wide, "cuda", "7.5", "fp32", triton, {"head": 256}) is None
    assert kernel_veto(wide, "cuda", "7.5", "fp32", triton, {"head": 384}) == "takes a head of at most 256, not 384"
    assert "not installed" in (kernel_veto(row, "cuda", "7.5", "fp32", {}, {}) or "")
    plan = compile_plan(
        request(),
        machine({"sm": ["7.5"], "toolchain": {"arch_list": ["7.5"], "triton": "3.6.0", "cuda": "13.0"}}),
        account(),
    )
    served, capability = plan["ranks"][0]["served"], plan["ranks"][0]["capability"]
    assert [served[name]["value"] for name in ("torch", "triton", "bitsandbytes")] == [True, True, True]
    assert "without tensor cores" in served["triton"]["why"] and capability["bf16"]["value"] is False


def test_machine_code_for_a_minor_version_serves_the_later_ones_of_its_major_only() -> None:
    assert holds(["8.0"], "8.9") and not holds(["8.9"], "8.6") and not holds(["8.0"], "9.0")
    assert serving(["12.0", "7.5"]) is not None and serving(["12.0", "7.0"]) is None
    pascal = serving(["6.1", "8.6"])
    assert pascal is not None and pascal.cuda == "12.6"
    assert all(holds(wheel.arches, arch) for wheel in WHEELS for arch in wheel.arches)
