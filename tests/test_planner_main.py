"""The command as a person starts it: exit codes, one message a mistake, nothing on stdout when refused, and speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import handmade
from planner import __main__ as front
from planner import origin
from processes import ROOT, environment
from schemas.form import render
from schemas.store import load, write


@pytest.fixture
def plan(tmp_path: Path) -> str:
    write(tmp_path / "plan.json", handmade.plan())
    return str(tmp_path / "plan.json")


@pytest.fixture
def run_plan(tmp_path: Path) -> str:
    write(tmp_path / "run.json", handmade.run(handmade.plan(), {"/step/seconds": 0.2}))
    return str(tmp_path / "run.json")


def _start(*arguments: str, cwd: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60, **more)


def test_verify_show_and_diff_of_a_faithful_plan_are_done(plan: str, run_plan: str, capsys: Any) -> None:
    for arguments in (["verify", plan], ["show", run_plan], ["diff", run_plan], ["diff", plan, run_plan]):
        assert front.main(arguments) == 0
        out, err = capsys.readouterr()
        assert out
        assert not err


def test_more_ranks_than_memory_is_there_for_are_told_to_be_fewer(tmp_path: Path) -> None:
    done = _start("--devices", "cpu:4000", cwd=tmp_path)
    assert done.returncode == 3 and not done.stdout
    assert "over 0 B (free memory / 4000 - 512 MiB)" in done.stderr
    assert "to fix: fewer ranks (--devices), or memory that others hold given free" in done.stderr


def test_fail_over_ends_with_one_and_the_rows_are_printed_all_the_same(plan: str, run_plan: str, capsys: Any) -> None:
    assert front.main(["diff", run_plan, "--fail-over", "step=5"]) == 1
    assert "misses by 113 %" in capsys.readouterr().out
    assert front.main(["diff", run_plan]) == 0
    assert front.main(["diff", plan, "--fail-over", "1000"]) == 1
    assert front.main(["diff", plan]) == 0


def test_a_limit_of_a_kind_that_nothing_is_of_is_wrong_usage(run_plan: str, plan: str, capsys: Any) -> None:
    for path in (run_plan, plan):
        assert front.main(["diff", path, "--fail-over", "fit=1"]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert "--fail-over fit=1: this plan has no measurable row of that kind; it has memory, step" in err


def test_runs_are_counted_from_one(run_plan: str, capsys: Any) -> None:
    assert front.main(["diff", run_plan, "--run", "1"]) == 0
    assert "run 1 of 1: finished after 60 steps." in capsys.readouterr().out
    assert front.main(["diff", run_plan, "--run", "0"]) == 2
    assert front.main(["diff", run_plan, "--run", "2"]) == 2
    assert "the plan has 1 run, counted from 1" in capsys.readouterr().err


def test_json_is_a_document_of_the_diff_schema(run_plan: str, capsysbinary: Any) -> None:
    assert front.main(["diff", "--format", "json", run_plan]) == 0
    assert json.loads(capsysbinary.readouterr().out)["format"] == "dormouse.diff"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nowhere.json"], "nowhere.json: cannot be read"),
        (["show"], "required: PLAN"),
        (["report"], "there is no command 'report': one of probe, show, diff, verify"),
        (["report", "--help"], "there is no command 'report'"),
        (["--fit-policy", "in-order"], "--fit-policy in-order needs --fit: without a budget"),
        (["--fit-policy", "in-order", "--fit", "off"], "needs --fit other than off"),
        (["--opt", "adamw", "--set", "muon_lr=0.1"], "--set muon_lr needs --opt muon"),
        (["--batch", "0"], "--batch is 0: the least is 1"),
        (["--devices", "RTX3060"], "is several cards: one of rtx-3060-8gb, rtx-3060-12gb"),
        (["--devices", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--opt", "sgd"], "invalid choice"),
        (["--calibrate", "p.json"], "p.json: cannot be read: No such file or directory"),
        (["--data", "nowhere.txt"], "No such file"),
        (["--model", "huge"], "huge"),
        (["--set", "layers=many"], "layers"),
    ],
)
def test_a_mistake_is_one_message_and_code_two(arguments: list[str], words: str, capsys: Any) -> None:
    assert front.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_changed_byte_is_code_two_for_every_command(run_plan: str, tmp_path: Path, capsys: Any) -> None:
    data = Path(run_plan).read_bytes()
    broken = tmp_path / "broken.json"
    broken.write_bytes(data.replace(b"made by hand", b"made by hanD", 1))
    for arguments in (["verify"], ["show"], ["diff"], ["diff", run_plan]):
        assert front.main([*arguments, str(broken)]) == 2
        assert "was changed after sealing" in capsys.readouterr().err


def test_two_plans_take_neither_limits_nor_a_run(plan: str, capsys: Any) -> None:
    for more in (["--fail-over", "5"], ["--run", "1"]):
        assert front.main(["diff", plan, plan, *more]) == 2
        assert "not two plans" in capsys.readouterr().err


def test_probe_prints_a_record_that_can_be_carried(tmp_path: Path, capsysbinary: Any) -> None:
    assert front.main(["probe", "--devices", "cpu:2"]) == 0
    path = tmp_path / "record.json"
    path.write_bytes(capsysbinary.readouterr().out)
    record = load(path, "dormouse.record")
    assert front.main(["probe", "--devices", str(path)]) == 0
    assert capsysbinary.readouterr().out == render(record)


def test_compiling_prints_the_plan_on_stdout_and_the_summary_on_stderr(tmp_path: Path) -> None:
    done = _start("--devices", "cpu:2", "--batch", "2", cwd=tmp_path)
    assert done.returncode == 0
    (tmp_path / "plan.json").write_text(done.stdout)
    assert load(tmp_path / "plan.json")["request"]["batch"] == 2
    assert "fit=off: est_peak=" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_carried_record_gives_the_same_bytes_each_time_whatever_its_file_is_called(tmp_path: Path) -> None:
    record = _start("probe", "--devices", "cpu:2").stdout
    plans = []
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(record)
        plans.append(_start("--devices", name, cwd=tmp_path).stdout)
    assert plans[0] == plans[1] != ""
    assert "one.json" not in plans[0]


def test_a_refusal_is_code_three_with_nothing_on_stdout(capsys: Any) -> None:
    assert front.main(["--devices", "cpu:2", "--shard", "fsdp"]) == 3
    out, err = capsys.readouterr()
    assert not out
    assert "fsdp-muon" in err


SMALL = [f"--set={pair}" for pair in ("layers=1", "width=32", "heads=2")]
EXPERTS = [f"--set={pair}" for pair in ("experts=2", "expert_ffn=16", "moe_capacity=1.25")]
TABLES = [f"--set={pair}" for pair in ("engram_rows=50", "engram_heads=1", "engram_dim=8")]


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        ("kernel-unsupported", ["--devices=cpu", "--set=kda=chunk_fla"], "chunk_fla runs on cuda, not on cpu"),
        ("moe-capacity-fleet", ["--devices=cpu:2", *EXPERTS], "to fix: --set moe_capacity=0 (dropless)"),
        ("mechanism-fleet", ["--devices=cpu:2", "--mechanisms=engram_ram", *TABLES], "the tables would differ by rank"),
        ("mechanisms-exclude", ["--devices=cpu", "--mechanisms=act_ckpt,recompute"], "leave act_ckpt or recompute out"),
        ("mechanism-unavailable", ["--devices=gtx-1080-ti", "--mechanisms=optim_8bit"], "GTX 1080 Ti"),
        ("mechanism-unavailable", ["--devices=rtx-3090+rtx-4090", "--mechanisms=optim_8bit"], "kinds of device"),
        ("adamw-fused", ["--devices=cpu", "--set=adamw=fused"], "to fix: --set adamw=auto"),
        ("mechanism-unavailable", ["--devices=cpu", "--mechanisms=optim_8bit", "--set=adamw=ieee"], "adamw=ieee was"),
    ],
)
def test_what_the_whole_model_cannot_have_is_refused(
    code: str, arguments: list[str], words: str, capsysbinary: Any
) -> None:
    assert front.main([*SMALL, "--model=tiny", *arguments]) == 3
    out, err = capsysbinary.readouterr()
    text = err.decode()
    assert not out and f"refused ({code})" in text and words in text
    assert all(part in text for part in ("found:", "why:", "to fix:"))


def test_a_fused_kernel_is_not_planned_for_heads_wider_than_it_takes(capsysbinary: Any) -> None:
    wide = ["--model=tiny", "--devices=rtx-4090", "--set=layers=1", "--set=width=512", "--set=heads=1"]
    assert front.main([*wide, "--set=kda=chunk_fla"]) == 3
    assert b"chunk_fla takes a head of at most 256, not 512" in capsysbinary.readouterr().err
    assert front.main(wide) == 0
    assert b'"kda": {"asked": null, "chosen": "chunk_torch"' in capsysbinary.readouterr().out


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["topk=2"], "topk=2 would change nothing beside experts=0"),
        (["expert_ffn=64"], "expert_ffn=64 would change nothing beside experts=0"),
        (["experts=2", "expert_ffn=16", "ffn=64"], "ffn=64 would change nothing beside experts=2"),
        (["engram_dim=8"], "engram_dim=8 would change nothing beside engram_rows=0"),
    ],
)
def test_a_size_of_what_the_model_has_none_of_is_refused(asked: list[str], reason: str, capsysbinary: Any) -> None:
    assert front.main([*SMALL, "--model=tiny", "--devices=cpu", *(f"--set={pair}" for pair in asked)]) == 2
    assert reason in capsysbinary.readouterr().err.decode()


def test_a_capacity_of_experts_on_one_rank_and_their_balance_on_two_are_planned(capsysbinary: Any) -> None:
    for asked in (["--devices=cpu", *EXPERTS], ["--devices=cpu:2", *EXPERTS[:2], "--set=moe_lb_coef=0.01"]):
        assert front.main([*SMALL, "--model=tiny", *asked]) == 0
        assert b'"moe_lb_coef"' in capsysbinary.readouterr().out


def test_the_model_without_being_asked_is_tiny_on_cpu_ranks_and_small_on_cards() -> None:
    for kinds, model in ((["cpu", "cpu"], "tiny"), (["cuda"], "small"), (["cuda", "cpu"], "tiny")):
        record = {"devices": {str(place): {"kind": kind} for place, kind in enumerate(kinds)}}
        assert front._default_model(record) == model


def test_a_reader_that_goes_away_is_no_traceback(run_plan: str) -> None:
    command = f"'{sys.executable}' -m planner show '{run_plan}' | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141)
    assert not done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_message(run_plan: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "planner", "show", run_plan]
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


# --- what only reads a plan ---


@pytest.mark.parametrize("arguments", [["show"], ["verify"], ["diff"]])
def test_reading_a_plan_imports_nothing_heavy(arguments: list[str], run_plan: str) -> None:
    code = (
        "import sys; from planner.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'pynvml', 'numpy', 'executor', 'platformdirs'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments, run_plan]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


# --- shadows ---


def test_a_package_of_the_working_folder_that_shadows_ours_is_refused_and_not_run(plan: str, tmp_path: Path) -> None:
    for name in ("schemas", "executor"):
        folder = tmp_path / f"in_{name}"
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("print('the shadow ran')\n")
        done = _start("verify", plan, cwd=folder)
        assert done.returncode == 2
        assert str(folder / name / "__init__.py") in done.stderr
        assert "shadow ran" not in done.stdout + done.stderr


def test_a_module_that_shadows_is_refused_and_a_mere_folder_is_none(plan: str, tmp_path: Path) -> None:
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "schemas.py").write_text("")
    assert _start("verify", plan, cwd=tmp_path / "module").returncode == 2
    (tmp_path / "folder" / "schemas").mkdir(parents=True)
    assert _start("verify", plan, cwd=tmp_path / "folder").returncode == 0


def test_packages_at_home_pass_and_unknown_ones_are_no_matter() -> None:
    origin.check(("schemas", "executor", "there_is_no_such_package"), ROOT)
    with pytest.raises(origin.Shadowed, match=r"schemas/__init__.py shadows"):
        origin.check(("schemas",), ROOT / "tests")
