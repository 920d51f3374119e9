"""A sample of what `mutate.py` does by the thousand, and that it sees the faults that it is there for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mutate
from schemas import seal, store
from schemas.form import render
from worlds import compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@settings(mutate.THOROUGH, max_examples=120, derandomize=True)
@given(data=st.data())
def test_what_is_changed_is_read_for_what_it_is_or_refused_in_one_message(data: st.DataObject, folder: Path) -> None:
    mutate.judge(mutate.draw(data), folder)


def _lie() -> mutate.Mutant:
    plan = compiled()
    plan["ranks"][0]["memory"]["peak"] |= {"value": "much", "low": "little", "high": "more"}
    for end in ("low", "high"):
        del plan["ranks"][0]["memory"]["peak"][end]
    mutate.reseal(plan, rebase=True)
    return mutate.Mutant("plan", render(plan), "a peak that is no number")


def _two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import __main__ as front

    said = front._said
    monkeypatch.setattr(front, "_said", lambda message, code=2: said(f"{message}", said("once more", code)))


def _no_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "refuse_other_values", lambda *_: None)


def _another_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = store.parse
    monkeypatch.setattr(store, "refuse_other_form", lambda *_: None)
    monkeypatch.setattr(store, "parse", lambda data, name: plain(data.replace(b"\t", b" "), name))


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (_no_kinds, "Traceback"),
        (_two_lines, "2 lines for one mistake"),
        (None, ""),
    ],
)
def test_a_planted_fault_is_seen(planted: Any, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted is None:
        mutate.judge(_lie(), folder)
        return
    planted(monkeypatch)
    with pytest.raises(mutate.Fault, match=says):
        mutate.judge(_lie(), folder)


def test_a_document_that_is_read_for_another_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _another_reading(monkeypatch)
    data = render(compiled()).replace(b'": ', b'":\t', 1)
    with pytest.raises(mutate.Fault, match="means something else than what is there"):
        mutate.judge(mutate.Mutant("plan", data, "a tab"), folder)


def test_a_command_that_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(_: list[str]) -> Iterator[int]:
        while True:
            pass

    monkeypatch.setattr(mutate, "DEADLINE_SECONDS", 0.2)
    with pytest.raises(mutate.Fault, match=r"not done after 0\.2 s"):
        mutate._ran(hangs, ["verify"], (0,))  # type: ignore[arg-type]
