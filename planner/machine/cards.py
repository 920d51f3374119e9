"""The catalogue's cards: their figures from cards.json, and how a person's or the driver's name finds one.

Figures are stored as published parts (multiprocessors, clock, bus) rather than as products of them, so that each rate
can be checked against the one its maker prints.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

GIB, MIB = 2**30, 2**20
_FORMS = {"sxm": ("sxm", "sxm2", "sxm4", "sxm5"), "pcie": ("pcie",), "laptop": ("laptop", "laptopgpu", "mobile")}
_BRANDS = re.compile(r"\b(nvidia|geforce|tesla|quadro|generation)\b")
_MEMORY = re.compile(r"([0-9]+)(?:gib|gb|g)(?![a-z0-9])")
_COUNT = re.compile(r"(.*?[0-9a-z].*?)\s*[x×*]\s*([0-9]{1,5})", re.DOTALL)  # noqa: RUF001 (people type it)
# What the driver shows of the marketed memory: error correction takes a sixteenth, firmware a little more.
_LEAST_SHOWN, _MOST_SHOWN = 0.9, 1.02


class UnknownCard(Exception):
    """A name that is no card's, or several cards'. The message names the variants, or what is near."""


@dataclass(frozen=True)
class Card:
    """One card as its maker describes it. None where that is not published.

    Clocks are in MHz, (least, most): two where a laptop's maker chooses, else one twice. ``tensor`` is the FLOP of
    dense fp16 products that one multiprocessor does a cycle, accumulating in fp32;
    ``bf16`` whether they take bf16 at the same rate; ``gbps`` the bits a second and pin
    of the memory, in 10^9; ``nvlink_gbs`` what all its links carry one way, in 10^9 B/s, 0 without any;
    ``switched_nvlinks`` the links between any two of them on the board they are sold on, through NVSwitch.
    """

    id: str
    name: str
    sm: str
    origin: str
    memory_gib: int
    driver_mib: int | None
    multiprocessors: int
    cores: int
    boost: tuple[float, float] | None
    tensor: int | None
    bf16: bool
    tensor_boost: tuple[float, float] | None
    bus_bits: int | None
    gbps: float | None
    lanes: int | None
    pcie_generation: int | None
    peer_to_peer: tuple[bool | None, str]
    nvlink_gbs: float
    nvlink_bridge: bool
    switched_nvlinks: int | None
    note: str | None
    stated: Mapping[str, float]

    def memory_bytes(self) -> int:
        """What the driver shows where that is known, else the marketed size in GiB."""
        return self.memory_gib * GIB if self.driver_mib is None else self.driver_mib * MIB


@cache
def cards() -> dict[str, Card]:
    """Every card of the catalogue by its id."""
    found = json.loads(files("planner.machine").joinpath("cards.json").read_text("utf-8"))
    made = (_card(row, found["families"][row["family"]], found["chips"]) for row in found["cards"])
    return {card.id: card for card in made}


def _card(row: Mapping[str, Any], family: Mapping[str, Any], chips: Mapping[str, Any]) -> Card:
    chip = chips[family["chip"]]
    tensor = chip["tensor"]
    if tensor is not None and family["fp32_accumulate"] == "half":
        tensor //= 2
    boost = _range(row.get("boost_mhz"))
    peers = row.get("peer_to_peer", family["peer_to_peer"])
    return Card(
        id=row["id"],
        name=row["name"],
        sm=chip["sm"],
        origin=f"{family['origin']}, not every figure checked against it",
        memory_gib=row["memory_gib"],
        driver_mib=row.get("driver_mib"),
        multiprocessors=row["multiprocessors"],
        cores=row["multiprocessors"] * chip["cores"],
        boost=boost,
        tensor=tensor,
        bf16=chip["bf16"],
        tensor_boost=_range(row.get("tensor_boost_mhz")) or boost,
        bus_bits=row.get("bus_bits"),
        gbps=row.get("gbps"),
        lanes=row.get("lanes"),
        pcie_generation=family["pcie_generation"],
        peer_to_peer=(peers["value"], peers["why"]),
        nvlink_gbs=row.get("nvlink_gbs", 0),
        nvlink_bridge=row.get("nvlink_bridge", False),
        switched_nvlinks=row.get("switched_nvlinks"),
        note=row.get("note"),
        stated=row.get("stated", {}),
    )


def _range(clock: Any) -> tuple[float, float] | None:
    if clock is None:
        return None
    least, most = clock if isinstance(clock, list) else (clock, clock)
    return float(least), float(most)


def match(name: str | None, memory_total: int | None) -> Card | None:
    """The card that the driver's ``name`` and total memory in bytes tell, None when no card or several fit.

    A card whose memory is not what the catalogue says (a rebuilt one, a slice) is not that card.
    """
    if not name:
        return None
    fitting = [
        card
        for card in _named(name)
        if memory_total is None or _LEAST_SHOWN <= memory_total / (card.memory_gib * GIB) <= _MOST_SHOWN
    ]
    return fitting[0] if len(fitting) == 1 else None


def find(text: str) -> Card:
    """The card that a person's ``text`` names. Raises UnknownCard for none, or for several."""
    found = _named(text)
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownCard(f"{_shown(text)} is several cards: one of {', '.join(card.id for card in found)}")
    near = list(dict.fromkeys(_aliases()[key][0].id for key in difflib.get_close_matches(_plain(text), _aliases(), 8)))
    hint = f": did you mean {', '.join(near[:4])}?" if near else ", as rtx-3090, 3090x2 or rtx-5060-ti-16gb+gtx-1650"
    raise UnknownCard(f"{_shown(text)} is no card of the catalogue{hint}")


def fleet(text: str) -> list[tuple[Card, int]]:
    """The cards of ``CARD[xN][+CARD...]`` in the order asked, neighbours of one kind counted together.

    Raises:
        UnknownCard: a part names no card, or several, or is empty; or a count of 0.
    """
    found: list[tuple[Card, int]] = []
    for part in text.split("+"):
        card, count = _counted(part.strip())
        if found and found[-1][0] is card:
            card, count = card, found.pop()[1] + count
        found.append((card, count))
    return found


def spec(asked: Sequence[tuple[Card, int]]) -> str:
    """The one text of a fleet: ``rtx-3090x4+gtx-1650``."""
    return "+".join(card.id if count == 1 else f"{card.id}x{count}" for card, count in asked)


def _counted(part: str) -> tuple[Card, int]:
    if not part:
        raise UnknownCard("a card's name is empty: CARD[xN][+CARD...], as in rtx-3090x2+gtx-1650")
    counted = None if _named(part) else _COUNT.fullmatch(part.lower())
    # "gtx 1650" ends as a count would, so a count is only read where what stands before it could be a card.
    if counted is None or not (_named(counted[1]) or re.search("[0-9]", counted[1])):
        return find(part), 1
    card, count = find(counted[1]), int(counted[2])
    if count < 1:
        raise UnknownCard(f"{_shown(part)} asks for {count} cards: the least is 1")
    return card, count


def _named(text: str) -> list[Card]:
    return _aliases().get(_plain(text), [])


def _plain(text: str) -> str:
    """``text`` without case, brand, blanks and hyphens, its memory as "16gb"."""
    lower = _BRANDS.sub(" ", re.sub(r"\((?:r|tm)\)|[®™\s_-]", " ", text.lower()))
    return _MEMORY.sub(r"\1gb", lower.replace(" ", ""))


@cache
def _aliases() -> dict[str, list[Card]]:
    """The cards by every plain name they go by; a name without the memory may be several cards'."""
    found: dict[str, list[Card]] = {}
    for card in cards().values():
        for alias in dict.fromkeys([_plain(card.name), *_spellings(card)]):
            found.setdefault(alias, []).append(card)
    return found


def _spellings(card: Card) -> list[str]:
    words = [word for word in card.id.split("-") if not re.fullmatch("[0-9]+gb", word)]
    forms = [word for word in words if word in _FORMS]
    head = [word for word in words if word not in _FORMS]
    heads = ["".join(head)] + (["".join(head[1:])] if head[0] in ("gtx", "rtx") else [])
    spelt: list[tuple[str, ...]] = [_FORMS[forms[0]]] if forms else [("",)]
    if forms and forms[0] != "laptop":
        spelt = [(*spelt[0], "")]
    memory = (f"{card.memory_gib}gb", "")
    tails = {
        "".join(pair) for form, size in itertools.product(spelt[0], memory) for pair in ((form, size), (size, form))
    }
    return [start + tail for start in heads for tail in sorted(tails)]


def _shown(text: str) -> str:
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return repr(clean if len(clean) <= 60 else clean[:57] + "...")
