"""Recording under fire: a plan that is deleted, a disk that is full or fills up, a folder that is read-only. The plan
stays whole, one message says what became of the run, and nothing is left lying about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment
from schemas.store import load
from test_executor_command import befallen, command


def test_a_run_whose_plan_was_deleted_is_kept_in_its_folder_and_makes_no_plan_anew(tmp_path: Path) -> None:
    path, data = befallen(tmp_path)
    done = command(tmp_path, path, "--data", data, FAULT="delete 0")
    (kept,) = tmp_path.glob("runs/*/record-*.json")
    assert done.returncode == 4 and not path.exists()
    assert f"{path}: was removed while its run went on" in done.stderr
    assert f"; to add it: cp {kept.relative_to(tmp_path)} {path}\n" in done.stderr
    assert load(kept)["runs"][0]["outcome"] == "finished"


def test_a_disk_that_is_full_refuses_the_run(tmp_path: Path) -> None:
    path, _ = befallen(tmp_path)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    script = limit + "import runpy; runpy.run_module('executor', run_name='__main__', alter_sys=True)"
    words = [sys.executable, "-c", script, str(path), "--model", "befallen:Model"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "refused (record-unwritable)" in done.stderr, done.stderr
    assert f"the folder {tmp_path} takes no file of " in done.stderr and "(File too large)" in done.stderr
    assert load(path)["runs"] == [] and not (tmp_path / "runs").exists()


def test_a_disk_that_fills_up_leaves_the_plan_whole_and_the_loss_is_told(tmp_path: Path) -> None:
    path, data = befallen(tmp_path)
    before = path.read_bytes()
    done = command(tmp_path, path, "--data", data, FAULT="full 0")
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
    assert "left no model in runs/" in done.stderr and f"could not be recorded in {path} (" in done.stderr
    assert "kept in no file at all: free some space before the next run" in done.stderr
    assert path.read_bytes() == before
    assert not [found for found in tmp_path.rglob("*") if found.name.endswith(".new")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes")
def test_a_folder_that_is_read_only_refuses_the_run(tmp_path: Path) -> None:
    path, data = befallen(tmp_path)
    tmp_path.chmod(0o555)
    try:
        done = command(tmp_path, path, "--data", data)
    finally:
        tmp_path.chmod(0o755)
    assert done.returncode == 3 and "refused (record-unwritable)" in done.stderr
    assert "takes no file of" in done.stderr and "(Permission denied)" in done.stderr
