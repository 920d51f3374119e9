"""show and the summary: everything a person asks of a plan is there, as plain text in a file."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import handmade
import worlds
from planner.views import words
from planner.views.page import Page
from planner.views.show import asked, binds, show
from planner.views.summary import fit_lines, summarise
from schemas.document import decision, is_decision, reading, unknown, walk
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
        "80 ms (40 .. 160 ms) *",
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
     ("auto", "fit=auto: "), ([8 * 10**9, 4 * 10**9], "fit=8.0GB: "), ([5 * 10**7], "fit=0.05GB: "),
     ([6 * 10**7], "fit=0.06GB: "), ([12 * 10**7], "fit=0.12GB: "), ([17179869184], "fit=17.1799GB: ")],
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


def _summary(plan: Any) -> str:
    stream = io.StringIO()
    summarise(plan, Page(stream))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("key", "late", "told"),
    [
        ("warmup", 9, "the learning rate never comes to its whole: warmup=9 of 8 steps"),
        ("checkpoint_every", 8, "no checkpoint is kept before the end: checkpoint_every=8 of 8 steps"),
        ("eval_every", 100, "nothing is evaluated before the end: eval_every=100 of 8 steps"),
        ("warmup_steps_unmeasured", 8, "no step is measured: warmup_steps_unmeasured=8 of 8 steps"),
    ],
)
def test_what_is_asked_for_after_more_steps_than_there_are_is_told_to_come_to_nothing(
    key: str, late: int, told: str
) -> None:
    plan = worlds.compiled(steps=8)
    assert f"{key}=" not in _summary(plan)  # nobody asked
    for value in (late, 7):
        plan["workload"]["config"][key] |= {"asked": value, "chosen": value}
        assert (told in _summary(plan)) == (value == late)


def test_a_step_of_unknown_time_is_one_phrase_with_what_could_not_be_read_and_the_way_out() -> None:
    body = handmade.body()
    rate, inputs = "/fleet/devices/cpu-0/rate_fp32", {"total": "/ranks/0/step/compute"}
    body["fleet"]["devices"]["cpu-0"]["rate_fp32"] = unknown("FLOP/s", "no clock is read")
    rank = body["ranks"][0]["step"]
    rank["compute"] = unknown("s", "needs it", inputs=[rate, "/ranks/0/batch"])
    rank["total"] = unknown("s", "needs it", inputs=[inputs["total"]])
    body["step"]["seconds"] = unknown("s", "needs it", inputs=["/ranks/0/step/total"])
    for name in ("tokens_per_second", "regime", "verdict"):
        body["step"][name] = unknown("", "needs it", inputs=["/step/seconds"])
    text = _summary(seal(body))
    assert f"unknown, since {rate} could not be read (no clock is read); to know it, plan with --benchmark" in text
    assert text.count("unknown") == 2  # and the count of unknown readings


@pytest.mark.parametrize(
    ("names", "devices", "command"),
    [
        (["stdlib"], "cpu:2", "Run it with: torchrun -m executor plan.json\n"),
        (["a.txt", "b c.txt"], "auto", "torchrun -m executor plan.json --data 'a.txt,b c.txt'"),
        (["a.txt"], "record:0123456789ab", "torchrun -m executor plan.json --data a.txt"),
        (["stdlib"], "gtx-1650", "Show it with: dormouse-plan show plan.json (its cards are known by data sheet"),
    ],
)
def test_the_summary_ends_with_the_command_to_type_next(names: list[str], devices: str, command: str) -> None:
    body = handmade.body(asked=handmade.request(batch=4, devices=devices))
    known = {"length": reading(9, "B", "probed", "x"), "sha256": reading("ab" * 32, "", "probed", "x")}
    body["workload"]["data"]["sources"] = [{"name": name, "weight": 1, **known} for name in names]
    if devices == "gtx-1650":
        listed = ["card-0", "card-1"]
        body["fleet"]["devices"] = {"card-0": {**body["fleet"]["devices"]["cpu-0"], "ids": listed}}
        body["ranks"][0]["devices"] = listed
        body = json.loads(json.dumps(body).replace("/fleet/devices/cpu-0", "/fleet/devices/card-0"))
    assert command in _summary(seal(body)).splitlines()[-1] + "\n"


def test_one_of_a_thing_is_no_plural() -> None:
    body = handmade.body(batch=1)
    body["workload"]["steps"]["chosen"] = 1
    body["step"]["global_batch"]["value"] = 1
    assert "1 step of 1 sequence (256 tokens)" in _summary(seal(body))
    assert "on 2 ranks, 1 step, seed 0" in _shown(seal(body))
    assert [words.plural(count, "step") for count in (0, 1, 4000, None)] == [
        "0 steps", "1 step", "4,000 steps", "unknown steps",
    ]  # fmt: skip
    assert words.plural(2, "matrix", "matrices") == "2 matrices"


def test_plans_to_calibrate_by_are_shown_by_their_seals() -> None:
    taught = [{"seal": "12" * 32, "run": "r0"}, {"seal": "12" * 32, "run": "r0"}, {"seal": "ab" * 32, "run": "r1"}]
    assert asked({"calibrate": taught}) == "--calibrate 121212121212,abababababab"


@pytest.mark.parametrize(
    ("key", "item", "texts"),
    [
        ("vector_bits", {"value": 512, "unit": "bit"}, ("vector", "512 bit")),
        ("global_tokens", {"value": 1024, "unit": "tokens"}, ("global tokens", "1,024")),
        ("tokens_per_second", {"value": 900.0, "unit": "tokens/s", "low": 5.0, "high": 1e3},
         ("tokens per second", "900 (5 .. 1,000)")),
        ("even_seconds", {"value": 1.5, "unit": "s"}, ("even time", "1.5 s")),
        ("owners", {"value": 2.5e-4, "unit": "s", "low": 6e-5, "high": 1e-3}, ("owners", "250 us (60 us .. 1 ms)")),
        ("peak", {"value": 1, "unit": "B", "low": 2**20, "high": 2**20 + 1}, ("peak", "1 B")),
        ("memory_free", {"value": None, "unit": "B"}, ("memory free", "unknown")),
    ],
)  # fmt: skip
def test_a_unit_is_said_once_and_a_range_only_where_it_has_two_ends(key: str, item: Any, texts: Any) -> None:
    assert words.named(key, item) == texts


def test_a_cell_without_anything_is_a_dash() -> None:
    asked = {**handmade.request(), "dtype": ["fp32"]}
    rows = [line.split() for line in _shown(handmade.plan(asked=asked)).splitlines()]
    dtype = next(row for row in rows if row[:1] == ["/ranks/0/dtype"])
    assert dtype[1:3] == ["-", "fp32"]


def test_a_component_of_memory_that_no_rank_has_has_no_row() -> None:
    rows = [line.split()[:1] for line in _shown(handmade.plan()).splitlines()]
    assert ["masters"] in rows and ["workspace"] not in rows and ["staging"] not in rows


def test_a_narrow_terminal_shows_every_pointer_whole() -> None:
    stream = io.StringIO()
    plan = worlds.compiled()
    show(plan, Page(stream, 80))
    lines = stream.getvalue().splitlines()
    assert {pointer for pointer, item in walk(plan) if is_decision(item)} <= set(lines)
    assert "  chosen: muon" in lines
    assert max(len(line.rstrip()) for line in lines) <= 80


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"), (999, "B", "999 B"), (2**30, "B", "1 GiB"),
        (1.5 * 2**20, "B", "1.5 MiB"), (None, "B", "unknown"),
        (0, "s", "0 s"), (2e-6, "s", "2 us"), (0.0123, "s", "12.3 ms"), (1.5, "s", "1.5 s"), (7200, "s", "7,200 s"),
        (93.8e9, "FLOP/s", "93.8 GFLOP/s"), (2311.4, "tokens/s", "2,311 tokens/s"), (2.6e9, "Hz", "2.6 GHz"),
        (1.54e9, "FLOP", "1.54 GFLOP"), (1, "sequences", "1 sequence"), (999.7 * 2**10, "B", "1,000 KiB"),
        (1.5e7, "", "15,000,000"), (4096, "", "4,096"), (0.5, "", "0.5"), (True, "", "true"), ("x", "", "x"),
    ],
)  # fmt: skip
def test_an_amount_reads_as_a_person_would_write_it(value: Any, unit: str, text: str) -> None:
    assert words.amount(value, unit) == text


def test_rank_numbers_are_drawn_together() -> None:
    assert words.ranks([0]) == "0"
    assert words.ranks([3, 0, 1, 2, 7]) == "0-3, 7"


def test_what_engaged_mechanisms_save_and_cost_is_shown_and_nothing_where_none_is() -> None:
    plain, engaged = worlds.compiled(), worlds.compiled(mechanisms=["recompute"])
    assert "Mechanisms engaged" not in _shown(plain)
    text = _shown(engaged)
    worth = engaged["ranks"][0]["worth"]["recompute"]
    assert "Mechanisms engaged" in text
    assert f"saves {words.told(worth['saves'])}, costs {words.told(worth['costs'])}" in text
