"""What NVML tells of cards and of pairs of them, as readings: the cases are its answers, recorded or made up."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

import record_nvml
from fake_nvml import CASES, FakeNvml, Handle, load
from planner.machine import nvml, probe
from planner.request import Usage
from schemas.form import render
from schemas.store import loads

FOLDER = Path(__file__).parent / "cases"
READ = json.loads((FOLDER / "cards_read.json").read_text("utf-8"))
LINKS = json.loads((FOLDER / "card_links.json").read_text("utf-8"))
USABLE = sorted(
    path.stem for path in CASES.glob("*.json") if path.stem not in ("mismatch", "no_permission", "one_lost")
)


def _fake(row: Any) -> FakeNvml:
    case = load(row["cards"])
    return FakeNvml({**case, "answers": case["answers"] | row.get("answers", {})})


@pytest.mark.parametrize("row", READ, ids=lambda row: f"{row['cards']}: {row['about']}")
def test_a_card_is_what_nvml_tells_and_unknown_where_it_does_not(row: Any) -> None:
    found = nvml.read(_fake(row), {}, "node-00000000", row.get("aside", ""))
    card = next(iter(found.devices.values()))
    assert {key: card[key]["value"] for key in row["expect"]} == row["expect"]
    for key, words in row.get("why", {}).items():
        assert words in card[key]["why"]


@pytest.mark.parametrize("row", LINKS, ids=lambda row: f"{row['cards']}: {row['about']}")
def test_a_pair_takes_the_path_that_nvml_tells(row: Any) -> None:
    found = nvml.read(_fake(row), row.get("environ", {}), "node-00000000")
    places = {identity: str(place) for place, identity in enumerate(found.devices)}
    links = [
        {
            "pairs": [places[first] + places[second] for first, second in link["pairs"]],
            **{key: item["value"] for key, item in link.items() if key != "pairs"},
        }
        for link in found.links.values()
    ]
    assert links == row["links"]
    for key, words in row.get("why", {}).items():
        assert words in found.links["link-0"][key]["why"]


@pytest.mark.parametrize("name", USABLE)
def test_the_record_of_every_case_is_faithful_and_its_unknowns_have_a_reason(name: str) -> None:
    record = probe.record("auto", environ={}, cards=FakeNvml(load(name)))
    loads(render(record), "dormouse.record", name)
    readings = [item for device in record["devices"].values() for item in device.values() if isinstance(item, dict)]
    assert all((item["value"] is None) == (item["basis"] == "unknown") and item["why"] for item in readings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mismatch", "NVML/RM version mismatch.*: reboot, or reload the driver; to plan for the CPU: --devices cpu"),
        ("no_permission", "Insufficient Permissions: this user may not ask the driver"),
        ("one_lost", "GPU is lost: a card fell off the bus"),
    ],
)
def test_a_broken_driver_is_one_message_with_its_remedy(name: str, words: str) -> None:
    with pytest.raises(Usage, match=words):
        probe.record("auto", environ={}, cards=FakeNvml(load(name)))


def test_a_fault_of_nvml_without_a_remedy_is_said_and_a_missing_driver_is_none() -> None:
    for code, text, notes in ((999, "Unknown Error", 1), (9, "Driver Not Loaded", 0)):
        case = {"answers": {"nvmlInit()": {"error": code, "text": text}}}
        found = nvml.read(FakeNvml(case), {}, "node-00000000")
        assert (found.devices, found.missing, len(found.notes)) == ({}, True, notes)
        assert found.driver is not None
        assert found.driver["why"] == f"NVML: {text}"


def test_a_card_that_this_user_may_not_touch_is_not_counted() -> None:
    row = {"cards": "two_unlike", "answers": {"nvmlDeviceGetHandleByIndex(1)": {"error": 4, "text": "No Permission"}}}
    found = nvml.read(_fake(row), {"CUDA_VISIBLE_DEVICES": "0"}, "node-00000000")
    assert list(found.devices) == ["GPU-a9210000-1111-2222-3333-444455556666"]


def test_a_card_has_its_data_sheet_beside_what_was_read() -> None:
    record = probe.record("auto", environ={}, cards=FakeNvml(load("gtx_1650_laptop")))
    (card,) = record["devices"].values()
    assert card["peak_bandwidth"]["basis"] == "datasheet"
    assert card["memory_total"]["basis"] == "probed"


def test_cards_alike_in_every_reading_share_an_entry_and_others_do_not() -> None:
    alike = probe.record("auto", environ={}, cards=FakeNvml(load("rtx_4090_pair")))
    assert [len(device["ids"]) for device in alike["devices"].values()] == [2]
    unlike = probe.record("auto", environ={}, cards=FakeNvml(load("rtx_3090_pair_nvlink")))
    assert [len(device["ids"]) for device in unlike["devices"].values()] == [1, 1]


def test_reading_asks_for_metadata_and_starts_nothing_on_a_card() -> None:
    fake = FakeNvml(load("h100_switch"))
    nvml.read(fake, {}, "node-00000000")
    asked = {call.partition("(")[0] for call in fake.calls}
    assert all(name.startswith(("nvmlDeviceGet", "nvmlSystemGet")) for name in asked - {"nvmlInit", "nvmlShutdown"})


def test_a_replayed_record_answers_no_question_that_was_not_asked() -> None:
    case = load("rtx_4090_pair")
    recorded = {"answers": {key: value for key, value in case["answers"].items() if "EccMode" not in key}}
    with pytest.raises(AssertionError, match="nvmlDeviceGetEccMode"):
        nvml.read(FakeNvml(recorded), {}, "node-00000000")


def test_the_executor_finds_its_card_anew_as_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from executor.honour import device_facts

    planned = "GPU-a9210000-1111-2222-3333-444455556666"
    monkeypatch.setattr(nvml, "module", lambda: FakeNvml(load("two_unlike")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", planned)
    rank: Any = SimpleNamespace(kind="cuda", device=planned)
    found, toolchain = device_facts(rank)
    assert (found["id"], found["kind"], found["name"]) == (planned, "cuda", "NVIDIA GeForce RTX 3060")
    assert (found["sm"], found["memory_free"]) == ("8.6", 11 * 2**30)
    assert toolchain["driver"] == "580.65.06"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-gone")
    assert device_facts(rank)[0]["kind"] == "cpu"


def _is_handle(part: Any) -> bool:
    return isinstance(part, ctypes._Pointer)


class _Driver:
    """NVML as nvidia-ml-py gives it: handles are C pointers. It answers as ``case`` does."""

    def __init__(self, case: Any) -> None:
        self._fake = FakeNvml(case)
        self._pointers: dict[str, Any] = {}
        self.NVMLError = self._fake.NVMLError

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> Any:
            known = {record_nvml.address(pointer): name for name, pointer in self._pointers.items()}
            plain = [
                known[record_nvml.address(part)] if isinstance(part, ctypes._Pointer) else part for part in arguments
            ]
            answer = getattr(self._fake, function)(*plain)
            if not isinstance(answer, Handle):
                return answer
            return self._pointers.setdefault(answer, ctypes.pointer(ctypes.c_int()))

        return call


@pytest.mark.parametrize("name", USABLE)
def test_what_is_recorded_of_cards_replays_to_the_same_readings(name: str) -> None:
    case = load(name)
    recorder = record_nvml.Recorder(_Driver(case))
    found = nvml.read(recorder, {}, "node-00000000")
    written = json.loads(json.dumps({"answers": recorder.answers}))
    assert nvml.read(FakeNvml(written), {}, "node-00000000") == found
    assert {call: case["answers"].get(call, case.get("otherwise")) for call in written["answers"]} == written["answers"]
