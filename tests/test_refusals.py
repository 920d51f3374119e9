"""Every refusal of the one list, asked for on the command line: code 3, nothing on stdout, four parts, and a way out.

The cases are data: tests/cases/refusals.json what planning refuses, refused_starts.json what a start does. A plan that
is refused is stale and no more: it is still verified, shown and compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import plans
import ranks
from executor import __main__ as runner
from executor import build, honour, smoke
from executor.hold import Hold
from executor.slices import rank_slice
from fake_nvml import FakeNvml, load
from planner import __main__ as front
from planner import accounts
from planner.machine import probe
from planner.passes.compile import compile_plan
from planner.refusals.rules import RULES
from schemas.form import render
from schemas.seal import append_run, seal
from schemas.store import write
from worlds import account, cases, compiled, fleet, machine, record, request, run_of

PLANNING, STARTS = cases("refusals.json"), cases("refused_starts.json")
_WAY_OUT = re.compile(
    r"--[a-z]|nvidia-smi|CUDA_VISIBLE_DEVICES|install |plan |give |run it under|start |report it|mend "
)


def test_every_refusal_has_a_case_of_its_own_time_on_the_command_line() -> None:
    timely = {
        when: {rule.code for rule in RULES if rule.when in when} for when in (("request", "plan"), ("start", "running"))
    }
    assert timely["request", "plan"] == {row["code"] for row in PLANNING}
    assert timely["start", "running"] == {row["code"] for row in STARTS}
    assert len({rule.code for rule in RULES}) == len(RULES)
    names = [row["name"] for row in (*PLANNING, *STARTS)]
    assert len(set(names)) == len(names)


def refused(row: dict[str, Any], text: str) -> None:
    """``text`` refuses for the code of ``row``, in four parts on a line each, and says what ``row`` wants said."""
    parts = re.findall(r"^refused \((\S+)\): (.+)\n  found:  (.+)\n  why:    (.+)\n  to fix: (.+)$", text, re.MULTILINE)
    assert row["code"] in [code for code, *_ in parts], text
    assert len(text.splitlines()) == 4 * len(parts), text
    for *_, way_out in parts:
        assert _WAY_OUT.search(way_out), f"no way out: {way_out}"
    assert all(words in text for words in row["says"]), text


# --- while planning ---


@pytest.fixture
def planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[str]]:
    """The arguments that plan in the world of a row, whose account needs no process."""

    def arranged(row: dict[str, Any]) -> list[str]:
        work = account(row.get("account", "tiny"))
        for key, asked in row.get("config", {}).items():
            work["config"][key] = {"asked": asked, "chosen": asked, "why": "asked for"}
        work["mechanisms"] |= row.get("mechanisms", {})
        work |= row.get("counted", {})

        def counted(model: str, wanted: bytes) -> bytes:
            work["made_from"] |= {"opt": json.loads(wanted)["opt"]}
            return render(seal(work))

        monkeypatch.setattr(accounts, "_cached_at", lambda *_: None)
        monkeypatch.setattr(accounts, "_subprocess", counted)
        found = machine(row)
        if row.get("cpu"):
            found["devices"] |= record()["devices"]
        write(tmp_path / "record.json", seal(found))
        arguments = [f"--devices={tmp_path / 'record.json'}", "--model=tiny", *row.get("arguments", ())]
        if "file" in row:
            (tmp_path / "a.txt").write_bytes(b"a" * row["file"])
            arguments.append(f"--data={tmp_path / 'a.txt'}")
        if row.get("calibrate"):
            base = compiled()
            write(tmp_path / "measured.json", append_run(base, run_of(base)))
            arguments.append(f"--calibrate={tmp_path / 'measured.json'}")
        return arguments

    return arranged


@pytest.mark.parametrize("row", PLANNING, ids=lambda row: row["name"])
def test_what_cannot_be_honoured_is_refused_while_planning(
    row: dict[str, Any], planning: Callable[[dict[str, Any]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert front.main(planning(row)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    refused(row, err)
    assert err.count(f"refused ({row['code']})") == 1


# --- when a run starts ---


def _cards(name: str, **more: Any) -> dict[str, Any]:
    """The record of the cards of a case, beside a toolchain that serves them."""
    body = probe.fleet("auto", environ={}, cards=FakeNvml(load(name)))
    return seal({**body, "toolchain": fleet(1e12)["toolchain"], **more})


def _two_nodes(data: Path) -> dict[str, Any]:
    made = plans.plan(data, 2)
    (name,) = made["fleet"]["nodes"]
    made["fleet"]["nodes"]["node-ffffffff"] = made["fleet"]["nodes"][name]
    return plans.with_values(made, {})


def _own_model(data: Path) -> dict[str, Any]:
    made = plans.plan(data, 1)
    data.with_name("strange_model.py").write_text("raise SystemExit('the code of a stranger ran')")
    made["workload"]["model"] = "strange_model:Model"
    return plans.with_values(made, {})


PLANS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "two nodes": _two_nodes,
    "a model of its own": _own_model,
    "a card": lambda data: compile_plan(request(), _cards("h200"), account()),
    "a listed card": lambda data: compile_plan(request(), probe.record("rtx-3090"), account()),
}


@pytest.fixture
def starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[dict[str, Any]], str]]:
    """Starts the plan of a row in its world, and gives what is said of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_listen", lambda: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": "0"})  # what the command sets is undone
    data = plans.corpus(tmp_path)
    (tmp_path / "other.txt").write_bytes(data.read_bytes()[::-1])
    with ExitStack() as held:

        def start(row: dict[str, Any]) -> str:
            made = PLANS.get(row.get("plan", ""), lambda data: _small(data, row))(data)
            write("plan.json", plans.with_values(made, row.get("values", {})))
            if "cards" in row:
                _show_cards(row, monkeypatch)
            for name, text in row.get("environ", {}).items():
                monkeypatch.setenv(name, text)
            FAULTS[row.get("fault", "none")](made, monkeypatch, held)
            place = (
                []
                if made["workload"]["data"]["sources"][0]["name"] == "stdlib"
                else ["--data", row.get("data", data.name)]
            )
            assert runner.main(["plan.json", *place, *row.get("words", ())]) == 3
            return capsys.readouterr().err

        yield start


def _small(data: Path, row: dict[str, Any]) -> dict[str, Any]:
    return plans.plan(data, 1, steps=2, dtype=None if "dtype" not in row else [row["dtype"]])


def _show_cards(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine shows the cards of a case by now."""
    case = load(row["cards"])
    for asked, answer in case["answers"].items():
        if "free" in row and asked.startswith("nvmlDeviceGetMemoryInfo("):
            answer["free"] = row["free"]
    real = probe.fleet
    monkeypatch.setattr(honour.probe, "fleet", lambda devices, **more: real(devices, cards=FakeNvml(case), **more))


def _another_run(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    other = held.enter_context(Hold())
    assert other.take(Path("plan.json")) is None


def _another_checkpoint(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    other = plans.plan(Path(plans.CORPUS), 1, steps=2, seed=9, settings={"checkpoint_every": 1})
    write("other.json", other)
    folder = Path("runs", made["seal"]["digest"][:12])
    assert runner.main(["other.json", "--data", plans.CORPUS, "--run-dir", str(folder)]) == 0


def _finished(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    assert runner.main(["plan.json", "--data", plans.CORPUS]) == 0


def _poisoned(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    original = build.model

    def poisoned(*parts: Any) -> Any:
        workload, model = original(*parts)
        model.head.weight.data[0, 0] = float("nan")
        return workload, model

    monkeypatch.setattr(build, "model", poisoned)


def _another_kernel(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    original = build.model
    monkeypatch.setattr(build, "model", lambda work, kernels: original(work, {"kda": "recurrent_torch"}))


def _another_allocator(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    monkeypatch.setattr(smoke.peaks, "allocator", lambda kind: "segments")


def _no_autocast(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    monkeypatch.setattr(smoke, "compute_in", lambda dtype, kind: nullcontext())


FAULTS: dict[str, Callable[[dict[str, Any], pytest.MonkeyPatch, ExitStack], None]] = {
    "none": lambda *_: None,
    "another run": _another_run,
    "another plan's checkpoint": _another_checkpoint,
    "a run to its end": _finished,
    "a NaN among the weights": _poisoned,
    "another allocator": _another_allocator,
    "another kernel": _another_kernel,
    "no autocast": _no_autocast,
}


@pytest.mark.parametrize("row", [row for row in STARTS if "ranks" not in row], ids=lambda row: row["name"])
def test_what_is_not_as_planned_is_refused_at_the_start_and_the_plan_is_still_shown(
    row: dict[str, Any], starting: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = starting(row)
    first = next(place for place, line in enumerate(said.splitlines()) if "refused (" in line)
    text = "\n".join(said.splitlines()[first:]).replace("dormouse: ", "", 1)
    refused(row, text)
    write("new.json", compiled())
    for command in (
        ["verify", "plan.json"],
        ["show", "plan.json"],
        ["diff", "plan.json"],
        ["diff", "plan.json", "new.json"],
    ):
        assert front.main(command) == 0
    shown, complained = capsys.readouterr()
    assert shown and not complained


@pytest.mark.parametrize("row", [row for row in STARTS if "ranks" in row], ids=lambda row: row["name"])
def test_what_ranks_find_unlike_is_refused_by_all_and_told_by_one(row: dict[str, Any], tmp_path: Path) -> None:
    data = plans.corpus(tmp_path)
    if row["ranks"] == "two plans":
        made = [plans.plan(data, 2, steps=2, seed=seed) for seed in (1, 2)]
    elif row["ranks"] == "running statistics":
        made = [plans.plan(data, 2, steps=2, model="following:Model", opt="adamw")] * 2
    else:
        made = [compile_plan(request(), _cards("h200_pair"), account())] * 2
    words = []
    for rank, plan in enumerate(made):
        write(tmp_path / f"plan-{rank}.json", plan)
        place = [] if row["ranks"] == "two cards" else ["--data", str(data)]
        place += ["--model", "following:Model"] if row["ranks"] == "running statistics" else []
        words.append([str(tmp_path / f"plan-{rank}.json"), *place, "--run-dir", str(tmp_path / "run")])
    first, second = ranks.commands(words)
    assert (first["code"], second["code"]) == (3, 3) and second["words"] == ""
    refused(row, first["words"][first["words"].index("refused (") :])


def test_cards_in_another_order_are_found_by_their_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank shows itself its planned card alone, wherever the driver counts it."""
    made = compile_plan(request(), _cards("h200_pair"), account())
    case = {**load("h200_pair"), "otherwise": {"error": 3, "text": "Not Supported"}}
    answers, handle = case["answers"], "nvmlDeviceGetHandleByIndex({})".format
    answers[handle(0)], answers[handle(1)] = answers[handle(1)], answers[handle(0)]
    fleet_now = partial(probe.fleet, cards=FakeNvml(case))
    monkeypatch.setattr(honour.probe, "fleet", fleet_now)
    for rank in (0, 1):
        own = rank_slice(made, rank)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own.device)
        assert honour.device_facts(own)[0]["id"] == own.device
