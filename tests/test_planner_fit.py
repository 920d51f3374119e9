"""Properties of the fit on made-up accounts: budgets, batches, components, and the chosen set by brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make_fits
from made_up import ORDER, accounts, subsets
from planner.passes.budget import needed
from planner.passes.compile import compile_plan
from planner.passes.cost import COMPONENTS, STATE, Rank
from planner.passes.mechanisms import offer
from planner.passes.ranks import rank_facts
from planner.refusals.rules import Refused
from worlds import account, fleet, request


def _plan(work: dict[str, Any], limit: float | None = None, **asked: Any) -> dict[str, Any]:
    """A plan of ``work`` on one made-up card that may hold ``limit`` bytes."""
    budget = {} if limit is None else {"fit": [needed(limit, "expandable")]}
    return compile_plan(request(**budget, **asked), fleet(1e12), work)


def _facts(work: dict[str, Any]) -> tuple[Rank, list[tuple[str, ...]]]:
    """The one rank, and every set of mechanisms that it may have."""
    made = _plan(work)
    offers = offer(made, request(), work)
    fleets = offers.subsets(offers.names("fleet", ["cuda"]))
    return rank_facts(made, work, 0), [
        (*shared, *own) for shared in fleets for own in offers.subsets(offers.names("rank", ["cuda"]), shared)
    ]


def _engaged(made: dict[str, Any]) -> list[str]:
    found = {*made["fit"]["mechanisms"]["chosen"], *made["ranks"][0]["mechanisms"]["chosen"]}
    return sorted(found, key=ORDER.index)


def _time(rank: Rank, names: tuple[str, ...] | list[str]) -> float:
    """Of a step, where a gain in time counts for nothing."""
    return max(rank.compute_seconds(8, 512, held) + rank.update_seconds(held) for held in subsets(names))


between = st.floats(0.0, 1.0)


@settings(max_examples=15, deadline=None)
@given(accounts(), between, between)
def test_the_cheapest_set_is_that_of_brute_force_and_a_larger_budget_is_never_slower(
    work: dict[str, Any], one: float, other: float
) -> None:
    rank, sets = _facts(work)
    peaks = {names: rank.peak(8, 512, names) for names in sets}
    least, most = min(peaks.values()), peaks[()]
    times = []
    for share in sorted((one, other)):
        limit = least + share * (most - least) + 1
        chosen = tuple(_engaged(_plan(work, limit)))
        fitting = [names for names in sets if peaks[names] <= limit]
        assert chosen in [tuple(sorted(names, key=ORDER.index)) for names in fitting]
        assert _time(rank, chosen) == pytest.approx(min(_time(rank, names) for names in fitting), rel=1e-12)
        times.append(_time(rank, chosen))
    assert times[1] <= times[0]


@settings(max_examples=15, deadline=None)
@given(accounts(), between, between)
def test_in_order_a_larger_budget_ends_no_later_in_the_order(work: dict[str, Any], one: float, other: float) -> None:
    rank, sets = _facts(work)
    peaks = {names: rank.peak(8, 512, names) for names in sets}
    ends = []
    for share in sorted((one, other)):
        limit = min(peaks.values()) + share * (peaks[()] - min(peaks.values())) + 1
        try:
            found = _engaged(_plan(work, limit, fit_policy="in-order"))
        except Refused as refusal:  # the order may not lead to the set that leaves least: then another policy is named
            assert "--fit-policy cheapest" in refusal.text()
            ends.append(len(ORDER))
            continue
        ends.append(max((ORDER.index(name) for name in found), default=-1))
        offered = [name for name in ORDER if name in work["mechanisms"]]
        if "recompute" not in found:  # which takes the place of what it excludes
            assert found == offered[: len(found)]
    assert ends[1] <= ends[0]


@settings(max_examples=20, deadline=None)
@given(accounts(), st.integers(1, 64), st.sampled_from([16, 64, 512, 4096]))
def test_more_to_hold_never_needs_less(work: dict[str, Any], batch: int, length: int) -> None:
    rank, sets = _facts(work)
    for names in sets:
        here = rank.peak(batch, length, names)
        assert rank.peak(batch + 1, length, names) >= here
        assert rank.peak(batch, length + 16, names) >= here


@settings(max_examples=10, deadline=None)
@given(accounts(), st.integers(1, 16), st.sampled_from([(), ("engram_ram",), ("moe_offload",), ("recompute",)]))
def test_components_sum_to_the_peaks_and_parts_to_their_component(
    work: dict[str, Any], batch: int, names: tuple[str, ...]
) -> None:
    held = [name for name in names if name in work["mechanisms"]]
    memory = _plan(work, batch=batch, mechanisms=held or None)["ranks"][0]["memory"]
    value = {name: item["value"] for name, item in memory.items() if name != "alive"}
    assert value["activations"] == sum(item["value"] for item in memory["alive"].values())
    assert memory["activations"]["inputs"] == [f"/ranks/0/memory/alive/{name}" for name in memory["alive"]]
    state = sum(value.get(name, 0) for name in STATE)
    assert value["backward_peak"] == state + value["activations"] + value["buckets"]
    assert value["optimizer_peak"] == state + value["update"] + value["buckets"]
    assert value["peak"] == max(value["backward_peak"], value["optimizer_peak"])
    assert {*value} <= {*COMPONENTS, "hosted", "pinned", "backward_peak", "optimizer_peak", "peak", "reserved", "limit"}


def test_a_refusal_names_every_component_with_its_parts_and_a_policy_that_would_do() -> None:
    work = account("b1")
    for by_variant in [v for by_dtype in work["compute"]["cuda"].values() for v in by_dtype.values()]:
        for part in ("saved", "beyond", "first"):  # moe_offload comes first and, with it, act_ckpt saves nothing
            for name in ("moe_offload", "moe_offload+act_ckpt", "recompute"):
                by_variant[name][part] = by_variant["plain"][part]
    rank, sets = _facts(work)
    limit = min(rank.peak(8, 512, names) for names in sets) + 1
    assert "act_ckpt" in _engaged(_plan(work, limit))
    with pytest.raises(Refused) as caught:
        _plan(work, limit, fit_policy="in-order")
    text = caught.value.text()
    assert "--fit-policy cheapest" in text
    memory = _plan(work, mechanisms=_engaged_in_vain(text))["ranks"][0]["memory"]
    for name in [*(name for name in COMPONENTS if name in memory), *memory["alive"]]:
        assert f"{name} " in text, name


def _engaged_in_vain(text: str) -> list[str]:
    return (
        next(line for line in text.split("\n") if "engaged, what is left" in line)
        .split("with ")[1]
        .split(" engaged")[0]
        .split(", ")
    )


def test_a_mechanism_asked_for_that_excludes_what_would_fit_is_named() -> None:
    work = account("b1")
    rank, sets = _facts(work)
    with_it = min(rank.peak(8, 512, names) for names in sets if "act_ckpt" in names)
    without = min(rank.peak(8, 512, names) for names in sets if "act_ckpt" not in names)
    assert without < with_it
    with pytest.raises(Refused) as caught:
        _plan(work, (with_it + without) / 2, mechanisms=["act_ckpt"])
    assert "act_ckpt left out of --mechanisms" in caught.value.text()
    assert _plan(work, (with_it + without) / 2)


def test_a_peak_while_the_first_layers_backward_runs_counts_where_it_is_the_highest() -> None:
    work = account("b1")
    (forms,) = [found["bf16"]["plain"] for name, found in work["compute"]["cuda"].items() if "chunk_fla" in name]
    before = _plan(work)["ranks"][0]["memory"]["activations"]["value"]
    forms["first"] = [{"one": 10**6, "bt": 2 * before / (8 * 512), "inside": 1000}]
    memory = _plan(work)["ranks"][0]["memory"]
    assert memory["activations"]["value"] == pytest.approx(2 * before + 10**6, abs=10)
    assert memory["alive"]["kernels_inside"]["value"] == 1000 * 8 * 512


def test_the_workspace_of_a_card_is_by_its_generation() -> None:
    for sm, mebibytes in (("7.5", 16.25), ("8.6", 16.25), ("9.0", 64), ("12.0", 64)):
        made = compile_plan(request(), fleet(1e12, sm=sm), account())
        assert made["ranks"][0]["memory"]["workspace"]["value"] == mebibytes * 2**20


def test_a_cards_blocks_are_rounded_and_a_cpus_are_not() -> None:
    work = account("b1")
    work["blocks"] = {"muon": 1000, "adamw": 10, "tables": 100}
    assert "rounding" not in _plan(work)["ranks"][0]["memory"]  # of expandable segments
    work["config"]["allocator"] = {"asked": "segments", "chosen": "segments", "why": "asked for"}
    made = _plan(work)["ranks"][0]["memory"]["rounding"]["value"]
    assert made == 3 * 1000 + 4 * 10 + 4 * 100  # weights, gradients and momentum; and two moments where there are
    moved = _plan(work, mechanisms=["engram_ram", "muon_state_bf16"])["ranks"][0]["memory"]["rounding"]["value"]
    assert moved == 2 * 1000 + 4 * 10


_WAYS: dict[str, Any] = {
    "--fit": lambda text: {"fit": "auto" if text == "auto" else [round(float(part) * 1e9) for part in text.split(",")]},
    "--fit-policy": lambda text: {"fit_policy": text},
    "--batch": lambda text: {"batch": int(text)},
    "--seq": lambda text: {"seq": int(text)},
    "--dtype": lambda text: {"dtype": [text]},
    "--reduce": lambda text: {"reduce": text},
    "--capacity": lambda text: {"capacity": "auto" if text == "auto" else [[int(b), None] for b in text.split(",")]},
}


def _ways(escape: str) -> list[dict[str, Any]]:
    """The changes that a refusal's way out asks for, each way's together."""
    ways = []
    for way in escape.split(", or "):
        words = way.split(", which")[0].split() if ", which" in way else way.split()
        ways.append({})
        for option, text in zip(words[::2], words[1::2], strict=True):
            ways[-1] |= _WAYS[option](text)
    return ways


@pytest.mark.parametrize(
    ("free", "asked", "named"),
    [
        ([18.5], {}, {"fit", "batch", "seq"}),
        ([40], {"fit": [9_000_000_000], "fit_policy": "in-order"}, {"fit"}),
        ([13], {"batch": 24, "dtype": ["fp32"], "fit": "auto"}, {"dtype", "batch", "seq"}),
        ([15.15, 15.15], {"fit": "auto", "batch": 4}, {"reduce"}),
        ([20, 40], {"capacity": [[80, None], [8, None]], "fit": "auto"}, {"capacity", "seq"}),
        ([20, 40], {"capacity": "equal", "batch": 64, "fit": "auto"}, {"capacity", "batch", "seq"}),
    ],
)
def test_every_way_that_a_refusal_names_is_planned_and_no_longer_one_would_be(
    free: list[float], asked: dict[str, Any], named: set[str]
) -> None:
    work, found = account("b1"), fleet(*[1e13] * len(free))
    for place, gigabytes in enumerate(free):
        found["devices"][f"GPU-{place}"]["memory_free"]["value"] = round(gigabytes * 1e9)
    with pytest.raises(Refused) as caught:
        compile_plan(request(**asked), found, work)
    (escape,) = {refusal.escape for refusal in caught.value.refusals}
    ways = _ways(escape)
    assert named <= {key for way in ways for key in way}, escape
    for way in ways:
        compile_plan(request(**asked | way), found, work)
    for key, more in (("batch", 1), ("seq", 16)):
        for way in (way for way in ways if set(way) == {key}):
            with pytest.raises(Refused):
                compile_plan(request(**asked | {key: way[key] + more}), found, work)


def test_no_way_out_is_a_length_below_those_at_which_a_module_was_counted() -> None:
    """What such a module takes need not be a line of the length: below, a form from above may promise anything."""
    work, found = account("b1"), fleet(1e13)
    found["devices"]["GPU-0"]["memory_free"]["value"] = 18_500_000_000

    def offered(**counted: Any) -> list[int]:
        made_from = {**work["made_from"], **counted}
        with pytest.raises(Refused) as caught:
            compile_plan(request(), found, {**work, "made_from": made_from})
        (escape,) = {refusal.escape for refusal in caught.value.refusals}
        return [way["seq"] for way in _ways(escape) if "seq" in way]

    (longest,) = offered()
    assert offered(lengths=[longest, 512]) == [longest]
    assert offered(lengths=[longest + 1, 512]) == []


def test_the_page_of_what_fits_where_is_what_the_planner_says() -> None:
    assert make_fits.PAGE.read_text(encoding="utf-8") == make_fits.page()


def test_the_presets_fit_where_the_specification_says_by_what_it_says() -> None:
    told = {(row, policy): make_fits.planned(row, policy) for row in make_fits.ROWS for policy in make_fits.POLICIES}
    engaged = {(row.name, policy): make_fits.engaged(draft) for (row, policy), (draft, _) in told.items()}
    fits = {(row.name, policy): way is None for (row, policy), (_, way) in told.items()}
    for policy in make_fits.POLICIES:
        for name in ("small, 4 GB", "small, 16 GB", "medium, 4 GB", "medium, 16 GB"):
            assert fits[name, policy] and engaged[name, policy] == "nothing engaged", name
        assert not fits["b1, 4 GB", policy] and fits["b1, 16 GB", policy]
    assert engaged["b1, 16 GB", "in-order"] == "moe_offload, engram_ram"
