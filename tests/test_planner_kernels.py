"""Which row of a kernel a rank runs: conditions, kept timings, and whether its card is tuned for."""

from __future__ import annotations

import io
from typing import Any

import pytest

from planner.door import kernel_set, reachable
from planner.passes.compile import compile_plan
from planner.refusals.of_runs import toolchain_changed
from planner.refusals.rules import Refused
from planner.views.page import Page
from planner.views.show import show
from planner.views.summary import summarise
from worlds import account, fleet, record, request

SHAPE = {"heads": 4, "head": 32}
TUNED = {"card": "Card 0", "triton": "3.6.0", "fla": "0.6.0", "head": 32, "heads": [4, 12], "dtypes": ["bf16"]}


def timed(
    row: str, seconds: float, card: str = "Card 0", batch: int = 4, dtype: str = "bf16", triton: str = "3.6.0"
) -> dict[str, Any]:
    """A kept timing, of the row by that name."""
    shape = {**SHAPE, "batch": batch, "seq": 128}
    kept = {"card": card, "toolchain": {"triton": triton}, "shape": shape, "dtype": dtype, "seconds": seconds}
    return {"row": row, "kept": kept}


def chosen(*kept: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """The decision on kda of one made-up card, with timings kept."""
    work = account()
    for row in work["kernels"]["kda"]:
        row["timed"] = [item["kept"] for item in kept if item["row"] == row["name"]]
    found: dict[str, Any] = compile_plan(request(**asked), fleet(1e12), work)["ranks"][0]["kernels"]["kda"]
    return found


def test_without_timings_the_first_row_that_can_is_taken() -> None:
    found = chosen()
    assert (found["chosen"], found["outcome"]) == ("chunk_fla", "default")
    assert all("costs_seconds" not in row for row in found["rejected"])


def test_of_rows_timed_on_the_card_the_fastest_is_taken_and_the_decision_says_so() -> None:
    found = chosen(timed("chunk_fla", 0.005), timed("chunk_torch", 0.002))
    assert found["chosen"] == "chunk_torch"
    assert "the fastest of those timed on this card" in found["why"] and "chunk_torch 2 ms" in found["why"]
    slower = next(row for row in found["rejected"] if row["option"] == "chunk_fla")
    assert slower["costs_seconds"] == pytest.approx(0.003) and "5 ms" in slower["why"]


@pytest.mark.parametrize(
    "kept",
    [
        [timed("chunk_torch", 0.002)],  # alone it was compared with nothing
        [timed("chunk_fla", 0.005, card="Card 1"), timed("chunk_torch", 0.002, card="Card 1")],
        [timed("chunk_fla", 0.005, dtype="fp16"), timed("chunk_torch", 0.002, dtype="fp16")],
        [timed("chunk_fla", 0.005, triton="3.5.0"), timed("chunk_torch", 0.002, triton="3.5.0")],
        [timed("chunk_fla", 0.005), timed("recurrent_torch", 0.001)],  # no row that auto reaches
    ],
)
def test_timings_of_one_row_another_card_dtype_or_toolchain_decide_nothing(kept: list[dict[str, Any]]) -> None:
    assert chosen(*kept)["chosen"] == "chunk_fla"


def test_the_timings_of_the_nearest_shape_decide() -> None:
    small = [timed("chunk_fla", 0.005, batch=4), timed("chunk_torch", 0.002, batch=4)]
    large = [timed("chunk_fla", 0.01, batch=64), timed("chunk_torch", 0.1, batch=64)]
    assert chosen(*small, *large, batch=3)["chosen"] == "chunk_torch"
    assert chosen(*small, *large, batch=100)["chosen"] == "chunk_fla"


@pytest.mark.parametrize(
    ("change", "tuned"),
    [
        ({}, "exact"),
        ({"heads": [8]}, "near"),
        ({"head": 64}, "none"),
        ({"card": "Card 1"}, "none"),
        ({"triton": "3.5.0"}, "none"),
        ({"fla": "0.5.0"}, "none"),
        ({"dtypes": ["fp16"]}, "none"),
    ],
)
def test_whether_a_card_is_tuned_for_is_read_and_what_is_not_costs_minutes(change: dict[str, Any], tuned: str) -> None:
    work = account()
    work["kernel_shapes"] = {"kda": SHAPE}
    work["kernels"]["kda"][0]["tuned"] = [{**TUNED, **change}]
    found = compile_plan(request(), fleet(1e12), work)["ranks"][0]["tuned"]["kda"]
    assert found["value"] == tuned
    assert ("minutes a dtype" in found["why"]) == (tuned == "none")


def test_a_person_is_told_that_the_first_run_will_tune() -> None:
    work = account()
    work["kernels"]["kda"][0]["tuned"] = []
    made = compile_plan(request(), fleet(1e12), work)
    summary, shown = io.StringIO(), io.StringIO()
    summarise(made, Page(summary))
    show(made, Page(shown))
    assert "rank 0: kernel kda: no tuned configurations are kept for this card" in summary.getvalue()
    assert "(tuned: none)" in " ".join(shown.getvalue().split())


def test_nothing_is_said_of_tuning_where_the_kernel_is_not_tuned() -> None:
    work = account()
    work["kernels"]["kda"][0]["tuned"] = [TUNED]
    assert "tuned" not in compile_plan(request(dtype=["fp32"]), fleet(1e12), work)["ranks"][0]
    assert "tuned" not in compile_plan(request(), record(), work)["ranks"][0]


@pytest.mark.parametrize(
    ("toolchain", "sm", "dtype", "veto"),
    [
        ({"fla-core": None}, "8.6", None, "needs fla-core, not installed"),
        ({}, "7.5", None, "needs sm_80, and this card is sm_75"),
        ({}, "8.6", ["fp32"], "takes bf16, fp16, not fp32"),
    ],
)
def test_what_rules_the_fused_kernel_out_is_counted_and_named(
    toolchain: dict[str, Any], sm: str, dtype: list[str] | None, veto: str
) -> None:
    found = fleet(1e12, sm=sm)
    for name in toolchain:
        found["toolchain"][name] |= {"value": None, "basis": "unknown", "weakest": "unknown"}
    made = compile_plan(request(dtype=dtype), found, account())
    decision = made["ranks"][0]["kernels"]["kda"]
    assert (decision["chosen"], decision["outcome"]) == ("chunk_torch", "fallback")
    assert veto in decision["rejected"][0]["why"]


def test_a_package_that_a_kernel_or_mechanism_was_decided_by_must_not_have_changed() -> None:
    made = compile_plan(request(mechanisms=["optim_8bit"]), fleet(1e12), account())
    planned = {name: item["value"] for name, item in made["toolchain"].items()}

    def refused(**changed: str) -> list[str]:
        row = {"rank": 0, "toolchain": {**planned, **changed}}
        return [refusal.asked for refusal in toolchain_changed(made, {"ranks": [row]})]

    assert refused() == refused(python="3.0") == []
    assert refused(triton="3.5.0") == ["triton 3.6.0 on rank 0"]
    assert refused(**{"fla-core": "0.5.0", "bitsandbytes": "0.49"}) == [
        "fla-core 0.6.0 on rank 0",
        "bitsandbytes 0.50.2 on rank 0",
    ]
    plain = compile_plan(request(dtype=["fp32"]), fleet(1e12), account())
    row = {"rank": 0, "toolchain": {**planned, "triton": "3.5.0"}}
    assert not list(toolchain_changed(plain, {"ranks": [row]}))


def test_a_kernel_asked_for_on_a_cpu_that_needs_a_card_is_refused() -> None:
    work = account()
    work["config"]["kda"] |= {"asked": "chunk_fla", "chosen": "chunk_fla"}
    work["compute"]["cpu"] = {"kda=chunk_fla": work["compute"]["cpu"]["kda=chunk_torch"]}
    with pytest.raises(Refused) as caught:
        compile_plan(request(), record(), work)
    assert {refusal.code for refusal in caught.value.refusals} == {"kernel-unsupported"}
    assert "chunk_fla runs on cuda, not on cpu" in caught.value.text() and "--set kda=auto" in caught.value.text()


def test_rows_that_count_alike_share_one_key() -> None:
    rows = account("b1")["kernels"]
    keys = {kernel_set({"kda": "chunk_fla", "grouped": row["name"]}, rows) for row in rows["grouped"]}
    assert keys == {"grouped=grouped_loop,kda=chunk_fla"}
    assert kernel_set({}, {}) == "none"
    assert [row["name"] for row in reachable(rows["kda"])] == ["chunk_fla", "chunk_torch"]
    assert set(account("b1")["compute"]["cuda"]) == {
        "grouped=grouped_loop,kda=chunk_fla",
        "grouped=grouped_loop,kda=chunk_torch",
    }
