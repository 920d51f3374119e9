"""The record: a machine's own files and cards' answers as data, joined records, and the seal over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, load
from planner.machine import cpu, nvml, probe, toolchain
from planner.machine.benchmark import line
from schemas.document import reading
from schemas.form import render
from schemas.store import loads, write

CASES = Path(__file__).parent / "cases"
MACHINES = json.loads((CASES / "machines.json").read_text("utf-8"))


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


@pytest.mark.parametrize("case", MACHINES, ids=lambda case: case["name"])
def test_a_machine_is_read_from_its_own_files_within_its_limits(case: Any, tmp_path: Path) -> None:
    root = _tree(tmp_path, case["files"])
    device = cpu.device(["cpu-0"], "node-00000000", root, case["affinity"])
    found = {key: item["value"] for key, item in device.items() if isinstance(item, dict) and key != "name"}
    assert found == case["expect"]
    assert all(item["why"] for item in device.values() if isinstance(item, dict))


def test_a_node_is_named_without_its_host_name_and_stays_itself(tmp_path: Path) -> None:
    root = _tree(tmp_path, {"etc/machine-id": "abc\n"})
    name = cpu.node_id(root, "secret-host")
    assert name == cpu.node_id(root, "secret-host") != cpu.node_id(root, "other-host")
    assert "secret" not in name
    assert cpu.node_id(tmp_path / "nothing", "h").startswith("node-")


def test_a_record_is_faithful_holds_no_rate_untimed_and_names_alike_cpus_once() -> None:
    record = probe.record("cpu:3")
    loads(render(record), "dormouse.record", "record")
    assert list(record["devices"]) == ["cpu-0"]
    assert record["devices"]["cpu-0"]["ids"] == ["cpu-0", "cpu-1", "cpu-2"]
    assert not {"rate_fp32", "bandwidth"} & record["devices"]["cpu-0"].keys()
    (node,) = record["nodes"].values()
    assert set(node) == {"cores", "memory_total", "memory_free", "pinned_limit", "numa_nodes", "platform"}


def test_the_toolchain_is_read_without_importing_it() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from planner.machine import probe; probe.record('auto');"
        "print([m for m in ('torch', 'triton', 'fla', 'bitsandbytes', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert toolchain.read()["torch"]["value"]


def test_what_timing_gives_enters_the_record_and_its_ranks_share_the_cores() -> None:
    asked = []

    def timing(ranks: int, cores: int) -> Any:
        asked.append((ranks, cores))
        timed = reading(2.0, "FLOP/s", "benchmarked", "a test", low=1.0, high=3.0)
        curve = reading([[4096, 0.001]], "B, s", "benchmarked", "a test")
        node = {"loopback_rate": timed, "loopback_latency": timed, "loopback_curve": curve}
        return {"device": {"rate_fp32": timed}, "node": node}

    record = probe.record("cpu:2", timed=True, timing=timing)
    loads(render(record), "dormouse.record", "record")
    assert asked == [(2, cpu.cores()["value"])]
    assert record["devices"]["cpu-0"]["rate_fp32"]["value"] == 2.0


def test_the_loopback_line_is_recovered_from_points_that_lie_on_it() -> None:
    latency, rate = line([(size, 2e-4 + size / 3e9) for size in (4096, 65536, 2**20, 2**24)])
    assert latency == pytest.approx(2e-4)
    assert rate == pytest.approx(3e9)


# --- cards ---


def test_auto_takes_every_visible_card_and_its_record_is_faithful() -> None:
    record = probe.record("auto", environ={}, cards=FakeNvml(load("two_unlike")))
    loads(render(record), "dormouse.record", "record")
    strong = record["devices"]["GPU-a9210000-1111-2222-3333-444455556666"]
    assert (strong["sm"]["value"], strong["pcie_width_current"]["value"], strong["pcie_width_max"]["value"]) == (
        "8.6",
        8,
        16,
    )
    assert "idle" in strong["pcie_generation_current"]["why"]
    assert record["toolchain"]["driver"]["value"] == "580.65.06"


def test_auto_is_one_cpu_rank_where_no_card_is_visible_and_says_why() -> None:
    record = probe.record("auto", environ={}, cards=FakeNvml(load("no_driver")))
    assert record["devices"]["cpu-0"]["ids"] == ["cpu-0"]
    assert record["toolchain"]["driver"]["why"] == "NVML: NVML Shared Library Not Found"
    hidden = probe.record("auto", environ={"CUDA_VISIBLE_DEVICES": ""}, cards=FakeNvml(load("two_unlike")))
    assert list(hidden["devices"]) == ["cpu-0"]


def test_what_a_card_does_not_tell_is_unknown_with_its_reason_and_never_zero() -> None:
    cards = nvml.read(FakeNvml(load("unreadable")), {}, "node-00000000")
    (card,) = cards.devices.values()
    readings = [item for item in card.values() if isinstance(item, dict) and item["value"] is None]
    assert len(readings) >= 9
    assert all(item["basis"] == "unknown" and item["why"] for item in readings)
    assert cards.driver is not None
    assert cards.driver["why"] == "NVML: Driver Not Loaded"


def test_a_full_card_has_zero_bytes_free_which_is_a_reading() -> None:
    cards = nvml.read(FakeNvml(load("two_unlike")), {"CUDA_VISIBLE_DEVICES": "0"}, "node-00000000")
    (card,) = cards.devices.values()
    assert card["memory_free"]["value"] == 0


# --- carried records ---


def _save(folder: Path, name: str, record: Any) -> str:
    write(folder / name, record)
    return str(folder / name)


def test_a_carried_record_is_taken_as_it_is(tmp_path: Path) -> None:
    record = probe.record("cpu:2")
    assert probe.record([_save(tmp_path, "r.json", record)]) == record
