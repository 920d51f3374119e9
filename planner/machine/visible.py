"""Which cards and slices CUDA shows a process: every form of CUDA_VISIBLE_DEVICES, as CUDA's own documents tell it.

The order of what is visible is the order of ranks. Nothing is asked of a card here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.request import Usage

NAME = "CUDA_VISIBLE_DEVICES"
UNNAMED = "cuda-"
"""A card whose UUID is not told is known as this and its place in the order of the PCI bus."""

_END = ("-1", "NoDevFiles")
_INDEX = re.compile(r"[0-9]+", re.ASCII)
_OLD_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/([0-9]+)/([0-9]+)", re.ASCII)


def named(identity: str) -> str:
    """The device ``identity`` as CUDA_VISIBLE_DEVICES takes it: by its UUID, or by its place where it has none."""
    return identity.removeprefix(UNNAMED)


@dataclass(frozen=True)
class Slice:
    """A MIG device of a card: its id, and the numbers of its GPU instance and compute instance."""

    uuid: str
    instances: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Card:
    """What there is to name: a card's id, whether it is divided (MIG), and its slices."""

    uuid: str
    divided: bool = False
    slices: tuple[Slice, ...] = ()


Place = tuple[int, int | None]
"""A card's place in the order of the PCI bus, and a slice's place on it (None: the card as a whole)."""


@dataclass(frozen=True)
class Selection:
    """What is visible, in order, and what a person should hear of how it was read."""

    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()


def select(cards: Sequence[Card], environ: Mapping[str, str]) -> Selection:
    """What CUDA_VISIBLE_DEVICES of ``environ`` leaves of ``cards``, which stand in the order of the PCI bus.

    Unset leaves all. An empty list, and "-1" or "NoDevFiles" wherever they stand, end the list. CUDA also ends it at
    the first entry that names nothing: what stands before is visible, and a note says so.

    Raises:
        Usage: an entry names what an earlier one named (CUDA then shows no card at all), a prefix fits several cards,
            indices and UUIDs are mixed, or the first entry names nothing.
    """
    asked = environ.get(NAME)
    if asked is None:
        return _as_cuda_shows(cards, [(place, None) for place in range(len(cards))])
    entries = [entry.strip() for entry in asked.split(",")] if asked.strip() else []
    for place, entry in enumerate(entries):
        if entry in _END:
            entries = entries[:place]
            break
    _one_form(entries, asked)
    places: list[Place] = []
    notes: list[str] = []
    for entry in entries:
        found = _place(cards, entry, asked)
        if found is None:
            notes.append(_ended(cards, entry, asked, bool(places)))
            break
        if found in places:
            raise Usage(f"{NAME}={asked} names {_uuid(cards, found)} twice; CUDA then shows no card: name each once")
        places.append(found)
    if entries and _INDEX.fullmatch(entries[0]) and environ.get("CUDA_DEVICE_ORDER") == "FASTEST_FIRST":
        notes.append(f"{NAME}={asked} is counted in the order of the PCI bus, not CUDA_DEVICE_ORDER=FASTEST_FIRST")
    seen = _as_cuda_shows(cards, places)
    return Selection(seen.places, (*notes, *seen.notes))


def _one_form(entries: Sequence[str], asked: str) -> None:
    indices = [bool(_INDEX.fullmatch(entry)) for entry in entries if _INDEX.fullmatch(entry) or _is_uuid(entry)]
    if any(indices) and not all(indices):
        raise Usage(f"{NAME}={asked} mixes indices and UUIDs, which CUDA does not read alike everywhere: use one form")


def _is_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def _place(cards: Sequence[Card], entry: str, asked: str) -> Place | None:
    """What ``entry`` names; None when it names nothing."""
    if _INDEX.fullmatch(entry):
        return (int(entry), None) if int(entry) < len(cards) else None
    old = _OLD_SLICE.fullmatch(entry)
    if old:
        places = list(_by_instance(cards, old[1], (int(old[2]), int(old[3]))))
    else:
        places = [place for place, uuid in _everything(cards) if _is_uuid(entry) and uuid.startswith(entry)]
        places = [place for place in places if _uuid(cards, place) == entry] or places
    if len(places) > 1:
        raise Usage(f"{NAME}={asked}: {entry} begins the UUIDs of {len(places)} of this machine's devices: name one")
    return places[0] if places else None


def _everything(cards: Sequence[Card]) -> Iterator[tuple[Place, str]]:
    for place, card in enumerate(cards):
        yield (place, None), card.uuid
        for number, part in enumerate(card.slices):
            yield (place, number), part.uuid


def _by_instance(cards: Sequence[Card], parent: str, instances: tuple[int, int]) -> Iterator[Place]:
    for place, card in enumerate(cards):
        for number, part in enumerate(card.slices):
            if card.uuid == parent and part.instances == instances:
                yield place, number


def _uuid(cards: Sequence[Card], place: Place) -> str:
    card, part = place
    return cards[card].uuid if part is None else cards[card].slices[part].uuid


def _ended(cards: Sequence[Card], entry: str, asked: str, some: bool) -> str:
    """The note on an entry that names nothing, or the refusal when nothing stands before it."""
    cards_here = f"this machine has {len(cards)} card{'s' * (len(cards) != 1)}"
    if _INDEX.fullmatch(entry):
        why = f"{entry} names no card: {cards_here}, counted from 0"
    elif _is_uuid(entry):
        why = f"no UUID here begins with {entry}: {cards_here}"
    else:
        why = f"{entry!r} is neither an index nor the beginning of a UUID (GPU-..., MIG-...)"
    if not some:
        raise Usage(f"{NAME}={asked}: {why}; CUDA shows no card (to plan for the CPU: --devices cpu)")
    return f"{NAME}={asked}: {why}; CUDA ends the list there"


def _as_cuda_shows(cards: Sequence[Card], chosen: Sequence[Place]) -> Selection:
    """``chosen`` with divided cards as CUDA shows them: by their first slice, and then no whole card beside it.

    Slices named one by one all stay, so that a plan over several can be refused in words. A divided card without a
    slice is no device; it stays only where there is nothing else, so that its owner hears why.
    """
    places: list[Place] = []
    notes: list[str] = []
    for place, part in chosen:
        card = cards[place]
        if part is None and card.divided and card.slices:
            part = 0
            if len(card.slices) > 1:
                notes.append(
                    f"{card.uuid} is divided in {len(card.slices)} slices: CUDA shows the first; name another"
                    f" by its UUID in {NAME}"
                )
        places.append((place, part))
    empty = [(place, part) for place, part in places if part is None and cards[place].divided]
    parts = [(place, part) for place, part in places if part is not None]
    whole = [(place, part) for place, part in places if part is None and not cards[place].divided]
    if empty:
        notes.append(
            f"MIG mode is on and no slice is made on {', '.join(cards[place].uuid for place, _ in empty)}:"
            " CUDA shows no device there"
        )
    if parts and whole:
        hidden = ", ".join(cards[place].uuid for place, _ in whole)
        notes.append(f"CUDA shows no whole card beside a MIG slice: {hidden} is not visible")
    named = {place for place in chosen if place[1] is not None}
    if parts and not named and len(parts) > 1:
        notes.append("CUDA shows a process one MIG slice: the first")
        parts = parts[:1]
    kept = parts or whole or empty
    return Selection(tuple(place for place in places if place in kept), tuple(notes))
