"""How the cards of a node reach each other: NVLink, peer-to-peer over PCI Express, or staged through host memory.

Pairs that are alike in every reading share one entry.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from planner.machine.ask import Ask, text
from schemas.document import reading, unknown
from schemas.form import Json

_READ, _WRITE, _NVLINK = 0, 1, 2  # NVML's numbers of what one card can do to another
_OK = 0
_REFUSALS = {
    1: "the chipset does not support it",
    2: "a card does not support it",
    3: "the path between the sockets does not support it",
    4: "the driver's settings disable it",
    5: "not supported",
    6: "for a reason NVML does not know",
}
_ANCESTORS = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of the newest; a card answers for those that it has
_TO_GPU, _TO_SWITCH = 0, 2


@dataclass(frozen=True)
class End:
    """A card as the end of a link: its id, NVML's handle, and its PCI bus id in lower case."""

    uuid: str
    handle: Any
    bus: str


@dataclass
class _Ports:
    """A card's active NVLinks by what they lead to; ``reason`` says why they could not be counted."""

    active: int = 0
    to_switch: int = 0
    to_card: Counter[str] = field(default_factory=Counter)
    version: str = ""
    reason: str | None = None


def read(ask: Ask, ends: Sequence[End], beyond: Sequence[End], environ: Mapping[str, str]) -> dict[str, Json]:
    """The record's links: ``{"link-0": {pairs, path, ancestor, nvlinks, peer_to_peer}}``, each pair once, in order.

    Args:
        ends: the visible cards.
        beyond: cards not visible here, to which the visible ones' links are read too, since another rank may see them.
    """
    pairs = [*combinations(ends, 2), *product(ends, beyond)]
    ports = {end.uuid: _ports(ask, end) for end in (*ends, *beyond)} if pairs else {}
    return _classes(
        ([first.uuid, second.uuid], _pair(ask, (first, second), (ports[first.uuid], ports[second.uuid]), environ))
        for first, second in pairs
    )


def between(found: Iterable[Mapping[str, Json]], ids: Collection[str] | None) -> dict[str, Json]:
    """The links of several records of which both ends are among ``ids`` (None: all); for one pair, the first told."""
    known: dict[frozenset[str], tuple[list[str], dict[str, Json]]] = {}
    for links in found:
        for link in links.values():
            readings = {key: item for key, item in link.items() if key != "pairs"}
            for pair in link["pairs"]:
                if ids is None or set(pair) <= set(ids):
                    known.setdefault(frozenset(pair), (list(pair), readings))
    return _classes(known.values())


def _classes(pairs: Iterable[tuple[list[str], dict[str, Json]]]) -> dict[str, Json]:
    """One entry for all pairs of the same readings."""
    found: dict[str, dict[str, Json]] = {}
    for pair, readings in pairs:
        entry = found.setdefault(json.dumps(readings, sort_keys=True), {"pairs": [], **readings})
        entry["pairs"].append(pair)
    return {f"link-{number}": entry for number, entry in enumerate(found.values())}


def _pair(
    ask: Ask, ends: tuple[End, End], ports: tuple[_Ports, _Ports], environ: Mapping[str, str]
) -> dict[str, dict[str, Json]]:
    status = {what: _status(ask, ends, what) for what in (_READ, _WRITE, _NVLINK)}
    nvlinks = _nvlinks(ends, ports, status[_NVLINK])
    peer = _peer_to_peer(status[_READ], status[_WRITE])
    ancestor = ask.get("nvmlDeviceGetTopologyCommonAncestor", ends[0].handle, ends[1].handle)
    return {
        "path": _path(nvlinks, peer, status[_NVLINK], environ),
        "ancestor": _ancestor(ancestor),
        "nvlinks": nvlinks,
        "peer_to_peer": peer,
    }


_Status = tuple[int | None, str | None]
"""NVML's status of one ability of a pair (0 is yes), or None and why it is not told."""


def _status(ask: Ask, ends: tuple[End, End], what: int) -> _Status:
    first, second = ends[0].handle, ends[1].handle
    there, reason = ask.get("nvmlDeviceGetP2PStatus", first, second, what)
    if reason is not None or there != _OK:
        return there, reason
    return ask.get("nvmlDeviceGetP2PStatus", second, first, what)


def _ancestor(answer: tuple[Any, str | None]) -> dict[str, Json]:
    level, reason = answer
    if level not in _ANCESTORS:
        return unknown("", reason or f"NVML answered level {level}, which is not known")
    return reading(_ANCESTORS[level], "", "probed", "what of the PCI tree is common to both, by NVML")


def _peer_to_peer(read: _Status, write: _Status) -> dict[str, Json]:
    for (status, reason), verb in ((read, "read"), (write, "write")):
        if reason is not None:
            return unknown("", reason)
        if status != _OK:
            why = _REFUSALS.get(status or 0, f"status {status}")
            return reading(False, "", "probed", f"NVML: one cannot {verb} the other's memory: {why}")
    return reading(True, "", "probed", "NVML: each can read and write the other's memory")


def _ports(ask: Ask, end: End) -> _Ports:
    found = _Ports()
    for link in range(_MOST_LINKS):
        active, reason = ask.get("nvmlDeviceGetNvLinkState", end.handle, link)
        if reason is not None:
            found.reason = reason if link == 0 else None  # beyond the last link NVML gives an error, as it should
            return found
        if not active:
            continue
        found.active += 1
        kind, _ = ask.get("nvmlDeviceGetNvLinkRemoteDeviceType", end.handle, link)
        far, _ = ask.get("nvmlDeviceGetNvLinkRemotePciInfo", end.handle, link)
        found.to_switch += kind == _TO_SWITCH
        if kind in (_TO_GPU, None) and far is not None:
            found.to_card[text(far.busId).lower()] += 1
        if not found.version:
            version, _ = ask.get("nvmlDeviceGetNvLinkVersion", end.handle, link)
            found.version = _VERSIONS.get(version, "of a version not told")
    return found


def _nvlinks(ends: tuple[End, End], ports: tuple[_Ports, _Ports], status: _Status) -> dict[str, Json]:
    """Active NVLinks that join the two, directly or through a switch."""
    first, second = ports
    direct = first.to_card[ends[1].bus] if ends[1].bus else 0
    if direct:
        return reading(direct, "", "probed", f"active NVLinks {first.version} from one to the other")
    if first.to_switch and second.to_switch:
        links = min(first.to_switch, second.to_switch)
        return reading(links, "", "probed", f"active NVLinks {first.version} of each to a switch")
    if status[0] == _OK:
        if first.active and second.active:
            why = (
                f"active NVLinks {first.version} of each; NVML does not name their far ends, and says they join the two"
            )
            return reading(min(first.active, second.active), "", "probed", why)
        return unknown("", f"NVLink joins the two, by how many links is not told: {first.reason or second.reason}")
    reason = first.reason or second.reason
    if status[0] is None and reason is not None:
        return unknown("", reason)
    return reading(0, "", "probed", "NVML: no active NVLink joins the two")


def _path(
    nvlinks: Mapping[str, Json], peer: Mapping[str, Json], status: _Status, environ: Mapping[str, str]
) -> dict[str, Json]:
    """The way that bytes take between the two, from what NVML says of the pair."""
    if environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return reading("staged", "", "probed", "through host memory: NCCL_P2P_DISABLE is set where this was probed")
    if status[0] == _OK or (nvlinks["value"] and status[0] is None):
        count = "NVLink" if not nvlinks["value"] else f"{nvlinks['value']} NVLinks"
        return reading("nvlink", "", "probed", f"{count} between the two")
    if peer["value"] is None:
        return unknown("", f"neither NVLink nor peer-to-peer is told: {peer['why']}")
    if peer["value"]:
        return reading("p2p", "", "probed", "peer-to-peer over PCI Express")
    return reading("staged", "", "probed", "through host memory: no peer-to-peer between the two")
