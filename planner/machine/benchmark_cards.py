"""Timing this machine's cards: each alone, then what passes between them. Starts the processes of
`planner.machine.benchmark_cuda`, and makes readings of what they answer.

A card is timed by a process that sees it alone, as a rank of a run does, and that inherits this environment: inside
limits of MPS, or a wrapper, it is timed inside them. The processes start together and then take turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from planner.machine import visible
from planner.machine.benchmark import timed
from planner.machine.crew import Crew, Failed
from planner.machine.ring_readings import all_reduce_readings, nccl_settings, refused
from planner.request import Usage
from schemas.document import unknown
from schemas.form import Json

COMMAND = (sys.executable, "-P", "-m", "planner.machine.benchmark_cuda")
MOST_CARDS_OF_ALL_PAIRS = 8
ALIKE = 0.05  # cards of one name whose medians differ by less are alike
ALIKE_OPERATORS = 1.0  # the host's own noise, and who shares a core
OPERATORS = "operator_seconds"
IDLE = "the other cards idle"
_ALL = "all cards"  # the helper that sees them all


@dataclass(frozen=True)
class Job:
    """What is timed and how long. ``dry`` takes CPUs for cards, as `planner.machine.stopwatch.Place` says."""

    product: int = 4096  # rows and columns
    copy_bytes: int = 2**28
    layers: int = 8  # of the model whose operators are timed
    repeats: int = 9  # at least
    share: float = 0.4  # seconds that one quantity is timed
    smallest: int = 2**16  # bytes of an all-reduce
    largest: int = 2**31
    budget: float = 15.0  # seconds of all-reduces, after which no larger size is begun
    ready_deadline: float = 120.0  # seconds: to import torch from a cold disk,
    card_deadline: float = 90.0  # for one card,
    group_deadline: float = 60.0  # for the all-reduces,
    pairs_deadline: float = 60.0  # for the copies of all pairs
    dry: Mapping[str, Json] | None = None


def measure(
    devices: Mapping[str, Json], links: Mapping[str, Json] | None, job: Job | None = None, command: Sequence[str] = ()
) -> dict[str, Json]:
    """Time the cards of ``devices`` (entries of a record, all of kind cuda and of this machine).

    Args:
        links: the record's classes of pairs, where the driver told them.

    Returns:
        {"devices", "node", "links"}: an entry a card with what was timed in it, what enters their node, and the
        classes of pairs.

    Raises:
        Usage: nothing could be timed on any card.
    """
    job = job or Job()
    cards = [identity for device in devices.values() for identity in device["ids"]]
    found: dict[str, Json] = {"node": {}, "links": {}}
    with (
        TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        Crew(command or COMMAND, _environs(cards, job)) as crew,
    ):
        crew.ready(job.ready_deadline)
        answers = {
            card: _asked(crew, {card: {**asdict(job), "part": "card"}}, job.card_deadline)[card] for card in cards
        }
        _hosts(crew, answers, job)
        timings = {card: _card_readings(answers[card], job) for card in cards}
        _refuse_nothing(timings)
        if len(cards) > 1:
            found["node"] = _node(crew, cards, answers, job, Path(folder))
            crew.release(cards)
            found["links"] = _links(crew, cards, links, job)
    return {"devices": _entries(devices, timings), **found}


def _hosts(crew: Crew, answers: Mapping[str, Json], job: Job) -> None:
    """Time what launching costs the host for every card at once, as ranks do that share it, and enter it with the rest
    of what each card gave."""
    timed = {card: answer["quantities"] for card, answer in answers.items() if "quantities" in answer}
    found = _asked(crew, {card: {**asdict(job), "part": "host"} for card in timed}, job.card_deadline)
    for card, quantities in timed.items():
        quantities[OPERATORS] = found[card].get(OPERATORS, found[card])


def _environs(cards: Sequence[str], job: Job) -> dict[str, dict[str, str]]:
    """The environment of each helper: a card's sees that card, the last sees all."""
    # The loopback serves a dry run: a machine's own name need not resolve. NCCL_* is left as it is.
    base = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **({"GLOO_SOCKET_IFNAME": "lo"} if job.dry else {})}
    seen = {card: card for card in cards} | ({_ALL: ",".join(cards)} if len(cards) > 1 else {})
    names = {name: ",".join(map(visible.named, shown.split(","))) for name, shown in seen.items()}
    return {name: {**base, "CUDA_VISIBLE_DEVICES": "" if job.dry else shown} for name, shown in names.items()}


def _asked(crew: Crew, requests: Mapping[str, Mapping[str, Json]], deadline: float) -> dict[str, Json]:
    """The answers, with a failure of the helpers as the {"error"} of each that was asked."""
    try:
        return crew.ask(requests, deadline)
    except Failed as failure:
        return {name: {"error": str(failure)} for name in requests}


def _card_readings(answer: Json, job: Job) -> dict[str, Json]:
    product, copied = f"product of two {job.product} x {job.product} matrices in", f"copy of {job.copy_bytes} B"
    rows = (
        ("rate_fp32", "FLOP/s", f"{product} fp32, TF32 off"),
        ("rate_fp16", "FLOP/s", f"{product} fp16"),
        ("rate_bf16", "FLOP/s", f"{product} bf16"),
        ("bandwidth", "B/s", f"{copied} within the card, bytes read and written"),
        ("host_to_device", "B/s", f"{copied} from pinned memory"),
        ("device_to_host", "B/s", f"{copied} to pinned memory"),
        (OPERATORS, "s", f"one operator of a model of {job.layers} small layers, forward and backward"),
    )
    quantities = answer.get("quantities", {})
    return {
        key: _reading(quantities.get(key, answer), unit, what, "all cards at once" if key == OPERATORS else IDLE)
        for key, unit, what in rows
    }


def _reading(found: Json, unit: str, what: str, beside: str) -> dict[str, Json]:
    if "error" in found:
        return unknown(unit, f"{what}: not timed: {found['error']}")
    why = f"{what}; {beside}; median of {len(found['samples'])}"
    why += "" if found["stable"] else ", still drifting after warm-up"
    return timed(found["samples"], unit, why + (f"; {found['note']}" if found.get("note") else ""))


def _refuse_nothing(timings: Mapping[str, Mapping[str, Json]]) -> None:
    if all(item["value"] is None for readings in timings.values() for item in readings.values()):
        card, readings = next(iter(timings.items()))
        raise Usage(f"--benchmark: nothing could be timed on any card; {card}: {readings['rate_fp32']['why']}")


def _node(crew: Crew, cards: Sequence[str], answers: Mapping[str, Json], job: Job, folder: Path) -> dict[str, Json]:
    """Readings of the all-reduce over all ``cards``."""
    missing = [card for card in cards if "free" not in answers[card]]
    if missing:
        return refused(f"{missing[0]} could not be timed: {answers[missing[0]]['error']}")
    free = min(answers[card]["free"] for card in cards)
    # Two buffers and the mask of the comparison, beside what NCCL itself takes.
    sizes = [size for size in _doubling(job.smallest, job.largest) if 4 * size <= free]
    if len(sizes) < 3:
        return refused(f"needs {16 * job.smallest} B of free memory on each card, and {free} B are free on one")
    shared = {**asdict(job), "part": "group", "world": len(cards), "sizes": sizes, "rendezvous": str(folder / "store")}
    requests = {card: {**shared, "rank": rank} for rank, card in enumerate(cards)}
    return all_reduce_readings(
        list(_asked(crew, requests, job.group_deadline).values()), len(cards), max(sizes) < job.largest
    )


def _doubling(smallest: int, largest: int) -> list[int]:
    return [smallest << power for power in range((largest // smallest).bit_length())]


def _links(crew: Crew, cards: Sequence[str], links: Mapping[str, Json] | None, job: Job) -> dict[str, Json]:
    """``links`` (all pairs in one class where the driver told none) with each class's rate of copies."""
    if not links:
        everyone = [list(pair) for pair in combinations(cards, 2)]
        links = {"link-0": {"pairs": everyone, "path": unknown("", "the driver did not tell how these are linked")}}
    few = len(cards) <= MOST_CARDS_OF_ALL_PAIRS
    chosen = {name: link["pairs"] if few else link["pairs"][:2] for name, link in links.items()}
    wanted = [pair for pairs in chosen.values() for pair in pairs]
    request = {**asdict(job), "part": "pairs", "pairs": [[cards.index(end) for end in pair] for pair in wanted]}
    answer = _asked(crew, {_ALL: request}, job.pairs_deadline)[_ALL]
    rows = iter(answer.get("pairs", [answer] * len(wanted)))
    return {
        name: {**link, "copy_rate": _copy_rate([next(rows) for _ in chosen[name]], chosen[name], link, job)}
        for name, link in links.items()
    }


def _copy_rate(rows: Sequence[Json], pairs: Sequence[Sequence[str]], link: Json, job: Job) -> dict[str, Json]:
    what = f"copy of {job.copy_bytes} B from card to card, one way at a time"
    for row, pair in zip(rows, pairs, strict=True):
        if "error" in row:
            return unknown("B/s", f"{what}: {' and '.join(pair)}: {row['error']}; {nccl_settings()[1]}")
    samples = [value for row in rows for value in row["samples"]]
    count = f"{len(pairs)} of {len(link['pairs'])} pair{'s' * (len(link['pairs']) > 1)}, both ways"
    access = {True: "; direct access", False: "; no direct access: through host memory", None: ""}
    peers = {row["peer"] for row in rows}
    note = access[peers.pop()] if len(peers) == 1 else "; some with direct access, some without"
    drift = "" if all(row["stable"] for row in rows) else ", still drifting after warm-up"
    return timed(samples, "B/s", f"{what}; {count}; median of {len(samples)}{drift}{note}")


def _entries(devices: Mapping[str, Json], timings: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """An entry a card, with its timing. Cards of one name that turn out alike get the same readings, so that a record
    can say them once: the noise of a timing is no difference between cards."""
    found: dict[str, Json] = {}
    for device in devices.values():
        for place, card in enumerate(device["ids"]):
            order = {"order": [device["order"][place]]} if "order" in device else {}
            found[card] = {**device, "ids": [card], **order}
    for held in _classes(found, timings):
        shared = _pooled([timings[card] for card in held])
        for card in held:
            found[card] |= shared
    return found


def _classes(entries: Mapping[str, Json], timings: Mapping[str, Mapping[str, Json]]) -> list[list[str]]:
    """The cards, alike ones together."""
    classes: list[list[str]] = []
    for card, entry in entries.items():
        for held in classes:
            first = held[0]
            if entries[first].get("name") == entry.get("name") and _alike(timings[first], timings[card]):
                held.append(card)
                break
        else:
            classes.append([card])
    return classes


def _alike(first: Mapping[str, Json], second: Mapping[str, Json]) -> bool:
    def near(key: str) -> bool:
        one, other = first[key]["value"], second[key]["value"]
        if one is None or other is None:
            return one is other
        return bool(abs(other - one) <= (ALIKE_OPERATORS if key == OPERATORS else ALIKE) * one)

    return all(near(key) for key in first)


def _pooled(timings: Sequence[Mapping[str, Json]]) -> dict[str, Any]:
    """One reading a key for alike cards: the median of their medians, in the range of all."""
    found: dict[str, Any] = dict(timings[0])
    for key, item in found.items():
        if len(timings) > 1 and item["value"] is not None:
            items = [readings[key] for readings in timings]
            found[key] = {
                **item,
                "value": median(other["value"] for other in items),
                "low": min(other["low"] for other in items),
                "high": max(other["high"] for other in items),
                "why": f"{item['why']}; of each of {len(items)} alike cards",
            }
    return found
