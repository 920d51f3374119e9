"""The project as a whole: which way imports run, what is imported when, and that nothing in the working folder gets in
between."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from planner.refusals.page import page
from processes import ROOT
from schemas.store import load

ROOMS = ("schemas", "planner", "executor")  # each may import itself and those before it


def _modules() -> dict[str, Path]:
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def _imported(path: Path, *, inside_functions: bool = True) -> set[str]:
    """Every module that the file at ``path`` imports, packages included; relative imports are not used here."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if not inside_functions and id(node) in lazy:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", _modules())
def test_imports_run_one_way_from_executor_to_planner_to_schemas(name: str) -> None:
    room = name.split(".")[0]
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for imported in _imported(_modules()[name]):
        assert imported.split(".")[0] not in set(ROOMS) - set(allowed), f"{name} imports {imported}"


def test_there_is_no_import_cycle() -> None:
    modules = _modules()
    graph = {name: _imported(path) & modules.keys() - {name} for name, path in modules.items()}
    for package in [name for name in graph if modules[name].name == "__init__.py"]:
        graph[package] = {name for name in graph[package] if not name.startswith(package + ".")}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("room", ["schemas", "planner"])
def test_planning_imports_no_torch(room: str) -> None:
    for name, path in _modules().items():
        if name.split(".")[0] == room:
            heavy = {imported.split(".")[0] for imported in _imported(path, inside_functions=False)}
            assert not heavy & {"torch", "triton", "fla", "bitsandbytes", "numpy"}, name


# The gate makes small plans of its own and sets the link's arithmetic beside what it times; sampling, which has no
# plan, asks what a device may run. Nothing of a run does any of these.
PASSES_OUTSIDE_A_RUN = {
    "executor.gates.plans": {"planner.passes.compile", "planner.passes.likeness"},
    "executor.gates.link": {"planner.passes.link"},
    "executor.sample": {"planner.passes.legality"},
}


def test_the_executor_imports_no_pass_and_no_formula_that_predicts() -> None:
    """It cannot re-plan, and nothing that measures asks what should be."""
    modules = _modules()
    passes = {name for name in modules if name.startswith("planner.passes.")}
    assert {"planner.passes.compile", "planner.passes.cost", "planner.passes.constants"} <= passes
    for name, path in modules.items():
        if name.startswith("executor"):
            assert _imported(path) & passes == PASSES_OUTSIDE_A_RUN.get(name, set()), name


@pytest.mark.parametrize("shadow", ["schemas", "planner"])
@pytest.mark.parametrize("package", [True, False], ids=["a package", "a file"])
def test_a_shadow_in_the_working_folder_is_refused_before_it_runs(shadow: str, package: bool, tmp_path: Path) -> None:
    where = tmp_path / shadow / "__init__.py" if package else tmp_path / f"{shadow}.py"
    where.parent.mkdir(exist_ok=True)
    where.write_text("raise SystemExit('the shadow ran')\n")
    (tmp_path / "plan.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "executor", "plan.json"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert str(where) in done.stderr and "the shadow ran" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_page_of_refusals_is_the_list_of_refusals() -> None:
    assert (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_top_level_holds_what_the_design_says_and_nothing_beside() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split("/")[0] for line in tracked.splitlines()} == {
        *ROOMS, "plans", "tests", "docs", ".ci", ".gitignore", "README.md", "LICENSE", "Makefile", "pyproject.toml",
        "constraints.txt",
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_measured_plans_verify_and_hold_a_finished_run(path: Path) -> None:
    plan = load(path)
    assert plan["runs"] and all(run["outcome"] == "finished" for run in plan["runs"])
    assert path.name in (ROOT / "plans" / "README.md").read_text(encoding="utf-8")


def test_a_run_begins_without_any_module_that_might_be_a_shadow() -> None:
    """They are imported only when it is known that they are Dormouse's own."""
    code = "import sys, executor.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    told = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "executor" in told and not {"planner", "schemas", "torch"} & set(told)
