"""The account and its cache: made once, made again when what it was made from or the file itself has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from planner import accounts
from planner.request import Usage
from schemas.form import render
from schemas.seal import seal

FORM = {"one": 1, "b": 2, "t": 3, "bt": 4}
COST: dict[str, Any] = dict.fromkeys(("flops", "bytes", "launches", "host", "link"), FORM)
COST |= {"saved": {"mix": FORM}, "beyond": [{"one": 1, "bt": 2, "inside": 0}]}
UPDATE = {"flops": 1, "bytes": 1, "launches": 1, "temporary": 1}


def _account(model: str = "tiny") -> bytes:
    return render(
        seal(
            {
                "format": "dormouse.account",
                "format_version": 4,
                "made_from": {
                    "model": model,
                    "set": {},
                    "opt": "muon",
                    "kinds": ["cpu"],
                    "torch": "2",
                    "source": "ab" * 32,
                },
                "digest": "cd" * 32,
                "defaults": {"batch": 4, "seq": 128, "steps": 60},
                "config": {"layers": {"asked": None, "chosen": 4, "why": "preset"}},
                "granule": 16,
                "parameters": {"muon": 1, "adamw": 1, "tables": 0},
                "frozen": 0,
                "buffers": 0,
                "tensors": {"muon": 1, "adamw": 1, "tables": 0},
                "blocks": {"muon": 0, "adamw": 0, "tables": 0},
                "units": [{"name": "", "tensors": [{"route": "muon", "rows": 1, "row": 1, "count": 1}]}],
                "matrices": [{"name": "w", "shape": [2, 2]}],
                "shapes": {"fp32": {}, "bf16": {}},
                "apply": {"fp32": UPDATE, "bf16": UPDATE},
                "adamw": {"ieee": UPDATE, "fused": UPDATE, "8bit": UPDATE},
                "tables": UPDATE,
                "compute": {"cpu": {"none": {"fp32": {"plain": COST}}}},
                "kernels": {},
                "kernel_shapes": {},
                "mechanisms": {},
            }
        )
    )


class _Maker:
    def __init__(self, answer: bytes) -> None:
        self.answer, self.asked = answer, list[Any]()

    def __call__(self, data: bytes) -> bytes:
        self.asked.append(json.loads(data))
        return self.answer


def _said() -> tuple[list[str], Any]:
    lines: list[str] = []
    return lines, lines.append


def test_an_account_is_made_once_and_then_read_from_the_cache(tmp_path: Path) -> None:
    maker, (lines, say) = _Maker(_account()), _said()
    first, second = (accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker) for _ in range(2))
    assert first == second
    assert maker.asked == [{"model": "tiny", "set": {}, "opt": "muon", "kinds": ["cpu", "cuda"]}]
    assert not lines


def test_another_setting_optimizer_source_or_tuning_is_another_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, (_, say) = _Maker(_account()), _said()
    accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    accounts.account("tiny", {"layers": "2"}, "muon", say=say, folder=tmp_path, make=maker)
    accounts.account("tiny", {}, "adamw", say=say, folder=tmp_path, make=maker)
    monkeypatch.setattr(accounts, "source", lambda: {"executor": "edited"})
    accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "dormouse" / "tuned" / "card").mkdir(parents=True)
    (tmp_path / "dormouse" / "tuned" / "card" / "index.json").write_text("{}")
    accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    assert len(maker.asked) == 5


def test_a_corrupt_cached_account_is_said_and_made_again(tmp_path: Path) -> None:
    maker, (lines, say) = _Maker(_account()), _said()
    found = accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    (path,) = (tmp_path / "accounts").iterdir()
    for broken in (b"", b"{", path.read_bytes().replace(b'"preset"', b'"Preset"')):
        path.write_bytes(broken)
        assert accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker) == found
        assert "made again" in lines.pop()
    assert len(maker.asked) == 4


def test_a_users_own_module_is_never_cached_since_no_key_covers_its_source(tmp_path: Path) -> None:
    maker, (_, say) = _Maker(_account("mine:Model")), _said()
    for _ in range(2):
        accounts.account("mine:Model", {}, "muon", say=say, folder=tmp_path, make=maker)
    assert len(maker.asked) == 2
    assert not list(tmp_path.iterdir())


def test_a_cache_that_takes_no_file_is_said_and_planning_goes_on(tmp_path: Path) -> None:
    (tmp_path / "accounts").write_text("a file in the way")
    maker, (lines, say) = _Maker(_account()), _said()
    assert accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)["granule"] == 16
    assert "was not cached" in lines[0]


def test_an_account_that_is_not_faithful_is_not_believed(tmp_path: Path) -> None:
    _, say = _said()
    with pytest.raises(Usage, match=r"--model tiny: .* is not faithful"):
        accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=_Maker(b"{}"))
    assert not list(tmp_path.iterdir())


def test_the_newest_accounts_are_kept_and_the_one_just_made_among_them(tmp_path: Path) -> None:
    folder = tmp_path / "accounts"
    folder.mkdir()
    for place in range(70):
        (folder / f"{place:02}.json").write_text("older")
        os.utime(folder / f"{place:02}.json", (place + 2**32, place + 2**32))  # a clock that was wrong
    (folder / "notes.txt").write_text("not an account")
    maker, (lines, say) = _Maker(_account()), _said()
    accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    left = {path.name for path in folder.iterdir()}
    assert {f"{place:02}.json" for place in range(7, 70)} | {"notes.txt"} < left and len(left) == 65
    accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)
    assert len(maker.asked) == 1 and not lines


def test_accounts_that_cannot_be_removed_never_fail_planning(tmp_path: Path) -> None:
    for place in range(70):
        (tmp_path / "accounts" / f"{place:02}.json").mkdir(parents=True)
    maker, (lines, say) = _Maker(_account()), _said()
    assert accounts.account("tiny", {}, "muon", say=say, folder=tmp_path, make=maker)["granule"] == 16
    assert not lines


USERS = """
import os
from torch import nn

class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        print("hello")
        os.write(1, b"past Python\\n")
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.head(self.embed(inputs)).flatten(0, 1), targets.flatten())

class Gone(Prints):
    def __init__(self):
        super().__init__()
        os._exit(0)
"""


def _users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "printing_model.py").write_text(USERS)
    monkeypatch.chdir(folder)


def test_what_a_users_model_prints_goes_to_stderr_and_not_into_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _users(tmp_path, monkeypatch)
    lines, say = _said()
    found = accounts.account("printing_model:Prints", {}, "muon", say=say, folder=tmp_path)
    assert found["parameters"]["adamw"] == 256 * 8 * 2 + 256
    out, err = capfd.readouterr()
    assert out == "" and "hello" in err and "past Python" in err and not lines


def test_a_users_model_that_ends_the_process_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _users(tmp_path, monkeypatch)
    with pytest.raises(Usage, match=r"^--model printing_model:Gone: its code ended the process .* exit code 0$"):
        accounts.account("printing_model:Gone", {}, "muon", say=print, folder=tmp_path)


@pytest.mark.parametrize(
    ("code", "lines", "said"),
    [
        (1, ["Traceback (most recent call last):", "KeyError: 'x'", ""], "it could not be counted: KeyError: 'x'"),
        (3, [], "its code ended the process that counted it, with exit code 3"),
        (-9, ["killed"], "the process that counted it was ended by SIGKILL"),
    ],
)
def test_how_the_counting_ended_is_told_in_one_line(code: int, lines: list[str], said: str) -> None:
    assert accounts._ended(code, lines) == said


def test_the_source_digest_covers_every_file_without_importing_it() -> None:
    import subprocess
    import sys

    code = "import sys; from planner import accounts; accounts.source(); print('executor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert set(accounts.source()) == {"executor", "schemas"}
