"""The timing of cards, with CPUs in their place: the same processes, protocol and checks, at tiny sizes.

What fails becomes an unknown with its reason, and no helper outlives the timing.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from executor.count import Tally
from fake_nvml import FakeNvml, load
from planner.machine import benchmark_cards, benchmark_cuda, benchmark_links, crew, probe
from planner.machine.benchmark_cards import Job, measure
from planner.machine.ring_readings import all_reduce_readings, nccl_settings
from planner.machine.stopwatch import Place
from planner.request import Usage
from schemas.form import Json, render
from schemas.store import loads

DRY = {"sm": "9.0", "free": 10**9}
SMALL = {"product": 48, "copy_bytes": 2**14, "layers": 2, "repeats": 7, "share": 0.005, "budget": 3.0}
JOB = Job(**SMALL, smallest=2**12, largest=2**22, dry=DRY)
CARDS = ["GPU-a", "GPU-b"]
QUANTITIES = [
    "rate_fp32", "rate_fp16", "rate_bf16", "bandwidth", "host_to_device", "device_to_host", "operator_seconds",
]  # fmt: skip

# A helper without torch: it answers as the real one does, except for what FAULT makes of a part.
HELPER = """
QUANTITIES = QUANTITIES_HERE
import json, os, sys, time
FAULT = json.loads(sys.argv[1])
print('{"ready": "0"}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    fault = FAULT.get(request["part"] + str(request.get("rank", "")))
    if fault == "hang":
        time.sleep(600)
    if fault == "meet":  # only where another card is asked at the same time
        open(f"{os.environ['MEETING']}/{os.getpid()}", "w").close()
        while len(os.listdir(os.environ["MEETING"])) < 2:
            time.sleep(0.01)
        fault = None
    if fault == "end":
        sys.exit("the card fell off the bus")
    one = {"samples": [1.0, 2.0, 3.0], "stable": True, "note": ""}
    answer = {
        "card": {"quantities": dict.fromkeys(QUANTITIES, one), "free": 10**9},
        "host": {"operator_seconds": one},
        "group": {"curve": [[size, [1e-4 + size / 1e9] * 7] for size in request.get("sizes", [])], "nccl": "2.28.9"},
        "pairs": {"pairs": [{**one, "peer": True} for _ in request["pairs"]] if request["part"] == "pairs" else []},
    }[request["part"]]
    print(json.dumps(fault or answer), flush=True)
""".replace("QUANTITIES_HERE", json.dumps(QUANTITIES))


def test_what_launching_costs_is_timed_for_all_cards_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEETING", str(tmp_path))
    for device in _faulty({"host": "meet"}, card_deadline=10.0)["devices"].values():
        assert device["operator_seconds"]["value"] == 2.0, device["operator_seconds"]["why"]
        assert "all cards at once" in device["operator_seconds"]["why"]


def test_operators_are_counted_as_an_account_counts_them() -> None:
    step = benchmark_cuda._small_step(Place(0, DRY), 3)
    with Tally() as tally:
        step()
    assert benchmark_cuda._operators(step) == tally.launches > 3 * 4


def _quantities(rate: float = 1.0) -> dict[str, Any]:
    return {key: {"samples": [rate] * 3, "stable": True} for key in QUANTITIES}


def _entries(*cards: str) -> dict[str, Any]:
    return {card: {"ids": [card], "kind": "cuda"} for card in cards}


def _faulty(fault: Json, cards: list[str] = CARDS, **changes: Any) -> dict[str, Any]:
    job = Job(**{**SMALL, "smallest": 2**16, "largest": 2**24, **changes})
    return measure(_entries(*cards), None, job, [sys.executable, "-c", HELPER, json.dumps(fault)])


@pytest.fixture(autouse=True)
def _no_helper_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **more: Any) -> Any:
        started.append(real(*arguments, **more))
        return started[-1]

    monkeypatch.setattr(crew.subprocess, "Popen", popen)
    yield
    assert all(helper.poll() is not None for helper in started)


def test_a_dry_run_times_two_cards_their_all_reduce_and_their_copies_into_a_faithful_record() -> None:
    timing = partial(measure, job=JOB)
    record = probe.record("auto", timed=True, environ={}, cards=FakeNvml(load("two_unlike")), card_timing=timing)
    loads(render(record), "dormouse.record", "record")
    (node,) = record["nodes"].values()
    (link, *_) = record["links"].values()
    readings = [device[key] for device in record["devices"].values() for key in QUANTITIES]
    readings += [node["allreduce_rate"], node["allreduce_latency"], link["copy_rate"]]
    assert len(readings) == 2 * len(QUANTITIES) + 3
    for item in readings:
        assert item["basis"] == "benchmarked", item["why"]
        assert item["low"] <= item["value"] <= item["high"]
    sizes = [size for size, _ in node["allreduce_curve"]["value"]]
    assert sizes == sorted(sizes) and {2**power for power in range(12, 23)} <= set(sizes)
    assert "misses at most" in node["allreduce_rate"]["why"]


def test_one_card_has_no_all_reduce_and_no_links() -> None:
    found = _faulty({}, ["GPU-a"])
    assert (found["node"], found["links"]) == ({}, {})
    assert found["devices"]["GPU-a"]["bandwidth"]["value"] == 2.0


UNTIMED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = [
    ("an old card has neither half precision", {"sm": "5.2"}, {}, {
        "rate_fp16": r"sm_52 lacks native fp16 \(from sm_53\)", "rate_bf16": "sm_52 lacks native bf16",
    }),
    ("a Pascal card has fp16 alone", {"sm": "6.1"}, {}, {"rate_bf16": "sm_61 lacks native bf16"}),
    ("too little memory for copies", {"free": 2**27}, {"copy_bytes": 2**26}, {
        "bandwidth": r"needs \d+ B of free memory, and 134217728 B are free",
        "host_to_device": "needs", "device_to_host": "needs",
    }),
    ("a full card", {"free": 2**26}, {}, {key: "needs" for key in QUANTITIES if key != "operator_seconds"}),
]  # fmt: skip


@pytest.mark.parametrize(("dry", "changes", "reasons"), [c[1:] for c in UNTIMED], ids=[c[0] for c in UNTIMED])
def test_what_a_card_cannot_do_or_hold_is_unknown_with_its_reason(dry: Any, changes: Any, reasons: Any) -> None:
    job = {**benchmark_cards.asdict(JOB), **changes, "dry": {**DRY, **dry}}
    found = benchmark_cuda.card(job)["quantities"]
    assert {key for key, item in found.items() if "error" in item} == set(reasons)
    for key, reason in reasons.items():
        assert re.search(reason, found[key]["error"])


def test_too_little_memory_for_the_smallest_all_reduces_is_unknown_with_its_reason() -> None:
    found = _faulty({"card": {"quantities": _quantities(), "free": 2**17}})
    assert found["node"]["allreduce_rate"]["value"] is None
    assert "131072 B are free on one" in found["node"]["allreduce_rate"]["why"]


def test_memory_shrinks_the_sizes_and_the_curve_says_so() -> None:
    curve = _faulty({"card": {"quantities": _quantities(), "free": 2**21}})["node"]["allreduce_curve"]
    assert [size for size, _ in curve["value"]] == [2**16, 2**17, 2**18, 2**19]
    assert "memory allowed no larger" in curve["why"]


FAULTS: list[tuple[str, Any, str]] = [
    ("a rank that never answers", {"group1": "hang"}, r"no answer within 1 s.*NCCL_P2P_DISABLE=1"),
    ("all ranks never answer", {"group0": "hang", "group1": "hang"}, r"no answer within 1 s.*NCCL_P2P_DISABLE=1"),
    ("a rank that ends while the other waits", {"group0": "hang", "group1": "end"}, "ended with 1: the card fell off"),
    (
        "a rank that fails while the other waits",
        {"group0": "hang", "group1": {"error": "NCCL says no"}},
        "NCCL says no",
    ),
    ("a wrong sum", {"group0": "hang", "group1": {"wrong": 65536}}, "the sum of 65536 B came out wrong.*P2P_DISABLE=1"),
]


@pytest.mark.parametrize(("fault", "reason"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_an_all_reduce_that_fails_is_unknown_with_a_hint_and_the_rest_is_timed(fault: Any, reason: str) -> None:
    found = _faulty(fault, group_deadline=1.0)
    for key in ("allreduce_rate", "allreduce_latency", "allreduce_curve"):
        assert found["node"][key]["value"] is None
        assert re.search(reason, found["node"][key]["why"]), found["node"][key]["why"]
    assert found["devices"]["GPU-b"]["rate_bf16"]["value"] == 2.0
    assert found["links"]["link-0"]["copy_rate"]["value"] == 2.0


def test_copies_that_hang_or_arrive_changed_are_unknown_with_the_pair() -> None:
    hung = _faulty({"pairs": "hang"}, pairs_deadline=0.5)["links"]["link-0"]["copy_rate"]
    assert hung["value"] is None and "GPU-a and GPU-b: no answer within 0.5 s" in hung["why"]
    wrong = _faulty({"pairs": {"pairs": [{"error": "what arrived differs"}]}})["links"]["link-0"]["copy_rate"]
    assert wrong["value"] is None and "what arrived differs" in wrong["why"]


def test_a_benchmark_that_times_nothing_at_all_is_refused() -> None:
    with pytest.raises(Usage, match=r"nothing could be timed on any card; GPU-a.*fell off the bus"):
        _faulty({"card": "end"})
    with pytest.raises(Usage, match=r"built without CUDA"):
        _faulty({"card": {"error": "AssertionError: torch is built without CUDA"}})


def test_the_classes_of_pairs_that_the_driver_told_are_kept_and_timed_each() -> None:
    cards = [f"GPU-{place}" for place in range(4)]
    near, far = [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]], [["GPU-0", "GPU-2"]]
    links = {"link-0": {"pairs": near, "path": {"value": "nvlink"}}, "link-1": {"pairs": far, "path": {"value": "p2p"}}}
    rows = [{"samples": [rate] * 3, "stable": True, "peer": True, "note": ""} for rate in (2.0, 2.0, 9.0)]
    command = [sys.executable, "-c", HELPER, json.dumps({"pairs": {"pairs": rows}})]
    found = measure(_entries(*cards), links, Job(**SMALL, largest=2**24), command)["links"]
    assert [found[name]["path"]["value"] for name in links] == ["nvlink", "p2p"]
    assert [found[name]["copy_rate"]["value"] for name in links] == [2.0, 9.0]
    assert found["link-0"]["copy_rate"]["why"].count("2 of 2 pairs") == 1


def test_alike_cards_share_their_readings_and_a_slower_one_keeps_its_own() -> None:
    rates = {"a": 100.0, "b": 80.0, "c": 102.0}
    timings = {
        card: benchmark_cards._card_readings({"quantities": _quantities(rate)}, JOB) for card, rate in rates.items()
    }
    named = {"kind": "cuda", "name": {"value": "Card"}}
    devices = {"a": {**named, "ids": ["a", "b"], "order": [0, 2]}, "c": {**named, "ids": ["c"], "order": [1]}}
    found = benchmark_cards._entries(devices, timings)
    assert {key: (entry["ids"], entry["order"]) for key, entry in found.items()} == {
        "a": (["a"], [0]),
        "b": (["b"], [2]),
        "c": (["c"], [1]),
    }
    pooled = found["a"]["rate_bf16"]
    assert (pooled["low"], pooled["value"], pooled["high"]) == (100.0, 101.0, 102.0)
    assert "2 alike cards" in pooled["why"]
    assert {key: found["a"][key] for key in QUANTITIES} == {key: found["c"][key] for key in QUANTITIES}
    assert found["b"]["rate_bf16"]["value"] == 80.0
    other = {**devices, "c": {**devices["c"], "name": {"value": "Another"}}}
    assert benchmark_cards._entries(other, timings)["a"]["rate_bf16"]["value"] == 100.0


def test_a_card_is_named_to_its_helper_alone_and_nccl_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = benchmark_cards._environs(["GPU-a", "cuda-1"], Job())
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in found.values()] == ["GPU-a", "1", "GPU-a,1"]
    for environ in found.values():
        assert (environ["CUDA_DEVICE_ORDER"], environ["NCCL_NVLS_ENABLE"]) == ("PCI_BUS_ID", "0")
        assert "GLOO_SOCKET_IFNAME" not in environ


def test_what_is_set_of_nccl_is_named_without_paths_of_this_machine() -> None:
    told, hint = nccl_settings({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG_FILE": "/home/a", "NCCL_NET": "/b/c", "PATH": "d"})
    assert told == "NCCL_NET set, NCCL_P2P_DISABLE=1"
    assert "already" in hint


def test_times_that_do_not_grow_tell_a_curve_and_no_rate() -> None:
    answer = {"curve": [[2**16, [2e-4] * 2], [2**17, [1e-4] * 2], [2**18, [5e-5] * 2]], "nccl": "2"}
    found = all_reduce_readings([answer, answer], 2, False)
    assert found["allreduce_curve"]["value"] is not None
    assert found["allreduce_rate"]["value"] is None and "do not grow" in found["allreduce_rate"]["why"]


def test_a_wrong_product_and_a_wrong_sum_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right, out: real(left.bfloat16(), right.bfloat16()).to(out).clone())
    assert "is wrong" in benchmark_cuda.card(benchmark_cards.asdict(JOB))["quantities"]["rate_fp32"]["error"]
    tiles = [benchmark_links.tile(rank, 4) for rank in range(4)]
    total = torch.stack([tile.double() for tile in tiles]).sum(0).bfloat16()
    payload = torch.stack(tiles).sum(0).repeat(3)[:20000]
    assert benchmark_links.is_right(payload, total)
    payload[19999] += 1
    assert not benchmark_links.is_right(payload, total)


def test_no_sum_of_tiles_leaves_what_bf16_holds_exactly() -> None:
    for world in (2, 3, 8, 16, 32, 100):
        tiles = [benchmark_links.tile(rank, world).double() for rank in range(world)]
        assert max(float(sum(tile.max() for tile in tiles)), 0.0) <= 256


NOISY = """
import os, runpy
from planner.machine import benchmark_links

quiet = benchmark_links.pairs

def noisy(request):
    os.write(1, b"NCCL version 2\\n")
    print("a library says hello")
    return quiet(request)

benchmark_links.pairs = noisy
runpy.run_module("planner.machine.benchmark_cuda", run_name="__main__")
"""


def test_a_helper_speaks_only_json_whatever_its_libraries_print() -> None:
    request = json.dumps({"part": "pairs", "pairs": [], "deadline": 5, "dry": DRY})
    done = subprocess.run(
        [sys.executable, "-c", NOISY], input=request + "\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert [sorted(json.loads(line)) for line in done.stdout.splitlines()] == [["ready"], ["pairs"]]
    assert "NCCL version 2" in done.stderr and "a library says hello" in done.stderr


def test_an_unknown_fault_of_a_library_is_an_answer_and_the_helper_serves_on() -> None:
    requests = io.StringIO('{"part": "pairs", "pairs": [[0, 1]], "dry": null, "deadline": 9, "copy_bytes": 1}\n' * 2)
    answers = io.StringIO()
    benchmark_cuda.serve(requests, answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert len(lines) == 3
    assert all("error" in line["pairs"][0] for line in lines[1:])


@pytest.mark.gpu
def test_real_cards_are_timed_whole_and_within_their_data_sheets() -> None:
    record = probe.record("auto", timed=True)
    loads(render(record), "dormouse.record", "record")
    (node,) = record["nodes"].values()
    ids = [card for device in record["devices"].values() for card in device["ids"]]
    for device in record["devices"].values():
        for key in QUANTITIES:
            assert device[key]["basis"] == "benchmarked", device[key]["why"]
        for rate, peak in (("rate_fp32", "peak_fp32"), ("rate_bf16", "peak_bf16"), ("bandwidth", "peak_bandwidth")):
            sheet = device.get(peak, {}).get("value")
            assert sheet is None or 0.3 * sheet < device[rate]["value"] < 1.05 * sheet, (rate, device[rate])
    if len(ids) > 1:
        assert node["allreduce_rate"]["basis"] == "benchmarked", node["allreduce_rate"]["why"]
        assert len(node["allreduce_curve"]["value"]) >= 3
        assert all(link["copy_rate"]["basis"] == "benchmarked" for link in record["links"].values())
