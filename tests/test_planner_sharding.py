"""What a plan says of ranks that share one model under FSDP2: who holds how much, what moves, and what is refused."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.passes.compile import compile_plan
from planner.passes.cost import waited_seconds
from planner.passes.link import Rings, ring_volume
from planner.passes.moves import Moves
from planner.passes.sharding import EVERY, Shards
from planner.refusals.rules import Refused
from schemas.seal import seal
from worlds import account, fleet, record, request

UNIT = st.fixed_dictionaries({
    "route": st.sampled_from(["adamw", "tables", "frozen"]),
    "rows": st.integers(1, 40),
    "row": st.integers(1, 9),
    "count": st.integers(1, 3),
})  # fmt: skip
UNITS = st.lists(st.builds(lambda tensors: {"name": "u", "tensors": tensors}, st.lists(UNIT, max_size=4)), min_size=1,
                 max_size=4)  # fmt: skip


@cache
def adamw(name: str = "tiny") -> dict[str, Any]:
    """A recorded account as one made for AdamW: every matrix goes its route."""
    found = account(name)
    found["made_from"]["opt"] = "adamw"
    for counts in (found["parameters"], found["tensors"], found["blocks"]):
        counts["adamw"] += counts["muon"]
        counts["muon"] = 0
    for row in (row for unit in found["units"] for row in unit["tensors"] if row["route"] == "muon"):
        row["route"] = "adamw"
    return seal({**found, "matrices": []})


def planned(cards: int = 2, of: str = "tiny", **asked: Any) -> dict[str, Any]:
    where = record() if cards == 0 else fleet(*[1e14] * cards)
    return compile_plan(request(opt="adamw", **asked), where, copy.deepcopy(adamw(of)))


def value(plan: dict[str, Any], *path: str) -> Any:
    found: Any = plan
    for key in path:
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found["value"]


@given(UNITS, st.integers(1, 7))
def test_a_rank_holds_the_padded_rows_that_chunks_leave_it(units: list[dict[str, Any]], world: int) -> None:
    """Against dealing rows out one by one, as torch.chunk does."""
    held = least = 0
    for row in (row for unit in units for row in unit["tensors"]):
        size = -(-row["rows"] // world)
        dealt = [min(size, max(0, row["rows"] - rank * size)) for rank in range(world)]
        assert sum(dealt) == row["rows"]
        held += max(dealt) * row["row"] * row["count"]
        least += dealt[-1] * row["row"] * row["count"]
    shards = Shards(units, world)
    assert (shards.held(), shards.least(EVERY)) == (held, least)
    assert sum(shards.gathers()[0]) == 4 * world * held
    assert sum(shards.scatters(2)) == 2 * world * shards.held(("adamw", "tables"))
    assert shards.rounding() >= 0 and 0 <= shards.chunk() <= 1


@given(UNITS, st.integers(1, 7), st.floats(0, 1e6))
def test_more_that_is_kept_for_backward_never_needs_more_gradients_beside_it(
    units: list[dict[str, Any]], world: int, saved: float
) -> None:
    shards = Shards(units, world)
    assert shards.sums(4, saved) >= shards.sums(4, 2 * saved)
    assert shards.sums(4, saved) >= shards.sums(2, saved)


def test_ranks_hold_their_share_of_the_state_and_all_of_the_activations() -> None:
    whole, shared = planned(4), planned(4, shard="fsdp")
    for part in ("masters", "gradients", "adamw_state"):
        one, other = value(whole, "ranks", "0", "memory", part), value(shared, "ranks", "0", "memory", part)
        assert one / 4 <= other <= one / 4 * 1.02, part
    for part in ("activations", "workspace"):
        assert value(whole, "ranks", "0", "memory", part) == value(shared, "ranks", "0", "memory", part)
    assert value(shared, "ranks", "0", "memory", "gathered") > 0
    assert "gathered" not in whole["ranks"][0]["memory"]


def test_a_step_moves_every_unit_twice_and_its_gradients_once() -> None:
    plan = planned(2, shard="fsdp", reduce="bf16")
    units = [sum(row["count"] * row["rows"] * row["row"] for row in unit["tensors"]) for unit in adamw()["units"]]
    padded = 4 * (sum(units) + sum(units[:-1]))
    assert padded <= value(plan, "exchange", "gathered") <= padded * 1.01
    assert sum(units) * 2 <= value(plan, "exchange", "payload") <= sum(units) * 2 * 1.01
    assert value(plan, "exchange", "buckets") == len(units)
    moved = value(plan, "exchange", "gathered") + value(plan, "exchange", "payload")
    assert value(plan, "exchange", "volume") == pytest.approx(moved / 2, rel=1e-5)
    assert plan["exchange"]["shard"]["outcome"] == "granted" and "bucket_bytes" not in plan["exchange"]
    assert 0 < value(plan, "exchange", "forward_seconds") < value(plan, "exchange", "seconds")


def test_a_gather_and_a_sum_are_an_all_reduce_together() -> None:
    for ring in (Rings(4, 1, 1e10, 1e-5), Rings(2, 3, 1e10, 1e-5, 1e9, 1e-4), Rings(2, 1, 5e9, 1e-5, curve=((1e6, 1e-3),
                 (1e8, 2e-2)), curve_rate=1e10)):  # fmt: skip
        assert 2 * ring.half(3e7, 5) == pytest.approx(ring.all_reduce(3e7, 5))
    assert Rings(4, 1, 1e10, 0.0).half(8e9, 1) == pytest.approx(ring_volume(8e9, 4) / 2 / 1e10)
    assert Rings(4, 1, 1e10, 1e-5).half(0.0, 0) == 0.0


def test_what_a_device_computes_beside_hides_gathers_and_sums_but_not_on_gloo() -> None:
    moves = Moves(1e6, 4.0, 2.5e5, ((1e6, 4.0), (1e6, 3.0)))
    assert moves.waited(30.0, 4.0, 1.0) == pytest.approx(1.0)  # a quarter of each has nothing to hide behind
    assert moves.waited(0.0, 4.0, 1.0) == 4.0
    assert moves.exposed(2.0, 3.0, 4.0, 1.0) == pytest.approx(1.0 + moves.waited(3.0, 4.0, 1.0))
    assert Moves(1e6, 4.0, 2.5e5, moves.gathers, overlaps=False).waited(30.0, 4.0, 1.0) == 4.0
    assert Moves(1e6, 4.0, 4e5).waited(3.0, 4.0, 0.0) == waited_seconds(3.0, 4.0, 0.4) == pytest.approx(2.0)


def test_cpu_ranks_wait_for_all_that_they_exchange() -> None:
    plan = planned(0, shard="fsdp")
    assert value(plan, "exchange", "hidden") == 0.0
    assert value(plan, "ranks", "0", "step", "exchange") == pytest.approx(value(plan, "exchange", "seconds"), rel=1e-4)


def test_sharding_fits_where_the_whole_model_does_not() -> None:
    sizes: dict[str, Any] = {"of": "b1", "batch": 1, "seq": 128}
    whole, shared = (
        value(planned(4, **sizes, **more), "ranks", "0", "memory", "peak") for more in ({}, {"shard": "fsdp"})
    )
    asked = {**sizes, "fit": [round((whole + shared) / 2 / 0.9)], "mechanisms": None}
    plan = planned(4, shard="fsdp", **asked)
    assert plan["fit"]["mechanisms"]["chosen"] == [] and plan["ranks"][0]["mechanisms"]["chosen"] == []
    assert value(plan, "ranks", "0", "memory", "peak") <= value(plan, "ranks", "0", "memory", "limit") < whole
    with pytest.raises(Refused) as refused:
        planned(4, **sizes, fit=[round(1.1 * shared / 0.9)])
    assert "does-not-fit" in refused.value.text() and "or --shard fsdp" in refused.value.text()


def test_a_mechanism_that_does_not_go_with_sharding_is_refused_by_its_name_or_left_out_of_a_choice() -> None:
    with pytest.raises(Refused) as refused:
        planned(2, shard="fsdp", mechanisms=["optim_8bit"])
    words = refused.value.text()
    assert "mechanism-unavailable" in words and "not under --shard fsdp" in words and "leave optim_8bit out" in words
    plan = planned(2, shard="fsdp", fit=[10**12])
    barred = {tuple(row["option"]): row["why"] for row in plan["fit"]["mechanisms"]["rejected"]}
    assert "how many ranks there are" in barred[("optim_8bit",)]


def test_a_run_of_shared_ranks_teaches_no_all_reduce() -> None:
    from planner.passes.calibration import rows
    from schemas.seal import append_run
    from worlds import run_of

    plan = planned(0, shard="fsdp")
    ends = {"predicted": 1.0, "value": 1.0, "unit": "s", "statistic": "median", "samples": 3, "instrument": "x"}
    entry = run_of(plan)
    entry["measured"]["/exchange/seconds"] = ends
    assert all(row["all_reduce"] is None for row in rows(append_run(plan, entry), "it"))
