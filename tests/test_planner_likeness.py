"""Alike nodes and devices are said once, ranks keep the fleet's order, and large fleets stay small."""

from __future__ import annotations

import pytest

from planner.passes.compile import compile_plan
from planner.passes.likeness import grouped, in_order, node_count, numbered
from planner.refusals.of_runs import world_of
from planner.refusals.rules import judge
from schemas.document import reading
from schemas.form import render
from schemas.seal import seal
from schemas.store import loads
from worlds import account, cluster, fleet, record, request


def test_a_fleet_of_4096_ranks_in_512_nodes_is_a_plan_of_one_rank_entry() -> None:
    plan = compile_plan(request(batch=4), cluster(512), account())
    data = render(plan)
    assert len(data) < 2_000_000 and world_of(plan) == 4096
    assert len(plan["ranks"]) == len(plan["fleet"]["nodes"]) == len(plan["fleet"]["devices"]) == 1
    assert loads(data, "dormouse.plan", "plan") == plan
    assert plan["ranks"][0]["devices"][:9] == [f"GPU-{i // 8:08x}-0000-4000-8000-{i % 8:012x}" for i in range(9)]


def test_several_nodes_are_planned_and_compared_but_not_run() -> None:
    plan = compile_plan(request(), cluster(3), account())
    assert node_count(plan) == 3
    facts = {"world_size": 24, "rank": 0, "ranks": [], "record_unwritable": None}
    assert [refusal.code for refusal in judge("start", plan, facts)] == ["multi-node"]
    one = compile_plan(request(), cluster(1), account())
    assert plan["exchange"]["seconds"]["value"] > one["exchange"]["seconds"]["value"]


def test_a_network_that_nobody_declared_is_unknown_and_so_is_the_step() -> None:
    found = cluster(2)
    for node in found["nodes"].values():
        del node["network_rate"], node["network_latency"]
    plan = compile_plan(request(), seal(found), account())
    assert plan["exchange"]["network_rate"]["value"] is None and plan["step"]["seconds"]["value"] is None


def test_ranks_follow_the_visible_order_though_a_file_sorts_its_keys() -> None:
    found = fleet(1e12, 2e12, 3e12)
    names = ["GPU-2", "GPU-0", "GPU-1"]
    shuffled = seal({**found, "devices": numbered({name: found["devices"][name] for name in names})})
    again = loads(render(shuffled), "dormouse.record", "record")
    assert list(again["devices"]) == sorted(names) and [name for _, name in in_order(again["devices"])] == names
    plan = compile_plan(request(dtype=["fp32", "bf16", "fp32"]), again, account())
    seats = {rank: (entry["devices"][i], entry["dtype"]["chosen"]) for entry in plan["ranks"]
             for i, rank in enumerate(entry["members"])}  # fmt: skip
    assert seats == {0: ("GPU-2", "fp32"), 1: ("GPU-0", "bf16"), 2: ("GPU-1", "fp32")}


def test_devices_that_differ_in_one_reading_stay_apart() -> None:
    found = fleet(1e12, 1e12, 1e12)
    for device in found["devices"].values():
        device["name"]["value"] = "Card"
    found["devices"]["GPU-1"]["memory_free"]["value"] -= 1
    _, devices = grouped(found["nodes"], numbered(found["devices"]))
    assert {key: (item["ids"], item["order"]) for key, item in devices.items()} == {
        "GPU-0": (["GPU-0", "GPU-2"], [0, 2]),
        "GPU-1": (["GPU-1"], [1]),
    }


@pytest.mark.parametrize("name", ["cpu-2"])
def test_grouping_changes_nothing_that_is_grouped_already(name: str) -> None:
    found = record(name)
    nodes, devices = grouped(found["nodes"], found["devices"])
    assert grouped(nodes, devices) == (nodes, devices)


def test_alike_devices_that_differ_a_little_in_free_memory_are_planned_by_the_least_of_it() -> None:
    found = cluster(64)
    for place, device in enumerate(found["devices"].values()):
        device["memory_free"] = {**device["memory_free"], "value": 10**11 - place * 10**6}
    plan = compile_plan(request(batch=4), seal(found), account())
    (device,) = plan["fleet"]["devices"].values()
    assert len(plan["ranks"]) == 1 and device["memory_free"]["value"] == 10**11 - 511 * 10**6
    assert "the least of 512 that are alike; the most is 100000000000 B" in device["memory_free"]["why"]


def test_a_device_with_far_less_free_memory_is_not_alike() -> None:
    found = fleet(1e12, 1e12)
    for device in found["devices"].values():
        device["name"]["value"] = "Card"
    found["devices"]["GPU-1"]["memory_free"]["value"] //= 2
    assert len(compile_plan(request(), found, account())["ranks"]) == 2


def test_links_that_do_not_speak_of_every_pair_make_no_path() -> None:
    found = fleet(1e12, 1e12, 1e12)
    path = reading("nvlink", "", "probed", "made up")
    found["links"] = {"link-0": {"pairs": [["GPU-0", "GPU-1"]], "path": path, "nvlinks": reading(4, "", "probed", "w")}}
    assert compile_plan(request(), seal(found), account())["exchange"]["path"]["value"] == "staged"
    found["links"]["link-0"]["pairs"] += [["GPU-0", "GPU-2"], ["GPU-1", "GPU-2"]]
    assert compile_plan(request(), seal(found), account())["exchange"]["path"]["value"] == "nvlink"


@pytest.mark.parametrize(
    ("capabilities", "path"), [(("8.6", "8.6"), "p2p"), (("8.6", "8.9"), "staged"), (("6.1", "8.0"), "staged")]
)
def test_cards_of_several_architectures_are_not_taken_to_reach_each_other(
    capabilities: tuple[str, str], path: str
) -> None:
    found = fleet(1e12, 1e12)
    for device, sm in zip(found["devices"].values(), capabilities, strict=True):
        device["sm"]["value"] = sm
        device["peer_to_peer"] = reading(True, "", "datasheet", "made up")
    assert compile_plan(request(), seal(found), account())["exchange"]["path"]["value"] == path
