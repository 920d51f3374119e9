"""One rank of a draft as the formulas of `planner.passes.cost` take it, and the memory it may use."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.passes import constants
from planner.passes.budget import told as in_words
from planner.passes.budget import usable
from planner.passes.cost import DTYPE_BYTES, UNIT_RATES, Rank, many, shape_name
from planner.passes.layout import device_pointer, per_rank
from planner.passes.ledger import Ledger
from planner.passes.sharding import shards_of
from schemas.document import reading
from schemas.form import Json


def world_size(draft: Mapping[str, Json]) -> int:
    return sum(len(entry["members"]) for entry in draft["ranks"])


def owned_by(draft: Mapping[str, Json], account: Mapping[str, Json], rank: int) -> tuple[int, ...]:
    """Indices of the matrices whose update ``rank`` computes: its own on a fleet, all of them alone."""
    owners = draft["exchange"].get("owners")
    if owners is None:
        return tuple(range(len(account["matrices"])))
    return tuple(place for place, owner in enumerate(owners["chosen"]) if owner == rank)


def elements_of(account: Mapping[str, Json], owned: tuple[int, ...]) -> int:
    return sum(math.prod(account["matrices"][place]["shape"]) for place in owned)


def flops_of(account: Mapping[str, Json], owned: tuple[int, ...]) -> float:
    """FLOPs of the updates of ``owned``: what tells the slowest of alike ranks."""
    return sum(matrix_flops(account, place) for place in owned)


def matrix_flops(account: Mapping[str, Json], place: int) -> float:
    """FLOPs of the update of one matrix, or of one stack of them."""
    matrix = account["matrices"][place]
    return float(many(matrix) * account["shapes"]["fp32"][shape_name(matrix)]["flops"])


def most_owned(draft: Mapping[str, Json], account: Mapping[str, Json]) -> int:
    """Elements of the matrices of the rank that owns most."""
    totals: dict[int, int] = {}
    owners = draft["exchange"]["owners"]["chosen"] if "owners" in draft["exchange"] else [0] * len(account["matrices"])
    for place, owner in enumerate(owners):
        totals[owner] = totals.get(owner, 0) + elements_of(account, (place,))
    return max(totals.values(), default=0)


def rank_facts(draft: Mapping[str, Json], account: Mapping[str, Json], place: int) -> Rank:
    """The facts of entry ``place``; where its members own unlike matrices, of the member that owns the most."""
    entry = draft["ranks"][place]
    sets = [owned_by(draft, account, rank) for rank in entry["members"]]
    rates = tuple(entry["rates"][name]["value"] for name in ("products", "bandwidth", "launch"))
    taught = {part: item["value"] for part, item in entry.get("calibration", {}).items()}
    if None in rates and "compute" in taught:
        rates = UNIT_RATES
    config, exchange = draft["workload"]["config"], draft["exchange"]
    return Rank(
        kind=kind_of(draft, entry),
        dtype=entry["dtype"]["chosen"],
        kernels={name: choice["chosen"] for name, choice in entry["kernels"].items()},
        rates=None if None in rates else (rates[0], rates[1], rates[2]),
        link_rate=entry["rates"]["host_link"]["value"] if "host_link" in entry["rates"] else math.inf,
        row_seconds=entry["rates"]["host_row"]["value"] if "host_row" in entry["rates"] else 0.0,
        account=account,
        owned=max(sets, key=lambda owned: elements_of(account, owned)),
        updated=max(sets, key=lambda owned: flops_of(account, owned)),
        most_owned=most_owned(draft, account),
        world=world_size(draft),
        newton_schulz=config["ns_dtype"]["chosen"],
        adamw=config["adamw"]["chosen"] if "adamw" in config else "ieee",
        reduce_bytes=DTYPE_BYTES[exchange["reduce_dtype"]["chosen"]] if "reduce_dtype" in exchange else 4,
        bucket_bytes=exchange["bucket_bytes"]["chosen"] if "bucket_bytes" in exchange else 0,
        workspace=int(workspace_of(draft, entry).value) if kind_of(draft, entry) == "cuda" else 0,
        overhead=constants.ALLOCATOR_OVERHEAD[allocator_of(draft)].value,
        allocator=allocator_of(draft),
        update_gain=update_gain(entry),
        compute_ratios=taught.get("compute", ()),
        optimizer_ratios=taught.get("optimizer", ()),
        shards=shards_of(draft, account),
    )


def update_gain(entry: Mapping[str, Json]) -> float:
    """How many times the rates of forward and backward the entry's optimizer reaches."""
    return float(entry["rates"]["update_gain"]["value"]) if "update_gain" in entry["rates"] else 1.0


def kind_of(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> str:
    """cpu or cuda."""
    return next(
        str(device["kind"]) for device in draft["fleet"]["devices"].values() if entry["devices"][0] in device["ids"]
    )


def allocator_of(draft: Mapping[str, Json]) -> str:
    """How the ranks' memory is asked for; "segments" on cards in a plan from before there was a choice."""
    row = draft["workload"]["config"].get("allocator")
    cuda = any(device["kind"] == "cuda" for device in draft["fleet"]["devices"].values())
    return str(row["chosen"]) if row is not None else "segments" if cuda else "none"


def workspace_of(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> constants.Assumed:
    """What a card's libraries hold throughout."""
    device = next(item for item in draft["fleet"]["devices"].values() if entry["devices"][0] in item["ids"])
    return constants.workspace(device["sm"]["value"])


def set_limit(ledger: Ledger, request: Mapping[str, Json], place: int) -> float | None:
    """Put the bytes that entry ``place`` may use at its ``memory/limit``; None when nothing is known or asked.

    With a budget of N: the smaller of what is `usable` of it (0.9 N, on a card at most N less 192 MiB) and free memory
    less 512 MiB. Where free memory is unknown, nine tenths of the card's whole memory stand for it. Ranks on one CPU
    share its memory.
    """
    entry, pointer = ledger.draft["ranks"][place], f"/ranks/{place}/memory/limit"
    device, ranks = device_pointer(ledger.draft, entry), sharing(ledger.draft, entry)
    budget = per_rank(request["fit"], entry["members"][0])
    margin, allocator = constants.FREE_MARGIN_BYTES, allocator_of(ledger.draft)
    if ledger.value(f"{device}/memory_free") is not None:
        source, why = f"{device}/memory_free", "free memory / {} - 512 MiB" if ranks > 1 else "free memory - 512 MiB"

        def room(free: float) -> float:
            return free / ranks - margin
    else:
        source, why = f"{device}/memory_total", "0.9 of all memory, since how much is free is unknown"

        def room(free: float) -> float:
            return constants.FIT_HEADROOM * free / ranks

    why = why.format(ranks)
    if not isinstance(budget, int):
        return ledger.compute(pointer, "B", lambda n: int(room(n)), [source], why)  # type: ignore[no-any-return]
    filled, told = usable(budget, allocator), in_words(budget, allocator)
    if ledger.value(source) is None:
        ledger.put(pointer, reading(filled, "B", "declared", f"{told}; the card's memory is unknown"))
        return filled
    why = f"the smaller of {told} and {why}"
    return ledger.compute(pointer, "B", lambda n: int(min(filled, room(n))), [source], why)  # type: ignore[no-any-return]


def host_room(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> float | None:
    """Bytes of host memory that each rank of ``entry`` may have beside the device's: its share of what its node has
    free, less a margin; None where that is unknown, or the device's memory is the host's."""
    devices = draft["fleet"]["devices"].values()
    device = next(item for item in devices if entry["devices"][0] in item["ids"])
    free = draft["fleet"]["nodes"][device["node"]].get("memory_free", {}).get("value")
    if device["kind"] == "cpu" or free is None:
        return None
    ranks = sum(len(item["ids"]) for item in devices if item["node"] == device["node"])
    members = len(draft["fleet"]["nodes"][device["node"]].get("members", (0,)))
    return float(free - constants.FREE_MARGIN_BYTES) * members / ranks


def whole_device(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> float:
    """How many times the cores that one rank of ``entry`` has its device has in all: 1 on a card."""
    if "effective_cores" not in entry["rates"]:
        return 1.0
    device = next(item for item in draft["fleet"]["devices"].values() if entry["devices"][0] in item["ids"])
    return float(device["cores"]["value"] / entry["rates"]["effective_cores"]["value"])


def sharing(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> int:
    """How many ranks draw on the cores and memory of ``entry``'s device: all CPU ranks of the node, or one a card."""
    device = next(item for item in draft["fleet"]["devices"].values() if entry["devices"][0] in item["ids"])
    if device["kind"] != "cpu":
        return 1
    alike = [item for item in draft["fleet"]["devices"].values() if item["node"] == device["node"]]
    return sum(len(item["ids"]) for item in alike if item["kind"] == "cpu")
