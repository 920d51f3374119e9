"""The command line becomes a request: what each option's text means, and what is refused with which words."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from planner import data, options, request
from planner.request import Usage
from schemas.form import parse, render

CASES = Path(__file__).parent / "cases"
TEXTS = json.loads((CASES / "request_texts.json").read_text("utf-8"))
READ = {"devices": request.devices, "data": request.sources}

any_text = st.text(max_size=30)


def _reader(option: str) -> Any:
    return READ.get(option) or getattr(request, option)


@pytest.mark.parametrize("case", TEXTS["read"], ids=lambda case: f"{case[0]} {case[1]}")
def test_a_text_is_read_to_its_normal_value(case: list[Any]) -> None:
    option, text, value = case
    assert json.loads(json.dumps(_reader(option)(text))) == value


@pytest.mark.parametrize("case", TEXTS["refused"], ids=lambda case: f"{case[0]} {case[1]!r}")
def test_a_text_that_means_nothing_is_refused_in_words(case: list[Any]) -> None:
    option, text, words = case
    with pytest.raises(Usage, match=words):
        _reader(option)(text)


@pytest.mark.parametrize(
    "option", ["batch", "seq", "steps", "seed", "dtype", "capacity", "fit", "devices", "data", "model"]
)
@given(text=any_text)
def test_any_text_is_read_or_refused_and_what_is_read_can_stand_in_a_document(option: str, text: str) -> None:
    try:
        value = _reader(option)(text)
    except Usage as error:
        assert "\n" not in str(error)
        return
    assert parse(render({"value": value}), "x") == json.loads(json.dumps({"value": value}))


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=8))
def test_declared_batches_come_back_in_order(batches: list[int]) -> None:
    assert request.capacity(",".join(map(str, batches))) == [[batch, None] for batch in batches]


@given(st.integers(1, 9_000_000))
def test_a_budget_is_counted_in_bytes_exactly(number: int) -> None:
    assert request.fit(f"{number}") == request.fit(f"{number}GB") == [number * 10**9]
    assert request.fit(f"{number / 8}GiB") == [number * 2**27]


@given(any_text)
def test_a_setting_keeps_its_value_as_text(text: str) -> None:
    if text and "\x00" not in text:
        assert request.setting(f"key={text}") == ("key", text)


def test_a_value_that_is_not_utf8_is_refused() -> None:
    broken = os.fsdecode(b"\xff")
    for read, text in ((request.setting, f"key={broken}"), (request.sources, broken), (request.dtype, broken)):
        with pytest.raises(Usage) as caught:
            read(text)
        str(caught.value).encode("utf-8")


# --- the command line ---


def _surface() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for command in options.COMMANDS:
        actions = options.parser(command)._actions
        found[command] = {
            "/".join(action.option_strings) or action.dest: {
                "metavar": action.metavar,
                "choices": list(action.choices) if action.choices else None,
                "repeatable": action.nargs == 0 or type(action).__name__ == "_AppendAction",
                "required": action.required,
            }
            for action in actions
        }
    return found


def test_the_options_are_those_that_were_agreed() -> None:
    """A new or changed option is a change of contract: write it into tests/cases/options.json knowingly."""
    assert _surface() == json.loads((CASES / "options.json").read_text("utf-8"))


def test_every_option_has_its_help() -> None:
    for command in options.COMMANDS:
        parser = options.parser(command)
        assert all(action.help for action in parser._actions)
        assert parser.format_help()


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(Usage, match="--batch is given twice"):
        options.parser("plan").parse_args(["--batch", "4", "--batch", "8"])
    with pytest.raises(Usage, match="--set layers is given twice"):
        request.settings([("layers", "2"), ("layers", "3")])


def test_an_option_is_never_guessed_from_its_beginning() -> None:
    with pytest.raises(Usage, match="unrecognized"):
        options.parser("plan").parse_args(["--bat", "4"])


def test_options_before_a_command_are_refused_and_not_dropped() -> None:
    command, rest = options.split(["--batch", "4", "probe"])
    with pytest.raises(Usage, match="unrecognized arguments: probe"):
        options.parser(command).parse_args(rest)


def test_nothing_asked_is_a_request_of_nulls() -> None:
    asked = vars(options.parser("plan").parse_args([]))
    found = request.compose(asked, data.describe(None), "auto", [])
    assert found == {
        "devices": "auto",
        "model": None,
        "set": {},
        "data": [{"name": "stdlib", "weight": 1, "length": None, "sha256": None}],
        **dict.fromkeys(["batch", "seq", "steps", "seed", "dtype", "capacity", "fit", "fit_policy", "mechanisms"]),
        **dict.fromkeys(["opt", "shard", "reduce"]),
        "benchmark": False,
        "calibrate": [],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--devices cpu:2 --model tiny --set layers=2 --batch 4 --seq 64 --steps 10 --seed 7",
        "--dtype bf16,fp32 --opt adamw",
        "--capacity 4x128,2 --fit 16,8GiB --fit-policy in-order --shard none --reduce auto --benchmark",
        "--capacity equal --fit auto --devices cpu",
    ],
)
def test_every_request_holds_its_schema(arguments: str) -> None:
    asked = options.parser("plan").parse_args(arguments.split())
    found = request.compose(vars(asked), data.describe(asked.data), asked.devices or "auto", [])
    schema = json.loads(files("schemas").joinpath("request.schema.json").read_text("utf-8"))
    validator = Draft202012Validator(schema)
    validator.validate(json.loads(json.dumps(found)))
    for key, wrong in (("batch", 0), ("devices", "/home/me/r.json"), ("dtype", "bf16"), ("other", 1), ("fit", [0])):
        assert not validator.is_valid({**found, key: wrong})


def test_fail_over_takes_a_percentage_for_all_or_for_a_kind() -> None:
    parsed = options.parser("diff").parse_args(["p.json", "--fail-over", "10", "--fail-over", "memory=2.5"])
    assert parsed.fail_over == [(None, 10.0), ("memory", 2.5)]
    for wrong in ("x", "=3", "speed=3", "-1", "nan", "inf", "memory="):
        with pytest.raises(Usage, match="--fail-over"):
            options.parser("diff").parse_args(["p.json", f"--fail-over={wrong}"])


# --- data ---


def test_data_is_known_by_name_length_and_digest_and_never_by_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello")
    (row,) = data.describe(request.sources(f"{tmp_path}/a.txt:3"))
    assert row == {"name": "a.txt", "weight": 3, "length": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}


def test_data_that_no_run_could_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "stdlib").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a").write_bytes(b"y")
    for path, words in (
        ("empty", "is empty"),
        ("none", "No such file"),
        ("b", "not a regular file"),
        ("stdlib", "rename"),
    ):
        with pytest.raises(Usage, match=words):
            data.describe([[str(tmp_path / path), 1]])
    with pytest.raises(Usage, match="two sources named a"):
        data.describe([[str(tmp_path / "a"), 1], [str(tmp_path / "b" / "a"), 1]])
    with pytest.raises(Usage, match="not a regular file"):
        data.describe([["/dev/zero", 1]])
    with pytest.raises(Usage, match="null byte"):
        data.describe([["a\0b", 1]])
