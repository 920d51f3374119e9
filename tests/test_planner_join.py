"""Several records as one: order of ranks, one node or several, links, and what must not be joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, load
from planner.machine import probe
from planner.passes.likeness import in_order
from planner.request import Usage
from schemas.document import reading
from schemas.form import render
from schemas.seal import seal
from schemas.store import loads, write

FIRST, SECOND, THIRD = (f"GPU-{place:08x}-1111-2222-3333-444455556666" for place in range(3))


def _joined(folder: Path, *records: Any) -> Any:
    paths = [str(folder / f"{place}.json") for place in range(len(records))]
    for path, record in zip(paths, records, strict=True):
        write(Path(path), record)
    joined = probe.record(paths)
    loads(render(joined), "dormouse.record", "joined")
    return joined


def _seen(case: str, visible: str, **environ: str) -> Any:
    named = {"CUDA_VISIBLE_DEVICES": visible, **environ}
    return probe.record("auto", beyond=True, environ=named, cards=FakeNvml(load(case)))


def _ids(record: Any) -> list[str]:
    return [identity for _, identity in in_order(record["devices"])]


def test_records_of_one_node_join_to_one_node_and_count_its_cpu_ranks_anew(tmp_path: Path) -> None:
    records = []
    for ranks, cores, free in ((1, 2, 5 * 10**9), (2, 4, 3 * 10**9)):
        record = probe.record(f"cpu:{ranks}")
        (node,) = record["nodes"].values()
        node |= {
            "cores": reading(cores, "", "probed", "made up"),
            "memory_free": reading(free, "B", "probed", "made up"),
        }
        records.append(seal(record))
    joined = _joined(tmp_path, *records)
    assert _ids(joined) == ["cpu-0", "cpu-1", "cpu-2"]
    (node,) = joined["nodes"].values()
    assert (node["cores"]["value"], node["memory_free"]["value"]) == (4, 3 * 10**9)


def test_records_of_two_alike_nodes_join_to_one_entry_that_stands_for_both(tmp_path: Path) -> None:
    first = probe.record("cpu:1")
    (name,) = first["nodes"]
    second = seal(json.loads(json.dumps(first).replace(name, "node-ffffffff")))
    joined = _joined(tmp_path, first, second)
    assert joined["nodes"][name]["members"] == [name, "node-ffffffff"]
    assert _ids(joined) == ["cpu-0", "cpu-1"]
    again = _joined(tmp_path, joined, seal(json.loads(json.dumps(first).replace(name, "node-eeeeeeee"))))
    assert again["nodes"][name]["members"] == [name, "node-ffffffff", "node-eeeeeeee"]


def test_each_rank_of_a_pair_is_probed_inside_its_own_limits_and_the_pair_keeps_its_link(tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    limits = {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=16G,1=8G",
    }
    whole, part = _seen("rtx_4090_pair", "0"), _seen("rtx_4090_pair", "1", **limits)
    assert part["links"]["link-0"]["pairs"] == [[SECOND, FIRST]]
    joined = _joined(tmp_path, part, whole)
    assert _ids(joined) == [SECOND, FIRST], "in the order of the files"
    strong, weak = joined["devices"][FIRST], joined["devices"][SECOND]
    assert (weak["memory_free"]["value"], strong["memory_free"]["value"]) == (8 * 2**30, 23 * 2**30)
    assert (weak["multiprocessors"]["value"], strong["multiprocessors"]["value"]) == (32, 128)
    assert len(joined["nodes"]) == 1
    (link,) = joined["links"].values()
    assert (link["pairs"], link["path"]["value"]) == ([[SECOND, FIRST]], "staged")


def test_without_the_daemon_the_limits_of_mps_do_not_hold(tmp_path: Path) -> None:
    limits = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    record = _seen("rtx_4090_pair", "0", **limits)
    assert record["devices"][FIRST]["multiprocessors"]["value"] == 128


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "0"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "many"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=16T"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "16G"),
    ],
)
def test_a_limit_of_mps_that_cannot_be_read_is_told(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    with pytest.raises(Usage, match=name):
        _seen("rtx_4090_pair", "0", CUDA_MPS_PIPE_DIRECTORY=str(tmp_path), **{name: text})


def test_links_to_cards_that_no_record_holds_do_not_enter_a_plan(tmp_path: Path) -> None:
    alone, pair = _seen("three_of_three_kinds", "1"), _seen("three_of_three_kinds", "0,2")
    write(tmp_path / "alone.json", alone)
    assert "links" in alone
    assert "links" not in probe.record([str(tmp_path / "alone.json")])
    assert "links" not in probe.record(
        "auto", environ={"CUDA_VISIBLE_DEVICES": "1"}, cards=FakeNvml(load("three_of_three_kinds"))
    )
    joined = _joined(tmp_path, pair, alone)
    assert _ids(joined) == [FIRST, THIRD, SECOND]
    pairs = [set(pair) for link in joined["links"].values() for pair in link["pairs"]]
    assert len(pairs) == 3
    assert {link["path"]["value"] for link in joined["links"].values()} == {"p2p", "staged"}


def test_what_was_timed_of_a_node_stays_together(tmp_path: Path) -> None:
    timed = [
        {f"loopback_{key}": reading(value, "", "benchmarked", "made up") for key, value in row.items()}
        for row in ({"rate": 1e9, "latency": 1e-4}, {"rate": 2e9, "latency": 2e-4})
    ]
    records = []
    for rows, ranks in zip(timed, (1, 2), strict=True):
        record = probe.record(f"cpu:{ranks}")
        next(iter(record["nodes"].values())).update(rows)
        records.append(seal(record))
    (node,) = _joined(tmp_path, *records)["nodes"].values()
    assert (node["loopback_rate"]["value"], node["loopback_latency"]["value"]) == (1e9, 1e-4)


def test_a_record_or_card_given_twice_and_unlike_toolchains_are_refused(tmp_path: Path) -> None:
    record = probe.record("cpu:1")
    with pytest.raises(Usage, match="one record twice"):
        _joined(tmp_path, record, record)
    other = {**record, "toolchain": {**record["toolchain"], "torch": reading("0.1", "", "probed", "another")}}
    with pytest.raises(Usage, match="differ in torch"):
        _joined(tmp_path, record, seal(other))
    with pytest.raises(Usage, match=r"GPU-b007.* is in two of the records: one card is one rank"):
        _joined(tmp_path, _seen("two_unlike", "1,0"), _seen("two_unlike", "0"))
    with pytest.raises(Usage, match="--benchmark"):
        probe.record([str(tmp_path / "0.json")], timed=True)
