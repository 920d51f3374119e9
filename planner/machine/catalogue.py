"""What the catalogue knows of a card, as readings: beside what a probe reads, or instead of a probe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from planner.machine.cards import Card, fleet, match, spec
from planner.machine.wheels import serving
from schemas.document import reading, unknown
from schemas.form import Json

# Released together, and seen to run together; the wheel of torch is chosen for the cards.
_RELEASES = {
    "python": "3.12",
    "triton": "3.6.0",
    "fla-core": "0.6.0",
    "flash-linear-attention": "0.6.0",
    "bitsandbytes": "0.50.2",
    "nccl": "2.28.9",
}
_MOST_ON_A_BOARD = 8  # cards that one NVSwitch board joins
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


def record_body(text: str) -> dict[str, Json]:
    """The unsealed record of made-up cards in one made-up machine, for ``CARD[xN][+CARD...]``.

    Ids count ``card-0``, ``card-1``, ... in the order asked. Neighbours that are alike share an entry.

    Raises:
        UnknownCard: the text names no card, or several.
    """
    asked = fleet(text)
    node = f"node-{hashlib.sha256(spec(asked).encode()).hexdigest()[:8]}"
    devices: dict[str, Json] = {}
    first = 0
    for card, count in asked:
        ids = [f"card-{place}" for place in range(first, first + count)]
        devices[ids[0]] = {"ids": ids, "node": node, "kind": "cuda", **_described(card)}
        first += count
    body: dict[str, Json] = {
        "format": "dormouse.record",
        "format_version": 1,
        "toolchain": _toolchain([card for card, _ in asked]),
        "nodes": {node: _machine()},
        "devices": devices,
    }
    return body | _links(asked)


def _described(card: Card) -> dict[str, Json]:
    """The card as a probe would find it, as far as a data sheet can tell."""
    shown = "as marketed; the driver shows a little less" if card.driver_mib is None else "as the driver shows it"
    found = sheet(card)
    if card.nvlink_bridge:
        why = f"without the bridge that is sold apart; with it {card.nvlink_gbs:g} GB/s one way between two"
        found["nvlink_sheet"] = reading(0, "B/s", "assumed", why)
    slot = "; in a slot that gives it all"
    generation, width = found["pcie_generation_sheet"], found["lanes"]
    return {
        "name": reading(card.name, "", "datasheet", "the name that the driver gives it"),
        "sm": reading(card.sm, "", "datasheet", f"compute capability: {card.origin}"),
        "memory_total": reading(card.memory_bytes(), "B", "datasheet", f"{card.memory_gib} GiB {shown}: {card.origin}"),
        "memory_free": unknown("B", "a catalogue card has no driver to ask"),
        "multiprocessors": reading(card.multiprocessors, "", "datasheet", card.origin),
        "pcie_generation_max": _said_again(generation, slot),
        "pcie_generation_current": _said_again(generation, slot),
        "pcie_width_max": _said_again(width, slot),
        "pcie_width_current": _said_again(width, slot),
        "mig": reading("off", "", "assumed", "a whole card; slices are made by its owner"),
        "compute_mode": reading("default", "", "assumed", "as the driver starts"),
        **found,
    }


def _said_again(item: dict[str, Json], more: str) -> dict[str, Json]:
    return item if item["value"] is None else {**item, "why": item["why"] + more}


def _machine() -> dict[str, Json]:
    why = "a catalogue fleet has no machine to ask"
    return {
        "cores": unknown("", why),
        "memory_total": unknown("B", why),
        "memory_free": unknown("B", why),
        "platform": reading("linux", "", "assumed", "where NCCL runs"),
    }


def _toolchain(chosen: Iterable[Card]) -> dict[str, Json]:
    """A toolchain that serves all the cards; unknown where no one build of torch does."""
    wheel = serving({card.sm for card in chosen})
    driver = unknown("", "a catalogue card has no driver to ask")
    if wheel is None:
        why = (
            "no published build of torch holds code for all of these cards: Volta and older ended where Blackwell began"
        )
        names = ("torch", "cuda", "arch_list", *_RELEASES)
        return {name: unknown("", why) for name in names} | {"driver": driver}
    why = f"{wheel.name}, which serves every card asked for"
    found = {
        "torch": f"{wheel.torch.split()[0]}.0+cu{wheel.cuda.replace('.', '')}",
        "cuda": wheel.cuda,
        "arch_list": list(wheel.arches),
    }
    items = {name: reading(value, "", "assumed", why) for name, value in found.items()}
    items |= {name: reading(value, "", "assumed", f"a release beside {why}") for name, value in _RELEASES.items()}
    return items | {"driver": driver}


def _links(asked: Sequence[tuple[Card, int]]) -> dict[str, Json]:
    """The one class of links of a board whose cards NVSwitch joins; nothing for other fleets: their slots decide."""
    card, count = asked[0]
    if len(asked) > 1 or card.switched_nvlinks is None or not 1 < count <= _MOST_ON_A_BOARD:
        return {}
    pairs = [[f"card-{a}", f"card-{b}"] for a in range(count) for b in range(a + 1, count)]
    why = f"the board that the {card.id} is sold on joins every two through NVSwitch: {card.origin}"
    return {
        "links": {
            "link-0": {
                "pairs": pairs,
                "path": reading("nvlink", "", "datasheet", why),
                "nvlinks": reading(card.switched_nvlinks, "", "datasheet", why),
                "peer_to_peer": reading(True, "", "datasheet", why),
            }
        }
    }
