"""What people who train on cards of their own have hit, kind by kind: what Dormouse does there, and by which tests.

tests/cases/known_failures.json has a row for each kind, with a reason where tests alone do not show it; and
specified_refusals.json what the specification refuses, with the code of the refusal, or the test of what was built.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.refusals.rules import RULES
from test_project import _modules
from worlds import cases

HERE = Path(__file__).parent
# Calls that answer another question than the one that is asked, and pairs that stop reducing without a word.
MISLEADING = {"is_bf16_supported", "no_sync", "set_static_graph"}


@cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", cases("known_failures.json"), ids=lambda row: row["kind"])
def test_what_people_hit_is_held_by_tests_that_are_there(row: dict[str, Any]) -> None:
    assert row["tests"] and row["is"]
    for named in row["tests"]:
        file, _, test = named.partition("::")
        assert test in _tests(file), named


@pytest.mark.parametrize("row", cases("specified_refusals.json"), ids=lambda row: row["asks"])
def test_what_the_specification_refuses_is_refused_or_built(row: dict[str, Any]) -> None:
    assert ("code" in row) != ("built" in row)
    if "code" in row:
        assert row["code"] in {rule.code for rule in RULES}
    else:
        file, _, test = row["built"].partition("::")
        assert test in _tests(file)


def test_every_kind_stands_once() -> None:
    kinds = [row["kind"] for row in cases("known_failures.json")]
    assert len(set(kinds)) == len(kinds) == 25


def test_what_misleads_is_never_called() -> None:
    for name, path in _modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
                assert called not in MISLEADING, f"{name}, line {node.lineno}: {called}"
                assert not {word.arg for word in node.keywords} & {"static_graph"}, f"{name}, line {node.lineno}"
                reenters = [word.value for word in node.keywords if word.arg == "use_reentrant"]
                assert all(isinstance(value, ast.Constant) and value.value is False for value in reenters), name
