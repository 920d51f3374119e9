"""The node around the devices, and what is known of cards and of torch where NVML or torch itself is not asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, load
from planner.machine import arches, host, nvml, probe, toolchain, torch_cards
from planner.machine import body as machine
from schemas.form import render
from schemas.store import loads

HOSTS = json.loads((Path(__file__).parent / "cases" / "hosts.json").read_text("utf-8"))


@pytest.mark.parametrize("case", HOSTS, ids=lambda case: case["about"])
def test_a_node_is_read_from_the_kernels_own_files(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name, text in case["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    node = host.node(tmp_path, 8)
    assert {key: node[key]["value"] for key in case["expect"]} == case["expect"]
    for key, words in case.get("why", {}).items():
        assert words in node[key]["why"]


def test_windows_is_told_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert host.platform(tmp_path)["value"] == "windows"


# --- the architectures of the installed torch ---


def _torch(folder: Path, data: bytes, name: str = "libtorch_python.so") -> Path:
    (folder / "lib").mkdir()
    (folder / "lib" / name).write_bytes(data)
    return folder


def test_architectures_are_read_from_torchs_library_without_importing_it(tmp_path: Path) -> None:
    flags = b"sm_75 sm_80 sm_86 sm_90a sm_100 sm_120 compute_120"
    noise = b"\x7fELF\0sm_\0sm_99\0compute_\0what sm_75 sm_80 is\0"
    found = arches.read(_torch(tmp_path, noise + flags + b"\0" + noise), "13.0")
    assert found["value"] == ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"]
    assert found["basis"] == "probed"
    assert "PTX of 12.0" in found["why"]


@pytest.mark.parametrize("data", [b"\0sm_75\0", b"\0sm_75 sm_80\0sm_75 sm_90\0", b"", b"\0sm_75 sm_80 junk\0"])
def test_a_list_that_is_not_there_once_is_asked_of_torch(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arches, "_asked", lambda: "sm_61 sm_70")
    found = arches.read(_torch(tmp_path, data), "12.6")
    assert found["value"] == ["6.1", "7.0"]
    assert "process of its own" in found["why"]
    monkeypatch.setattr(arches, "_asked", lambda: None)
    assert arches.read(tmp_path, "12.6")["value"] is None


def test_a_cpu_build_and_no_torch_have_no_architectures_and_say_so(tmp_path: Path) -> None:
    assert arches.read(tmp_path, None)["why"] == "this torch is a CPU build"
    assert arches.read(None, None)["why"] == "torch is not installed"
    assert arches._asked() is None or toolchain.for_cuda()


# --- cards without NVML ---

ROWS = [
    {"name": "Card A", "sm": "8.6", "memory_total": 2**33, "multiprocessors": 28, "uuid": "aaaa"},
    {"name": "Card B MIG 1g.5gb", "sm": "8.0", "memory_total": 2**32, "multiprocessors": 14, "uuid": "bbbb"},
    {"name": "Card C", "sm": "7.5", "memory_total": 2**32, "multiprocessors": 14, "uuid": ""},
]


def _without_nvml(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[str]:
    monkeypatch.setattr(nvml, "module", lambda: None)
    monkeypatch.setattr(toolchain, "for_cuda", lambda: True)
    monkeypatch.setattr(torch_cards, "driver_present", lambda: True)
    monkeypatch.setattr(torch_cards, "ask", lambda environ: rows)
    said: list[str] = []
    machine.body("auto", {}, None, said.append)
    return said


def test_without_nvml_torch_tells_the_cards_and_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _without_nvml(monkeypatch, ROWS)
    record = probe.record("auto", environ={})
    loads(render(record), "dormouse.record", "record")
    assert sorted(record["devices"]) == ["GPU-aaaa", "MIG-bbbb", "cuda-2"]
    card = record["devices"]["GPU-aaaa"]
    assert (card["sm"]["value"], card["memory_total"]["value"]) == ("8.6", 2**33)
    assert card["memory_free"]["value"] is None
    assert "NVML cannot be asked" in card["name"]["why"]
    assert record["devices"]["MIG-bbbb"]["mig"]["value"] == "slice"
    assert said == ["nvidia-ml-py is not installed; the cards are told by torch alone"]


def test_a_card_without_uuid_keeps_its_place_among_all_cards_whatever_is_visible() -> None:
    rows = [{**ROWS[2], "name": f"Card {place}"} for place in range(2)]
    assert list(torch_cards.entries(rows, "node", {})) == ["cuda-0", "cuda-1"]
    assert list(torch_cards.entries(rows, "node", {"CUDA_VISIBLE_DEVICES": "3, 1"})) == ["cuda-3", "cuda-1"]


@pytest.mark.parametrize("rows", [None, []])
def test_where_neither_tells_there_is_one_cpu_rank(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _without_nvml(monkeypatch, rows)
    assert list(probe.record("auto", environ={})["devices"]) == ["cpu-0"]
    assert said == ["nvidia-ml-py is not installed; torch shows no card"]


def test_torch_is_not_started_where_there_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not torch_cards.driver_present(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert torch_cards.driver_present(tmp_path)


def test_torch_is_not_started_where_nvml_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(environ: Any) -> Any:
        raise AssertionError("torch was asked")

    _without_nvml(monkeypatch, [])
    monkeypatch.setattr(torch_cards, "ask", never)
    monkeypatch.setattr(nvml, "module", lambda: FakeNvml(load("two_unlike")))
    assert len(probe.record("auto", environ={})["devices"]) == 2
    assert list(probe.record("cpu:1", environ={})["devices"]) == ["cpu-0"]


def test_the_fallback_really_runs_in_a_process_of_its_own() -> None:
    rows = torch_cards.ask({"CUDA_VISIBLE_DEVICES": ""})
    assert rows == []
