"""The catalogue: figures that agree with what vendors print and with each other, names that are found, and records of
cards that are not here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.machine import cards, catalogue, probe
from planner.machine.wheels import WHEELS
from planner.passes.compile import compile_plan
from planner.passes.legality import legal
from planner.request import Usage
from schemas.document import BASES, is_reading, walk
from schemas.form import render
from schemas.seal import seal
from schemas.validate import refuse_other_shape
from worlds import account, request

CASES = Path(__file__).parent / "cases"
SHEETS = json.loads((CASES / "card_sheets.json").read_text("utf-8"))
NAMES = json.loads((CASES / "card_names.json").read_text("utf-8"))
CARDS = cards.cards()
MIB = 2**20


def _value(card: str, key: str) -> Any:
    return catalogue.sheet(CARDS[card])[key]["value"]


# --- figures ---


@pytest.mark.parametrize("row", SHEETS["rows"], ids=lambda row: row[0])
def test_rates_derived_from_parts_are_those_that_vendors_print(row: list[Any]) -> None:
    card, fp32, tensor, bandwidth = row
    assert _value(card, "peak_fp32") == pytest.approx(fp32 * 1e12, rel=0.02)
    assert _value(card, "peak_bandwidth") == pytest.approx(bandwidth * 1e9, rel=0.02)
    if tensor is not None:
        assert _value(card, "peak_fp16") == pytest.approx(tensor * 1e12, rel=0.03)


def test_a_figure_a_twentieth_off_would_be_caught() -> None:
    row = next(row for row in SHEETS["rows"] if row[0] == "rtx-3090")
    wrong = replace(CARDS["rtx-3090"], boost=(1780.0, 1780.0), tensor_boost=(1780.0, 1780.0), gbps=20.5)
    found = catalogue.sheet(wrong)
    assert found["peak_fp32"]["value"] != pytest.approx(row[1] * 1e12, rel=0.02)
    assert found["peak_fp16"]["value"] != pytest.approx(row[2] * 1e12, rel=0.03)
    assert found["peak_bandwidth"]["value"] != pytest.approx(row[3] * 1e9, rel=0.02)


def test_every_card_but_laptops_has_a_printed_row_to_be_judged_by() -> None:
    assert {row[0] for row in SHEETS["rows"]} == {
        card for card in CARDS if not card.endswith("-laptop") and "-laptop-" not in card
    }
    for card, bandwidth in SHEETS["laptop_gbs"].items():
        assert _value(card, "peak_bandwidth") == pytest.approx(bandwidth * 1e9, rel=0.02)
    for card, cores in SHEETS["cores"].items():
        assert CARDS[card].cores == cores


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.id)
def test_a_cards_figures_agree_with_each_other(card: cards.Card) -> None:
    (sm,) = [sm for sm, begins in SHEETS["sm"].items() if re.match("|".join(begins), card.id)]
    found = catalogue.sheet(card)
    assert card.sm == sm
    assert (found["peak_bf16"]["value"] is not None) == legal("bf16", "cuda", sm)[0] == card.bf16
    if card.tensor is None:
        assert found["peak_fp16"]["value"] is None
    else:
        assert found["peak_fp16"]["value"] >= 1.99 * found["peak_fp32"]["value"]
    assert card.lanes in (None, 8, 16)
    assert card.lanes is not None or "laptop" in card.id
    assert 3 <= card.memory_gib <= 192
    assert 0.9 * card.memory_gib * 2**30 <= card.memory_bytes() <= card.memory_gib * 2**30
    assert card.boost is None or 1000 <= card.boost[0] <= card.boost[1] <= 3000
    if card.bus_bits is not None and card.bus_bits < 1024:  # one memory chip to 32 bits, or two
        assert card.memory_gib / (card.bus_bits // 32) in (0.5, 1, 1.5, 2, 3, 4, 6)
    assert card.switched_nvlinks is None or card.nvlink_gbs in (card.switched_nvlinks * 25, card.switched_nvlinks * 50)
    assert card.origin
    for item in found.values():
        assert item["basis"] in ("datasheet", "unknown")
        assert item["why"]


@pytest.mark.parametrize("family", SHEETS["rising"], ids=lambda family: family[-1])
def test_a_dearer_card_of_a_family_is_never_slower(family: list[str]) -> None:
    for key in ("peak_fp32", "peak_fp16"):
        rates = [_value(card, key) for card in family if _value(card, key) is not None]
        assert rates == sorted(rates)
    assert _value(family[-1], "peak_bandwidth") == max(_value(card, "peak_bandwidth") for card in family)


def test_the_two_cards_that_started_this_are_as_they_are() -> None:
    small, large = CARDS["gtx-1650"], CARDS["rtx-5060-ti-16gb"]
    assert (small.sm, small.memory_gib) == ("7.5", 4)
    assert (large.sm, large.memory_gib, large.pcie_generation, large.lanes) == ("12.0", 16, 5, 8)
    assert len(CARDS) >= 45


def test_what_was_measured_of_an_h200_is_below_its_sheet_and_near_it() -> None:
    for key, measured in (
        ("peak_bf16", 760e12),
        ("peak_fp16", 729e12),
        ("peak_fp32", 51e12),
        ("peak_bandwidth", 4.3e12),
    ):
        assert 0.7 <= measured / _value("h200", key) <= 1


def test_a_laptop_cards_rate_is_a_range_and_its_clocks_ends() -> None:
    item = catalogue.sheet(CARDS["rtx-4090-laptop"])["peak_fp32"]
    assert (item["low"], item["high"]) == pytest.approx((9728 * 2 * 1455e6, 9728 * 2 * 2040e6), rel=1e-4)
    assert item["low"] < item["value"] < item["high"]


# --- names ---


@pytest.mark.parametrize("case", NAMES["found"], ids=lambda case: case[0])
def test_a_card_is_found_by_what_people_call_it(case: list[str]) -> None:
    assert cards.find(case[0]).id == case[1]


@pytest.mark.parametrize("case", NAMES["not_found"], ids=lambda case: repr(case[0]))
def test_a_name_of_no_one_card_lists_what_could_be_meant(case: list[str]) -> None:
    with pytest.raises(cards.UnknownCard, match=re.escape(case[1])):
        cards.fleet(case[0])


@pytest.mark.parametrize("case", NAMES["driver"], ids=lambda case: f"{case[0]} {case[1]}")
def test_the_drivers_name_and_memory_tell_the_card_or_nothing(case: list[Any]) -> None:
    name, shown, expected = case
    memory = None if shown is None else shown * MIB
    card = cards.match(name, memory)
    assert (card.id if card else None) == expected
    assert bool(catalogue.sheet_for(name, memory)) == (expected is not None)


def test_every_card_is_found_by_its_id_by_its_name_and_by_what_the_driver_shows() -> None:
    for card in CARDS.values():
        assert cards.find(card.id) is card
        assert cards.find(card.id.upper().replace("-", " ")) is card
        assert cards.match(card.name, card.memory_bytes()) is card


@given(st.lists(st.tuples(st.sampled_from(sorted(CARDS)), st.integers(1, 99)), min_size=1, max_size=5))
def test_a_fleets_text_is_read_back_to_itself(asked: list[tuple[str, int]]) -> None:
    text = "+".join(f"{card} x{count}" for card, count in asked)
    found = cards.fleet(text)
    assert cards.fleet(cards.spec(found)) == found
    assert sum(count for _, count in found) == sum(count for _, count in asked)
    assert all(before[0] is not after[0] for before, after in pairwise(found))


@given(st.text(max_size=40))
def test_any_text_is_cards_or_an_error_in_words(text: str) -> None:
    try:
        assert cards.fleet(text)
    except cards.UnknownCard as error:
        assert "\n" not in str(error)


# --- records ---


def test_a_catalogue_record_holds_the_schema_and_says_nothing_was_probed() -> None:
    for card in CARDS:
        record = seal(catalogue.record_body(f"{card}x2"))
        refuse_other_shape(record, card)
        bases = {item["basis"] for _, item in walk(record) if is_reading(item)}
        assert bases <= {"datasheet", "assumed", "unknown"} <= set(BASES)


def test_cards_count_in_the_order_asked_and_alike_neighbours_share_an_entry() -> None:
    body = catalogue.record_body("3090x2+gtx-1650+3090")
    assert [item["ids"] for item in body["devices"].values()] == [["card-0", "card-1"], ["card-2"], ["card-3"]]
    assert list(body["devices"]) == ["card-0", "card-2", "card-3"]
    (node,) = body["nodes"]
    assert {item["node"] for item in body["devices"].values()} == {node}
    again = catalogue.record_body("RTX 3090 x 2 + 1650 + rtx-3090")
    assert render(seal(again)) == render(seal(body))
    assert list(catalogue.record_body("3090")["nodes"]) != [node]


@pytest.mark.parametrize(
    ("text", "torch"),
    [
        ("rtx-5060-ti-16gb+gtx-1650", "cu130"),
        ("1080ti+v100-sxm-16gb", "cu126"),
        ("v100-sxm-16gb+5090", None),
        ("h200", "cu130"),
    ],
)
def test_the_assumed_toolchain_serves_every_card_or_is_unknown_with_its_reason(text: str, torch: str | None) -> None:
    found = catalogue.record_body(text)["toolchain"]
    if torch is None:
        assert found["arch_list"]["value"] is None
        assert "no published build" in found["arch_list"]["why"]
        return
    assert found["torch"]["value"].endswith(torch)
    assert found["arch_list"]["value"] in [list(wheel.arches) for wheel in WHEELS]
    assert {item["basis"] for name, item in found.items() if name != "driver"} == {"assumed"}


def test_only_a_board_of_one_kind_has_links() -> None:
    links = catalogue.record_body("h200x4")["links"]["link-0"]
    assert len(links["pairs"]) == 6
    assert (links["path"]["value"], links["nvlinks"]["value"]) == ("nvlink", 18)
    for text in ("h200", "h200x2+a100-sxm-80gbx2", "3090x2", "h200x16", "v100-sxm-16gbx4"):
        assert "links" not in catalogue.record_body(text)


def test_a_bridge_is_known_of_a_card_and_not_taken_for_granted() -> None:
    assert _value("rtx-3090", "nvlink_sheet") == 56.25e9
    item = catalogue.record_body("3090x2")["devices"]["card-0"]["nvlink_sheet"]
    assert (item["value"], item["basis"]) == (0, "assumed")


def test_cards_that_are_not_here_are_not_timed() -> None:
    with pytest.raises(Usage, match="not in it"):
        probe.record("rtx-3090", timed=True)


def test_an_old_and_a_new_card_are_planned_together_each_in_its_own_dtype() -> None:
    spec = "rtx-5060-ti-16gb+gtx-1650"
    plan = compile_plan(request(devices=spec), probe.record(spec), account())
    assert [entry["dtype"]["chosen"] for entry in plan["ranks"]] == ["bf16", "fp32"]
    assert plan["counts"]["dtype"] == {"bf16": 1, "fp16": 0, "fp32": 1}
    assert plan["request"]["devices"] == spec
    assert plan["step"]["verdict"]["value"] is not None
