"""What the catalogue knows of a card, as readings: beside what a probe reads, or instead of a probe."""

from __future__ import annotations

from planner.cards import Card, match
from schemas.document import reading, unknown
from schemas.form import Json

_ACCUMULATE = "dense products that accumulate in fp32"


def sheet_for(name: str | None, memory_total: int | None) -> dict[str, dict[str, Json]]:
    """The data sheet's readings of the card that the driver's ``name`` and memory (B) tell; empty for none."""
    card = match(name, memory_total)
    return {} if card is None else sheet(card)


def sheet(card: Card) -> dict[str, dict[str, Json]]:
    """Readings of ``card`` with basis "datasheet": peak rates, bandwidth, lanes, link, peer access."""
    allowed, why = card.peer_to_peer
    return {
        "peak_bf16": _peak_bf16(card),
        "peak_fp16": _peak_fp16(card),
        "peak_fp32": _peak_fp32(card),
        "peak_bandwidth": _peak_bandwidth(card),
        "lanes": _figure(card, card.lanes, "PCIe lanes of the card"),
        "pcie_generation_sheet": _figure(card, card.pcie_generation, "PCIe generation of the card"),
        "peer_to_peer": unknown("", why) if allowed is None else reading(allowed, "", "datasheet", why),
        "nvlink_sheet": _nvlink(card),
    }


def _figure(card: Card, value: int | None, what: str) -> dict[str, Json]:
    if value is None:
        return unknown("", f"{what}: not published for the {card.id}, or published differently")
    return reading(value, "", "datasheet", f"{what}: {card.origin}")


def _peak_bf16(card: Card) -> dict[str, Json]:
    if not card.bf16:
        return unknown("FLOP/s", f"the {card.id} has no native bf16: its products would be emulated")
    return _peak_fp16(card)  # one tensor core, one rate


def _peak_fp16(card: Card) -> dict[str, Json]:
    if "tensor_tflops" in card.stated:
        value = card.stated["tensor_tflops"] * 1e12
        return reading(value, "FLOP/s", "datasheet", f"{_ACCUMULATE}: {card.origin}")
    if card.tensor is None:
        return unknown("FLOP/s", f"the {card.id} has no tensor core; a rate that {_ACCUMULATE[6:]} is not published")
    what = f"{card.multiprocessors} multiprocessors x {card.tensor} FLOP a cycle"
    return _rate(card, card.multiprocessors * card.tensor, card.tensor_boost, what, _ACCUMULATE)


def _peak_fp32(card: Card) -> dict[str, Json]:
    if "fp32_tflops" in card.stated:
        return reading(card.stated["fp32_tflops"] * 1e12, "FLOP/s", "datasheet", card.origin)
    return _rate(card, card.cores * 2, card.boost, f"{card.cores} cores x 2 FLOP a cycle", "fp32 outside tensor cores")


def _rate(card: Card, flops: int, clock: tuple[float, float] | None, what: str, kind: str) -> dict[str, Json]:
    if clock is None:
        return unknown("FLOP/s", f"{kind}: no boost clock is published for the {card.id}")
    least, most = clock
    value = flops * (least + most) / 2 * 1e6
    if least == most:
        return reading(value, "FLOP/s", "datasheet", f"{what} x {most:g} MHz boost, {kind}: {card.origin}")
    why = f"{what} x {least:g} to {most:g} MHz boost, as the laptop's maker chose, {kind}: {card.origin}"
    return reading(value, "FLOP/s", "datasheet", why, low=flops * least * 1e6, high=flops * most * 1e6)


def _peak_bandwidth(card: Card) -> dict[str, Json]:
    if "bandwidth_gbs" in card.stated:
        return reading(card.stated["bandwidth_gbs"] * 1e9, "B/s", "datasheet", card.origin)
    if card.bus_bits is None or card.gbps is None:
        return unknown("B/s", f"the memory rate of the {card.id} is not published")
    note = "" if card.note is None else f"; {card.note}"
    why = f"{card.bus_bits} bits x {card.gbps:g} Gbit/s / 8: {card.origin}{note}"
    return reading(card.bus_bits * card.gbps * 1e9 / 8, "B/s", "datasheet", why)


def _nvlink(card: Card) -> dict[str, Json]:
    if not card.nvlink_gbs:
        return reading(0, "B/s", "datasheet", f"no NVLink: {card.origin}")
    how = "over a bridge that is sold apart, between two cards" if card.nvlink_bridge else "all links together"
    return reading(card.nvlink_gbs * 1e9, "B/s", "datasheet", f"one way, {how}: {card.origin}")
