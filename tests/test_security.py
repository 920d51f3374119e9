"""What docs/security.md says: documents run no code, name no paths, and steer no terminal."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plans
from executor import checkpoint, resume
from executor.guest import file_of
from planner import __main__ as front
from processes import environment
from schemas.form import Unfaithful, render
from schemas.seal import append_run, seal
from schemas.store import load, write
from test_project import _modules
from worlds import compiled, record, run_of

# Where a module is imported by a name that is made at run time: a user's own model, and three names that are constants.
BY_NAME = {"executor.guest", "executor.no_compiler", "planner.machine.nvml"}
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "jsonpickle", "runpy"}
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}


def _calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of each call in the file at ``path``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield _dotted(node.func), node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", _modules())
def test_nothing_is_unpickled_or_evaluated_and_no_shell_is_started(name: str) -> None:
    path = _modules()[name]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not {imported.partition(".")[0] for imported in names} & UNPICKLING
    for called, call in _calls(path):
        assert called not in CODE_FROM_TEXT | SHELLS, f"{name}, line {call.lineno}: {called}"
        assert not called.endswith(("torch.load", "dcp.load", "np.load")), f"{name}, line {call.lineno}: {called}"
        assert not any(word.arg == "shell" for word in call.keywords), f"{name}, line {call.lineno}: {called}"
        if called.endswith("import_module"):
            assert name in BY_NAME, f"{name}, line {call.lineno}: {called}"


def _forged() -> dict[str, Any]:
    """A faithful plan, as far as its seal goes, that names the module of a stranger wherever it has a name of one."""
    made = compiled()
    made["workload"]["model"] = made["request"]["model"] = "strange_model:Model"
    sealed = seal(made)
    return append_run(sealed, run_of(sealed))


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a trace where any of it is run, and a plan that names it."""
    trace = "open('the code of a stranger ran', 'w').close()\n"
    for module in ("strange_model.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / module).write_text(trace)
    write(tmp_path / "plan.json", _forged())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("planner", ["verify", "plan.json"], 0),
        ("planner", ["show", "plan.json"], 0),
        ("planner", ["diff", "plan.json"], 0),
        ("planner", ["diff", "plan.json", "plan.json"], 0),
        ("planner", ["--devices=cpu:2", "--model=tiny", "--set=layers=1", "--calibrate=plan.json"], 3),
        ("executor", ["plan.json"], 3),
        ("executor", ["plan.json", "--model", "other_model:Model"], 2),
    ],
)
def test_a_plan_has_no_code_run_that_the_command_does_not_name(
    module: str, words: list[str], code: int, stranger: Path
) -> None:
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=stranger, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert not (stranger / "the code of a stranger ran").exists()
    if code == 3 and module == "executor":
        assert f"the code of {stranger / 'strange_model.py'}" in done.stderr and "model-unnamed" in done.stderr


def test_finding_the_file_of_a_model_runs_none_of_it(stranger: Path) -> None:
    (stranger / "folder").mkdir()
    for name in ("__init__.py", "deep.py"):
        (stranger / "folder" / name).write_text("raise SystemExit('ran')")
    assert file_of("strange_model") == str(stranger / "strange_model.py")
    assert file_of("folder.deep") == str(stranger / "folder" / "deep.py")
    assert [file_of(name) for name in ("", "..", "../strange_model", "/etc/passwd", "a\x00b", "folder.none")] == [
        None
    ] * 6


@pytest.mark.parametrize(
    "name",
    ["../model:Model", "/tmp/model:Model", "a b:Model", "m:Model()", "m:a;b", ":Model", "m:", "m:__a\n"],
)
def test_the_name_of_a_model_is_a_name(name: str, tmp_path: Path) -> None:
    made = compiled()
    made["workload"]["model"] = name
    write(tmp_path / "plan.json", seal(made))
    with pytest.raises(Unfaithful, match="/workload/model: "):
        load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/passwd", "a/b", "..", "."])
def test_data_is_a_name_and_no_path(name: str, tmp_path: Path) -> None:
    made = compiled()
    made["workload"]["data"]["sources"][0]["name"] = name
    write(tmp_path / "plan.json", seal(made))
    with pytest.raises(Unfaithful, match="/workload/data/sources/0/name: "):
        load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "nested/../../outside.safetensors"])
def test_a_checkpoint_names_no_file_of_another_place(name: str, tmp_path: Path) -> None:
    import torch

    folder = checkpoint.save(tmp_path / "final", torch.nn.Linear(2, 2), {"model": "tiny", "config": {}})
    (tmp_path / "outside.safetensors").write_bytes((folder / checkpoint.MODEL).read_bytes())
    document = json.loads((folder / checkpoint.DOCUMENT).read_text())
    document["files"][name] = document["files"].pop(checkpoint.MODEL)
    body = {key: value for key, value in document.items() if key != "digest"}
    (folder / checkpoint.DOCUMENT).write_bytes(render({**body, "digest": checkpoint._digest(body)}))
    with pytest.raises(checkpoint.BadCheckpoint):
        checkpoint.load(folder)


def test_a_pickle_in_a_checkpoints_place_is_not_loaded(tmp_path: Path) -> None:
    import pickle

    import torch

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "unpickled"),)

    folder = checkpoint.save(tmp_path / "final", torch.nn.Linear(2, 2), {"model": "tiny", "config": {}})
    for name in (checkpoint.MODEL, checkpoint.DOCUMENT):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(checkpoint.BadCheckpoint):
            checkpoint.load(folder)
        (folder / name).write_bytes(kept)
    assert not (tmp_path / "unpickled").exists()
    assert resume.newest(tmp_path)["chosen"] is None


@pytest.mark.parametrize("words", [["show"], ["verify"], ["diff"]])
def test_a_documents_words_do_not_steer_the_terminal(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = compiled()
    made["ranks"][0]["kernels"]["\x1b]0;evil\x07"] = {**made["ranks"][0]["kernels"]["kda"], "why": "\x1b[2J"}
    made["ranks"][0]["memory"]["peak"]["why"] = "\x9b2J\u202e"
    write(tmp_path / "plan.json", seal(made))
    broken = seal({**made, "fleet": {**made["fleet"], "\x1b[2J": 1}})
    write(tmp_path / "broken.json", broken)
    for name, code in (("plan.json", 0), ("broken.json", 2)):
        assert front.main([*words, str(tmp_path / name)]) == code
        out, err = capsys.readouterr()
        assert (out + err).replace("\n", "").isprintable()


def test_a_refusal_of_forged_words_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record()
    for device in found["devices"].values():
        device["name"]["value"] = "\x1b]0;evil\x07 CPU"
        device["memory_free"]["value"] = 2**20
    write(tmp_path / "record.json", seal(found))
    words = [f"--devices={tmp_path / 'record.json'}", "--model=tiny", "--set=layers=1", "--fit=16"]
    assert front.main(words) == 3
    err = capsys.readouterr().err
    assert "\\x1b]0;evil\\x07 CPU" in err and err.replace("\n", "").isprintable()


def test_a_run_goes_to_places_that_the_command_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the plan has a text of free choice, a path in it leads nowhere."""
    from executor.run import Places, execute

    data = plans.corpus(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = plans.plan(data, 1, steps=2)
    made["request"]["set"] = {"x": "../../escape"}
    made["workload"]["config"]["keep_model"]["why"] = "../escape"
    made["ranks"][0]["batch"]["why"] = "/tmp/escape"
    before = set(tmp_path.rglob("*"))
    done = execute(seal(made), Places(None, Path("run"), (data,)))
    assert done.outcome == "finished"
    assert {path.relative_to(tmp_path).parts[:2] for path in set(tmp_path.rglob("*")) - before} == {("here", "run")}
