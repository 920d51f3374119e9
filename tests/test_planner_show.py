"""show and the summary: everything a person asks of a plan is there, as plain text in a file."""

from __future__ import annotations

import io
from typing import Any

import pytest

import handmade
from planner import words
from planner.page import Page
from planner.show import asked, binds, show
from planner.summary import fit_lines, summarise
from schemas.document import decision
from schemas.seal import seal


def _shown(plan: Any) -> str:
    stream = io.StringIO()
    show(plan, Page(stream))
    return stream.getvalue()


def test_a_plan_is_shown_with_its_fleet_ranks_memory_step_reasons_and_runs() -> None:
    plan = handmade.run(handmade.plan(), {"/step/seconds": 0.1})
    text = _shown(plan)
    for words_ in (
        "Handmade [red]CPU", "clock unknown", "fp32", "4 x 128", "1 GiB (512 MiB .. 2 GiB)",
        "80 ms (40 ms .. 160 ms) *",
        "no Triton on a CPU", "muon_state_bf16", "1 MiB", "rank 0 owns 2 matrices, rank 1 owns 1 matrix", "finished",
        "two ranks are faster than one", "bound at the run", "1 fallback",
    ):  # fmt: skip
        assert words_ in text


def test_text_in_a_file_has_no_colour_and_text_of_a_plan_moves_no_terminal() -> None:
    body = handmade.body()
    body["workload"]["data"]["sources"][0]["name"] = "a\x1b[2Jb\n"
    body["ranks"][0]["dtype"]["why"] = "evil \x1b[31m"
    text = _shown(seal(body))
    assert "\x1b" not in text
    assert "a\\x1b[2Jb\\n" in text


def test_a_reason_is_never_cut() -> None:
    body = handmade.body()
    body["ranks"][0]["dtype"]["why"] = " ".join(f"word{place}" for place in range(100))
    text = _shown(seal(body))
    assert all(f"word{place}" in text for place in range(100))


def test_a_plan_without_ranges_threads_kernels_or_exchange_is_shown_too() -> None:
    body = handmade.body()
    rank = body["ranks"][0]
    del rank["threads"], rank["step"]["exchange"]
    rank["kernels"] = {}
    body["exchange"] = {"backend": decision(None, "none", "default", "one rank")}
    assert "backend: none" in _shown(seal(body))


def test_the_part_that_binds_is_the_longest_known_one() -> None:
    step = {part: {"value": value} for part, value in (("compute", 1.0), ("exchange", 2.0), ("optimizer", None))}
    assert binds({"step": step}) == "exchange"
    assert binds({"step": {"compute": {"value": None}}}) is None


def test_the_request_is_shown_as_the_options_that_would_ask_it() -> None:
    request = handmade.request(batch=4, fit=[16 * 10**9], capacity=[[4, 128], [2, None]], opt="adamw")
    request |= {"set": {"layers": "2"}, "benchmark": True}
    assert asked(request) == (
        "--set layers=2 --devices cpu:2 --benchmark --batch 4 --capacity 4x128,2 --fit 16 --opt adamw"
    )
    assert asked({"devices": None}) == "nothing (every default)"


@pytest.mark.parametrize(
    ("budget", "start"),
    [(None, "fit=off: est_peak=1.00GiB engaged=recompute (weights="), ([16 * 10**9], "fit=16.0GB: est_peak=1.00GiB"),
     ("auto", "fit=auto: "), ([8 * 10**9, 4 * 10**9], "fit=8.0GB: ")],
)  # fmt: skip
def test_the_fit_line_names_budget_peak_mechanisms_and_components(budget: Any, start: str) -> None:
    (line,) = fit_lines(handmade.plan(asked=handmade.request(batch=4, fit=budget)))
    assert line.startswith(start)
    assert "gradients=" in line
    assert "peak=" not in line.partition("(")[2]


def test_the_summary_names_the_step_the_verdict_and_every_fallback() -> None:
    stream = io.StringIO()
    summarise(handmade.plan(), Page(stream))
    text = stream.getvalue()
    assert "94 ms" in text
    assert "two ranks are faster than one" in text
    assert "fallback /ranks/0/kernels/kda: asked auto, chosen chunk_torch: no Triton on a CPU" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"), (999, "B", "999 B"), (2**30, "B", "1 GiB"),
        (1.5 * 2**20, "B", "1.5 MiB"), (None, "B", "unknown"),
        (0, "s", "0 s"), (2e-6, "s", "2 us"), (0.0123, "s", "12.3 ms"), (1.5, "s", "1.5 s"), (7200, "s", "7,200 s"),
        (93.8e9, "FLOP/s", "93.8 GFLOP/s"), (2311.4, "tokens/s", "2,311 tokens/s"), (2.6e9, "Hz", "2.6 GHz"),
        (4096, "", "4,096"), (0.5, "", "0.5"), (True, "", "true"), ("x", "", "x"),
    ],
)  # fmt: skip
def test_an_amount_reads_as_a_person_would_write_it(value: Any, unit: str, text: str) -> None:
    assert words.amount(value, unit) == text


def test_rank_numbers_are_drawn_together() -> None:
    assert words.ranks([0]) == "0"
    assert words.ranks([3, 0, 1, 2, 7]) == "0-3, 7"
