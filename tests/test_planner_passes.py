"""The passes: pure functions of request, record and account, against tables, brute force and golden numbers."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.passes.compile import compile_plan
from planner.passes.layout import lay_out
from planner.passes.link import Rings, at_size, lane_rate, ring_volume
from planner.passes.order import PASSES
from planner.passes.split import Group, assign_owners, split_samples
from planner.refusals.rules import Refused
from schemas.document import reading, tally, walk
from schemas.form import render
from schemas.seal import seal, verify
from schemas.validate import refuse_other_shape
from worlds import account, cases, fleet, record, request


def _opt(asked: dict[str, Any]) -> dict[str, Any]:
    """The account as it is for the asked optimizer: with AdamW for all there is no matrix to own."""
    found = account()
    if asked.get("opt") == "adamw":
        found["made_from"]["opt"] = "adamw"
        found["parameters"] = {"muon": 0, "adamw": sum(found["parameters"].values()), "tables": 0}
        found["matrices"], found["shapes"] = [], {"fp32": {}, "bf16": {}}
        found["apply"] = dict.fromkeys(["fp32", "bf16"], dict.fromkeys(found["tables"], 0))
    return found


def _linear(samples: float = 1e9) -> dict[str, Any]:
    """An account whose forward and backward is nothing but FLOPs in proportion to the samples, and whose optimizer
    and gradients cost nothing to speak of: what the golden numbers of ideal splits are about."""
    found = account()
    nothing = {"one": 0, "b": 0, "t": 0, "bt": 0}
    for by_dtype in [by_dtype for by_set in found["compute"].values() for by_dtype in by_set.values()]:
        for forms in [forms for by_variant in by_dtype.values() for forms in by_variant.values()]:
            forms |= {"flops": {**nothing, "b": samples}, "bytes": nothing, "launches": nothing, "saved": {}}
            forms |= {key: [{"one": 0, "bt": 0, "inside": 0}] for key in ("beyond", "first")}
    free = dict.fromkeys(found["tables"], 0)
    found["adamw"] = dict.fromkeys(found["adamw"], free)
    found["apply"] = dict.fromkeys(["fp32", "bf16"], free)
    found["parameters"] = {"muon": 0, "adamw": 1000, "tables": 0}
    found["matrices"], found["shapes"] = [], {"fp32": {}, "bf16": {}}
    return found


def test_every_pass_leaves_what_it_is_given_as_it_was() -> None:
    asked, found, work = request(fit=[16 * 10**9]), record(), account()
    draft = lay_out(asked, found, work)
    for each in PASSES:
        before = copy.deepcopy((asked, found, work, draft))
        after = each(asked, found, work, draft)
        assert (asked, found, work, draft) == before, each.__name__
        assert each(asked, found, work, draft) == after, each.__name__
        draft = after


def test_the_same_three_documents_give_the_same_bytes() -> None:
    plans = [render(compile_plan(request(fit=[16 * 10**9]), record(), account())) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"fit": [16 * 10**9]},
        {"fit": "auto", "fit_policy": "in-order"},
        {"dtype": ["bf16"], "reduce": "fp32"},
        {"capacity": [[4, None], [2, 64]]},
        {"opt": "adamw", "capacity": "equal"},
    ],
    ids=str,
)
def test_every_plan_holds_its_schema_and_its_counts(asked: dict[str, Any]) -> None:
    plan = compile_plan(request(**asked), record(), _opt(asked))
    refuse_other_shape(plan, "plan")
    verify(plan, "plan")
    assert plan["counts"] == tally(plan)


def test_nothing_in_a_plan_of_unknown_rates_is_a_number_out_of_nothing() -> None:
    found = fleet(1e12, 1e12)
    for device in found["devices"].values():
        del device["rate_bf16"], device["rate_fp32"]
    plan = compile_plan(request(), found, account())
    refuse_other_shape(plan, "plan")
    step = plan["step"]
    assert [step[key]["value"] for key in ("seconds", "tokens_per_second", "gain_over_even", "verdict")] == [None] * 4
    assert all(item["why"] for _, item in walk(plan))


@pytest.mark.parametrize("row", cases("ring.json"), ids=lambda row: row["name"])
def test_the_ring_formula_gives_the_table_of_the_specification(row: dict[str, Any]) -> None:
    """payload = parameters x 2 B, link = the PCIe table, efficiency 0.8 declared."""
    link = 0.8 * lane_rate(row["generation"]) * row["width"]
    milliseconds = ring_volume(2 * row["parameters"], row["world"]) / link * 1e3
    assert milliseconds == pytest.approx(row["milliseconds"], rel=0.006)


def test_a_timed_curve_is_taken_at_its_word_at_and_between_its_points() -> None:
    curve = ((1e5, 1e-5), (1e6, 1e-4), (1e7, 2e-4))
    assert [at_size(curve, size) for size in (1e5, 1e6, 1e7)] == pytest.approx([1e-5, 1e-4, 2e-4])
    assert at_size(curve, 2.8e6) == pytest.approx(1.2e-4)
    assert at_size(curve, 1) == 1e-5 and at_size(curve, 1.9e7) == pytest.approx(3e-4)
    assert at_size(((1e6, 1e-4),), 2e6) == pytest.approx(2e-4)
    ring = Rings(2, 1, 5e9, 1e-5, curve=curve, curve_rate=1e10)
    assert ring.all_reduce(2e6, 2) == pytest.approx(2 * 1e-4 * 2)


@pytest.mark.parametrize("name", ["h200-pair", "h200-pair-staged"])
def test_a_recorded_curve_tells_each_of_its_points_from_the_others(name: str) -> None:
    """Of NVLink and of host memory; NCCL's change of protocol between 1 and 2 MiB leaves a leap, which is timed finer
    now. Each point is told over a gap of two octaves, twice as wide as any that a plan is reckoned over."""
    (node,) = record(name)["nodes"].values()
    curve = node["allreduce_curve"]["value"]
    for place in range(1, len(curve) - 1):
        size, seconds = curve[place]
        if size >= 2**22:
            assert at_size([*curve[:place], *curve[place + 1 :]], size) == pytest.approx(seconds, rel=0.04)
    size, seconds = curve[-1]
    assert at_size(curve[:-1], size) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("name", "payload", "seconds"),
    [  # of another day and another program, on such a pair
        ("h200-pair", 16e6, 74e-6), ("h200-pair", 276e6, 0.925e-3), ("h200-pair", 2.14e9, 6.27e-3),
        ("h200-pair-staged", 276e6, 9.3e-3),
    ],
)  # fmt: skip
def test_a_benchmark_tells_sizes_that_it_did_not_time(name: str, payload: float, seconds: float) -> None:
    (node,) = record(name)["nodes"].values()
    rate = node["allreduce_rate"]["value"]
    ring = Rings(2, 1, rate, 0.0, curve=tuple(map(tuple, node["allreduce_curve"]["value"])), curve_rate=rate)
    assert ring.all_reduce(payload, 1) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("launch", "speed", "width", "regime"),
    [
        (1e-3, 1e15, 16, "launch-bound"),
        (1e-9, 1e10, 16, "compute-bound"),
        (1e-9, 1e17, 1, "link-bound"),
    ],
)
def test_the_regime_names_what_the_step_is_made_of_and_why(
    launch: float, speed: float, width: int, regime: str
) -> None:
    found = fleet(speed, speed)
    for device in found["devices"].values():
        device["operator_seconds"] = reading(launch, "s", "benchmarked", "made up")
        device["pcie_width_current"] = reading(width, "", "declared", "made up")
    item = compile_plan(request(), seal(found), account())["step"]["regime"]
    assert item["value"] == regime
    shares = {word.split()[0]: float(word.split()[1].rstrip("%")) for word in item["why"].split(";")[0].split(", ")}
    assert set(shares) == {"launch", "compute", "link"} and sum(shares.values()) == pytest.approx(100, abs=2)
    assert max(shares, key=lambda name: shares[name]) == regime.removesuffix("-bound")
    assert ("until the two are even" in item["why"]) is (regime == "launch-bound")


def test_a_benchmarked_node_predicts_its_own_all_reduce() -> None:
    found = fleet(1e14, 1e14)
    node = next(iter(found["nodes"].values()))
    size = 4 * sum(account()["parameters"].values()) / 2
    node["allreduce_curve"] = reading([[size / 2, 1e-3], [size * 2, 4e-3]], "", "benchmarked", "made up")
    node["allreduce_rate"] = reading(1e10, "B/s", "benchmarked", "made up", low=0.8e10, high=1e10)
    node["allreduce_latency"] = reading(1e-6, "s", "benchmarked", "made up")
    exchange = compile_plan(request(), found, account())["exchange"]
    seconds, extra = exchange["seconds"], exchange["bucket_seconds"]
    assert seconds["value"] == pytest.approx(2e-3 + extra["value"], rel=1e-3)
    ends = (2e-3 + extra["low"], 2.5e-3 + extra["high"])
    assert (seconds["low"], seconds["high"]) == pytest.approx(ends, rel=1e-3)


def test_a_link_of_gen3_x16_is_15_75_gigabytes_a_second() -> None:
    assert 16 * lane_rate(3) == pytest.approx(15.754e9, rel=1e-4)


@pytest.mark.parametrize(
    ("speeds", "shares", "gain"),
    [
        ([4e12, 1e12], [40, 10], 1.25),
        ([4e12, 1e12, 1e12, 1e12], [80, 20, 20, 20], 1.75),
        ([1e12, 1e12], [25, 25], 2.0),
    ],
)
def test_an_ideal_split_gives_the_golden_shares_and_gains(speeds: list[float], shares: list[int], gain: float) -> None:
    batch = sum(shares) // len(shares)
    plan = compile_plan(request(batch=batch), fleet(*speeds), _linear(1e12))
    batches = {rank: entry["batch"]["chosen"] for entry in plan["ranks"] for rank in entry["members"]}
    assert [batches[rank] for rank in range(len(speeds))] == shares
    assert plan["step"]["gain_over_best"]["value"] == pytest.approx(gain, rel=2e-3)
    assert sum(entry["token_weight"]["value"] * len(entry["members"]) for entry in plan["ranks"]) == pytest.approx(1)


def test_a_fleet_slower_than_its_best_card_alone_says_so() -> None:
    work = _linear(1e3)
    work["parameters"] = {"muon": 0, "adamw": 10**9, "tables": 0}
    plan = compile_plan(request(), fleet(4e12, 1e12), work)
    assert plan["step"]["gain_over_best"]["value"] < 0.1
    assert "SLOWER" in plan["step"]["verdict"]["value"]


def test_alike_ranks_given_unlike_batches_become_two_entries_with_pointers_of_their_own() -> None:
    found = fleet(1.6e12, 1e12, 1e12)
    weak = found["devices"].pop("GPU-2")
    found["devices"]["GPU-1"]["ids"] += weak["ids"]
    plan = compile_plan(request(batch=2), found, _linear(1e12))
    assert {rank: entry["batch"]["chosen"] for entry in plan["ranks"] for rank in entry["members"]} == {
        0: 3,
        1: 2,
        2: 1,
    }
    assert [entry["members"] for entry in plan["ranks"]] == [[0], [1], [2]]
    for place, entry in enumerate(plan["ranks"]):
        own = [pointer for item in entry["rates"].values() for pointer in item.get("inputs", ())]
        assert all(not pointer.startswith("/ranks/") or pointer.startswith(f"/ranks/{place}/") for pointer in own)
    verify(plan, "plan")


def _brute(total: int, groups: list[Group]) -> float | None:
    ranks = [group for group in groups for _ in range(group.count)]
    best = None
    for batches in itertools.product(*[range(1, min(group.cap, total) + 1) for group in ranks]):
        if sum(batches) == total:
            time = max(group.seconds(batch) for group, batch in zip(ranks, batches, strict=True))
            best = time if best is None else min(best, time)
    return best


GROUPS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 9), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=2
)


@given(GROUPS, st.integers(1, 10))
@settings(deadline=None)
def test_the_split_is_the_best_there_is_by_brute_force(rows: list[tuple[int, int, int, int]], total: int) -> None:
    groups = [Group(count, lambda b, a=a, c=c: float(a + c * b), cap) for count, a, c, cap in rows]
    found, best = split_samples(total, groups), _brute(total, groups)
    if best is None:
        assert found is None
        return
    assert found is not None
    flat = [batch for row in found for batch in row]
    assert sum(flat) == total and min(flat) >= 1
    assert all(batch <= group.cap for group, row in zip(groups, found, strict=True) for batch in row)
    assert max(g.seconds(b) for g, row in zip(groups, found, strict=True) for b in row) == best


def test_of_splits_that_are_equally_fast_the_one_with_the_least_work_on_any_rank_is_taken() -> None:
    strong = Group(1, lambda b: max(10.0, 0.1 * b), 99, lambda b: 0.1 * b)
    weak = Group(1, lambda b: max(10.0, 0.7 * b), 99, lambda b: 0.7 * b)
    assert split_samples(8, [strong, weak]) == [[7], [1]]
    assert split_samples(8, [weak, strong]) == [[1], [7]]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=7), st.lists(st.floats(1, 4), min_size=1, max_size=3))
@settings(deadline=None)
def test_owners_finish_within_twice_the_best_assignment(costs: list[float], speeds: list[float]) -> None:
    """Longest processing time first on uniform machines is within a factor of 2 of the optimum."""

    def makespan(owners: Any) -> float:
        return max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) / speed
            for rank, speed in enumerate(speeds)
        )

    best = min(makespan(owners) for owners in itertools.product(range(len(speeds)), repeat=len(costs)))
    assert makespan(assign_owners(costs, speeds)) <= 2 * best * (1 + 1e-9)


def test_a_rank_is_capped_by_its_memory_and_the_others_take_the_rest() -> None:
    found = fleet(1e12, 1e12)
    found["devices"]["GPU-1"]["memory_free"]["value"] = 512 * 2**20 + 120 * 10**6
    plan = compile_plan(request(batch=16), found, account())
    batches = {rank: entry["batch"]["chosen"] for entry in plan["ranks"] for rank in entry["members"]}
    assert batches[0] + batches[1] == 32 and batches[1] < batches[0]
    capped = next(entry for entry in plan["ranks"] if entry["members"] == [1])
    assert capped["memory"]["peak"]["value"] <= capped["memory"]["limit"]["value"]


def test_following_the_larger_budget_that_a_refusal_names_is_planned() -> None:
    asked, found, work = request(fit=[10_000_000]), fleet(1e12, free=10**12), account()
    with pytest.raises(Refused, match="does-not-fit") as caught:
        compile_plan(asked, found, work)
    budget = round(float(re.search(r"to fix: --fit ([0-9.]+)", caught.value.text())[1]) * 1e9)  # type: ignore[index]
    made = compile_plan(request(fit=[budget]), found, work)
    assert made["ranks"][0]["memory"]["peak"]["value"] <= made["ranks"][0]["memory"]["limit"]["value"]


def test_fp16_on_a_cpu_is_reckoned_by_scalar_products() -> None:
    whole, half = (compile_plan(request(dtype=[dtype]), record(), account()) for dtype in ("fp32", "fp16"))
    rates = [made["ranks"][0]["rates"]["products"]["value"] for made in (whole, half)]
    assert rates[0] > 10 * rates[1]
    assert half["step"]["seconds"]["value"] > 2 * whole["step"]["seconds"]["value"]


def test_a_kernel_asked_for_where_it_cannot_run_is_refused_and_auto_falls_back_counted() -> None:
    work = account()
    work["kernels"]["kda"].insert(
        0, {**work["kernels"]["kda"][0], "name": "fast", "counts_as": "chunk_fla", "min_sm": "9.0"}
    )
    plan = compile_plan(request(), fleet(1e12), work)
    assert plan["ranks"][0]["kernels"]["kda"]["chosen"] == "chunk_fla" and plan["counts"]["fallbacks"] == 1
    assert "needs sm_90, and this card is sm_86" in str(plan["ranks"][0]["kernels"]["kda"]["rejected"])
    work["config"]["kda"] |= {"asked": "fast", "chosen": "fast"}
    with pytest.raises(Refused) as caught:
        compile_plan(request(), fleet(1e12), work)
    assert "--set kda=auto" in caught.value.text() and "needs sm_90" in caught.value.text()


@pytest.mark.parametrize(
    ("sm", "chosen", "outcome"),
    [
        *[(sm, "bf16", "default") for sm in ("12.0", "8.9", "8.6", "8.0")],
        *[(sm, "fp16", "default") for sm in ("7.5", "7.0", "6.0", "5.3")],
        *[(sm, "fp32", "fallback") for sm in ("6.1", "5.2")],
    ],
)
def test_auto_takes_the_best_rung_a_card_has_and_counts_what_it_gave_up(sm: str, chosen: str, outcome: str) -> None:
    plan = compile_plan(request(), fleet(1e12, sm=sm), account())
    dtype = plan["ranks"][0]["dtype"]
    assert (dtype["chosen"], dtype["outcome"]) == (chosen, outcome)
    assert plan["counts"]["dtype"][chosen] == 1
    assert plan["counts"]["capability"]["fp16"] == (sm != "5.2") and plan["counts"]["capability"]["bf16"] == (
        chosen == "bf16"
    )
    kernel = plan["ranks"][0]["kernels"]["kda"]
    assert kernel["chosen"] == ("chunk_fla" if chosen == "bf16" else "chunk_torch")
    assert plan["counts"]["fallbacks"] == (outcome == "fallback") + (kernel["outcome"] == "fallback")


def test_ranks_of_unlike_dtypes_reduce_in_fp32_and_say_so() -> None:
    found = fleet(4e12, 1e12)
    found["devices"]["GPU-1"]["sm"]["value"] = "7.5"
    plan = compile_plan(request(), found, account())
    reduce = plan["exchange"]["reduce_dtype"]
    assert reduce["chosen"] == "fp32" and reduce["outcome"] == "fallback"
    alike = compile_plan(request(), fleet(1e12, 1e12), account())
    assert alike["exchange"]["reduce_dtype"]["chosen"] == "bf16"
    assert alike["exchange"]["payload"]["value"] * 2 == plan["exchange"]["payload"]["value"]


@pytest.mark.parametrize(
    ("free", "total", "fit", "limit"),
    [
        (10 * 10**9, 16 * 10**9, [16 * 10**9], 10 * 10**9 - 512 * 2**20),
        (15 * 10**9, 16 * 10**9, [8 * 10**9], 7_200_000_000),
        (None, 16 * 10**9, [8 * 10**9], 7_200_000_000),
        (None, 4 * 10**9, [16 * 10**9], 3_600_000_000),
        (None, None, [16 * 10**9], 14_400_000_000),
        (10 * 10**9, 16 * 10**9, None, 10 * 10**9 - 512 * 2**20),
        (None, 4 * 10**9, None, 3_600_000_000),
        (None, None, None, None),
    ],
)
def test_a_ranks_limit_is_the_least_of_budget_and_memory(
    free: int | None, total: int | None, fit: list[int] | None, limit: int | None
) -> None:
    found = fleet(1e12)
    for device in found["devices"].values():
        for key, value in (("memory_free", free), ("memory_total", total)):
            basis = "unknown" if value is None else "probed"
            device[key] |= {"value": value, "basis": basis, "weakest": basis}
    assert compile_plan(request(fit=fit), found, account())["ranks"][0]["memory"]["limit"]["value"] == limit


@pytest.mark.parametrize(
    ("asked", "way"),
    [
        ({"batch": 100}, "--batch "),
        ({"capacity": [[60, None], [60, None]]}, "--capacity "),
        ({"batch": 60, "capacity": "equal"}, "--batch "),
        ({"batch": 4, "seq": 4096}, "--seq "),
    ],
)
def test_the_way_out_of_a_fleet_that_does_not_fit_is_the_largest_that_does(asked: dict[str, Any], way: str) -> None:
    found = fleet(1e12, 1e12)
    found["devices"]["GPU-0"]["memory_free"]["value"] = 512 * 2**20 + 800 * 10**6
    found["devices"]["GPU-1"]["memory_free"]["value"] = 512 * 2**20 + 300 * 10**6
    with pytest.raises(Refused) as caught:
        compile_plan(request(**asked), found, account())
    escapes = {refusal.escape for refusal in caught.value.refusals}
    assert len(escapes) == 1
    said = next(part for part in escapes.pop().split(", or ") if part.startswith(way)).split()[1]
    smaller: dict[str, Any] = {way.strip("- "): int(said) if "," not in said and way != "--capacity " else None}
    if way == "--capacity ":
        smaller = {"capacity": [[int(batch), None] for batch in said.split(",")]}
    compile_plan(request(**{**asked, **smaller}), found, account())
    if way == "--batch ":
        with pytest.raises(Refused):
            compile_plan(request(**{**asked, "batch": int(said) + 1}), found, account())
