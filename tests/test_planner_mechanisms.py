"""What fits and by which mechanisms: a whole model's account, searched by brute force, in the order of the runtime."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from planner.machine import catalogue
from planner.passes.compile import compile_plan
from planner.passes.cost import STATE
from planner.passes.mechanisms import offer
from planner.passes.ranks import rank_facts
from planner.refusals.rules import Refused
from schemas.seal import seal, verify
from schemas.validate import refuse_other_shape
from worlds import account, fleet, record, request

GIGA = 10**9
ORDER = ["moe_offload", "engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt", "recompute"]


def plan(cards: str = "rtx-5060-ti-16gb", **asked: Any) -> dict[str, Any]:
    """A plan of the recorded account of b1 on listed cards."""
    made = compile_plan(request(**asked), seal(catalogue.record_body(cards)), account("b1"))
    refuse_other_shape(made, "plan")
    verify(made, "plan")
    return made


def one_cpu() -> dict[str, Any]:
    """The recorded machine with one CPU rank."""
    found = record()
    for device in found["devices"].values():
        device["ids"] = device["ids"][:1]
    return seal(found)


def engaged(made: dict[str, Any], place: int = 0) -> list[str]:
    return [*made["fit"]["mechanisms"]["chosen"], *made["ranks"][place]["mechanisms"]["chosen"]]


def memory(made: dict[str, Any]) -> dict[str, Any]:
    return {name: item["value"] for name, item in made["ranks"][0]["memory"].items() if name != "alive"}


def test_mechanisms_stand_in_the_order_of_the_runtime_whatever_order_json_keeps() -> None:
    made = plan(fit=[16 * GIGA])
    assert list(offer(made, request(), account("b1")).rows) == ORDER
    reversed_ = account("b1")
    reversed_["mechanisms"] = dict(reversed(reversed_["mechanisms"].items()))
    assert list(offer(made, request(), reversed_).rows) == ORDER


@pytest.mark.parametrize("gigabytes", [20, 16, 14, 12])
def test_in_order_engages_no_more_than_it_needs_and_the_first_first(gigabytes: int) -> None:
    made = plan(fit=[gigabytes * GIGA], fit_policy="in-order")
    found = sorted(engaged(made), key=ORDER.index)
    rank, limit = rank_facts(made, account("b1"), 0), memory(made)["limit"]
    assert rank.peak(8, 512, found) <= limit
    if found and "recompute" not in found:  # recompute takes the place of those that it excludes
        assert found == ORDER[: len(found)]
        assert rank.peak(8, 512, found[:-1]) > limit


def test_recomputation_takes_the_place_of_what_it_excludes_where_that_leaves_less() -> None:
    work = account("b1")
    for by_dtype in work["compute"]["cuda"].values():
        for by_variant in by_dtype.values():
            for name in ("moe_offload", "act_ckpt", "moe_offload+act_ckpt"):
                by_variant[name] |= {key: by_variant["plain"][key] for key in ("saved", "beyond", "first")}
    found = seal(catalogue.record_body("rtx-3060-12gb"))
    made = compile_plan(request(fit=[12 * GIGA], fit_policy="in-order"), found, work)
    assert set(engaged(made)) == {"engram_ram", "muon_state_bf16", "optim_8bit", "recompute"}


@pytest.mark.parametrize("gigabytes", [30, 20, 16, 14, 12])
def test_cheapest_is_the_fastest_of_all_sets_that_fit_by_brute_force(gigabytes: int) -> None:
    made = plan(fit=[gigabytes * GIGA])
    rank, limit, rows = rank_facts(made, account("b1"), 0), memory(made)["limit"], account("b1")["mechanisms"]

    def seconds(names: tuple[str, ...]) -> float:
        parts = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
        return max(rank.compute_seconds(8, 512, held) + rank.update_seconds(held) for held in parts)

    sets = [names for size in range(7) for names in itertools.combinations(ORDER, size)]
    sets = [names for names in sets if not any(set(rows[name].get("excludes", ())) & set(names) for name in names)]
    sets = [names for names in sets if "optim_8bit" not in names or made["toolchain"]["bitsandbytes"]["value"]]
    fitting = [names for names in sets if rank.peak(8, 512, names) <= limit]
    assert seconds(tuple(engaged(made))) == min(map(seconds, fitting))
    assert (() in fitting) == (engaged(made) == [])


def test_nothing_is_engaged_for_speed_where_all_fits() -> None:
    work = account("b1")
    del work["mechanisms"]["engram_ram"]["lookups"]  # a host that takes no time
    made = compile_plan(request(fit=[24 * GIGA]), seal(catalogue.record_body("rtx-4090")), work)
    rank = rank_facts(made, work, 0)
    assert rank.compute_seconds(8, 512, ["engram_ram"]) < rank.compute_seconds(8, 512, [])
    assert engaged(made) == []


def test_nothing_is_engaged_for_speed_beside_what_is_needed() -> None:
    made = plan("v100-pcie-32gb", fit=[22 * GIGA])
    rank, limit, names = rank_facts(made, account("b1"), 0), memory(made)["limit"], engaged(made)
    fewer = [tuple(other for other in names if other != name) for name in names]
    assert names and all(rank.peak(8, 512, held) > limit for held in fewer)


def test_tables_are_masters_gradients_and_moments_until_they_leave_the_device() -> None:
    counts, (here, away) = account("b1")["parameters"], (plan("rtx-4090"), plan(mechanisms=["engram_ram"]))
    on, off = memory(here), memory(away)
    assert on["masters"] - off["masters"] == on["gradients"] - off["gradients"] == 4 * counts["tables"]
    assert on["tables_state"] == 8 * counts["tables"] and "tables_state" not in off
    assert off["hosted"] > 12 * counts["tables"] and off["hosted"] - off["pinned"] == 12 * counts["tables"]
    assert 0 < off["staging"] < off["masters"] / 10 and not {"staging", "hosted", "pinned"} & on.keys()
    assert away["ranks"][0]["demand"]["link"]["value"] > 0 and "link" not in here["ranks"][0]["demand"]


def test_beside_a_tables_gradient_lies_what_the_peak_of_few_tokens_is() -> None:
    made = plan("rtx-4090", batch=1, seq=64)
    assert memory(made)["activations"] > 4 * account("b1")["parameters"]["tables"]
    assert (
        memory(plan(batch=1, seq=64, mechanisms=["engram_ram"]))["activations"]
        < 4 * account("b1")["parameters"]["tables"]
    )


def test_offloaded_bytes_are_the_hosts_and_take_the_link() -> None:
    plain, moved = plan("rtx-4090"), plan("rtx-4090", mechanisms=["moe_offload"])
    assert memory(moved)["activations"] < memory(plain)["activations"]
    assert memory(moved)["hosted"] == memory(moved)["pinned"] > 0
    rank = moved["ranks"][0]
    assert rank["demand"]["link"]["value"] == pytest.approx(2 * memory(moved)["pinned"], rel=1e-3)
    assert "/ranks/0/rates/host_link" in rank["step"]["compute"]["inputs"]


def test_a_slow_link_binds_the_step_that_offloads() -> None:
    found = seal(catalogue.record_body("rtx-4090"))
    for device in found["devices"].values():
        for key in ("host_to_device", "device_to_host"):
            device[key] = {"value": 1e8, "unit": "B/s", "basis": "benchmarked", "weakest": "benchmarked", "why": "slow"}
    made = compile_plan(request(mechanisms=["moe_offload"]), found, account("b1"))
    rank = made["ranks"][0]
    assert rank["step"]["compute"]["value"] == pytest.approx(rank["demand"]["link"]["value"] / 1e8, rel=1e-4)


def test_eight_bit_state_has_the_bytes_that_the_runtime_told() -> None:
    made = compile_plan(request(mechanisms=["optim_8bit", "muon_state_bf16"]), fleet(1e12), account())
    rows = account()["mechanisms"]
    assert memory(made)["adamw_state"] == rows["optim_8bit"]["bytes"]
    assert memory(made)["muon_momentum"] == 2 * account()["parameters"]["muon"]
    assert made["fit"]["mechanisms"]["asked"] == ["muon_state_bf16", "optim_8bit"]
    work = [made["ranks"][0]["demand"]["optimizer_bytes"]["value"]]
    work.append(compile_plan(request(), fleet(1e12), account())["ranks"][0]["demand"]["optimizer_bytes"]["value"])
    assert work[0] != work[1]


def test_a_fleet_is_offered_no_mechanism_of_one_rank_and_is_told_why() -> None:
    made = plan("rtx-4090x2", fit=[24 * GIGA])
    rejected = {row["option"][0]: row["why"] for row in made["fit"]["mechanisms"]["rejected"]}
    assert "the tables would differ by rank" in rejected["engram_ram"]
    assert "engram_ram" not in engaged(made)


def test_what_is_asked_for_by_name_is_engaged_whatever_the_budget() -> None:
    for asked in ({}, {"fit": [20 * GIGA]}, {"fit": [20 * GIGA], "fit_policy": "in-order"}):
        made = plan("rtx-4090", mechanisms=["act_ckpt"], **asked)
        assert "act_ckpt" in engaged(made)
        assert "recompute" not in str(made["ranks"][0]["mechanisms"].get("rejected"))
        assert made["ranks"][0]["mechanisms"]["outcome"] == "granted"


def test_state_that_cpu_ranks_keep_on_the_host_is_still_their_memory() -> None:
    made = compile_plan(request(mechanisms=["engram_ram"], batch=1, seq=64), one_cpu(), account("b1"))
    found = memory(made)
    held = sum(found.get(name, 0) for name in (*STATE, "hosted"))
    assert found["backward_peak"] == held + found["activations"] + found["buckets"]
    assert "pinned" not in found
    assert found["hosted"] == 12 * account("b1")["parameters"]["tables"]  # nothing is copied to be pinned


def test_a_host_that_cannot_hold_the_tables_is_not_asked_to_and_says_so_when_it_must() -> None:
    found = seal(catalogue.record_body("rtx-4090"))
    for node in found["nodes"].values():
        node["memory_free"] = {"value": 3 * GIGA, "unit": "B", "basis": "probed", "weakest": "probed", "why": "little"}
    made = compile_plan(request(fit=[21 * GIGA]), found, account("b1"))
    assert "engram_ram" not in engaged(made)
    told = [row["why"] for row in made["ranks"][0]["mechanisms"]["rejected"] if row["option"] == ["engram_ram"]]
    assert told == ["the host has no room for 4.52 GiB"]
    with pytest.raises(Refused) as caught:
        compile_plan(request(mechanisms=["engram_ram"]), found, account("b1"))
    assert {refusal.code for refusal in caught.value.refusals} == {"host-does-not-fit"}
    assert "4.52 GiB in host memory" in caught.value.text()


def test_stacked_experts_count_as_many_matrices() -> None:
    work = account("b1")
    stacks = [matrix for matrix in work["matrices"] if len(matrix["shape"]) == 3]
    assert {matrix["shape"][0] for matrix in stacks} == {16}
    made = plan("rtx-4090")
    assert memory(made)["muon_momentum"] == 4 * work["parameters"]["muon"]


def test_what_does_not_fit_names_tables_too() -> None:
    with pytest.raises(Refused) as caught:
        plan("rtx-5060-ti-16gbx2")
    assert "tables_state 2.99 GiB" in caught.value.text()


def test_what_an_engaged_mechanism_saves_and_costs_is_the_difference_of_two_plans() -> None:
    both, one = plan("rtx-4090", mechanisms=["act_ckpt", "engram_ram"]), plan("rtx-4090", mechanisms=["act_ckpt"])
    worth, (with_it, without) = both["ranks"][0]["worth"], (made["ranks"][0] for made in (both, one))
    assert set(worth) == {"act_ckpt", "engram_ram"} and "worth" not in plan("rtx-4090")["ranks"][0]
    saved = without["memory"]["peak"]["value"] - with_it["memory"]["peak"]["value"]
    assert worth["engram_ram"]["saves"]["value"] == pytest.approx(saved, abs=2)
    cost = sum(sign * entry["step"][part]["value"] for sign, entry in ((1, with_it), (-1, without))
               for part in ("compute", "optimizer"))  # fmt: skip
    assert worth["engram_ram"]["costs"]["value"] == pytest.approx(cost, rel=1e-3)


def test_the_next_forward_waits_for_the_rows_that_the_host_brings() -> None:
    made = plan("rtx-4090", mechanisms=["engram_ram"])["ranks"][0]
    lookups = account("b1")["mechanisms"]["engram_ram"]["lookups"]["bt"]
    assert made["demand"]["host_rows"]["value"] == lookups * 8 * 512
    rank = rank_facts(plan("rtx-4090"), account("b1"), 0)
    waited = rank.compute_seconds(8, 512, ["engram_ram"]) - rank.compute_seconds(8, 512)
    taken = made["demand"]["host_rows"]["value"] * made["rates"]["host_row"]["value"]
    assert 0 < waited < taken  # the device itself has less to do
    assert made["step"]["compute"]["value"] == pytest.approx(rank.compute_seconds(8, 512, ["engram_ram"]), rel=1e-4)
    assert "/ranks/0/rates/host_row" in made["step"]["compute"]["inputs"]
