"""Every rank's memory by component, both peaks and, on a CPU, what the process will hold: the readings of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from planner.passes import constants
from planner.passes.cost import (
    ADAMW_BYTES,
    BACKWARD,
    GRADIENT_BYTES,
    KERNELS,
    MASTER_BYTES,
    RECURRENT,
    STATE,
    TABLES_BYTES,
    WEIGHTS,
    Rank,
)
from planner.passes.ledger import Ledger
from planner.passes.ranks import elements_of, owned_by, rank_facts, workspace_of
from planner.passes.sharding import TRAINED, is_sharded
from schemas.document import reading, resolve
from schemas.form import Json

_ALIVE = {
    WEIGHTS: "weights in the compute dtype, made in forward and kept for backward",
    KERNELS: "temporaries of an opaque kernel at the peak",
    BACKWARD: "what backward takes at its peak beyond all that is saved",
    RECURRENT: "what recurrent layers' fused kernels keep for backward",
    "beside_a_table": "the most bytes alive beside a table's gradient",
    "table_gradient": f"{GRADIENT_BYTES} B an element: a table's gradient before it is added",
}
_WHY = {
    "masters": f"{MASTER_BYTES} B an element: fp32 master weights, those that are frozen included",
    "gradients": f"{GRADIENT_BYTES} B an element: fp32 gradients, kept from step to step",
    "adamw_state": f"{ADAMW_BYTES} B an element: two fp32 moments",
    "tables_state": f"{TABLES_BYTES} B an element: two fp32 moments of the tables' rows",
    "model_buffers": "what the model keeps and does not train as parameters",
    "staging": "rows of the step's windows and of the next, and their gradients, in place of the tables",
    "rounding": "a card's blocks are multiples of 2 MiB from 10 MiB on, where less than 1 MiB is left over",
    "activations": "the most bytes alive in forward and backward: the sum of what they are",
    "buckets": "buffers that gradients, which lie in fp32 buckets, are reduced through in a narrower dtype",
    "update": "temporaries of the update: the stacks' work, updates as sent and received, AdamW's",
    "gathered": "whole parameters in fp32: the root's, those of a unit, and the buffer of the next",
    "hosted": "what mechanisms keep in host memory: offloaded activations, tables and their moments",
    "pinned": "the part of it that is pinned",
}

_SHARDED = {
    "masters": f"{MASTER_BYTES} B an element: fp32 master weights, this rank's rows",
    "gradients": f"{GRADIENT_BYTES} B an element: fp32 gradients of this rank's rows, kept from step to step",
    "adamw_state": f"{ADAMW_BYTES} B an element: two fp32 moments of this rank's rows",
    "tables_state": f"{TABLES_BYTES} B an element: two fp32 moments of this rank's rows of the tables",
    "buckets": "whole gradients of the root and of the unit at hand, those of the unit before while they are sent",
    "update": "temporaries of the update of this rank's rows",
}

# Those kept for a rank's own rows alone, of which the last rank may have fewer: bytes an element, and whose.
_OF_ROWS = {
    "gradients": (GRADIENT_BYTES, TRAINED),
    "adamw_state": (ADAMW_BYTES, ("adamw",)),
    "tables_state": (TABLES_BYTES, ("tables",)),
}


def put_memory(ledger: Ledger, account: Mapping[str, Json], place: int, cpu: bool) -> None:
    """Put entry ``place``'s memory by component, both peaks, what mechanisms hold in host memory and, on a CPU, what
    the process will hold."""
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    rank, memory = rank_facts(ledger.draft, account, place), f"{base}/memory"
    mechanisms = [*ledger.value("/fit/mechanisms"), *entry["mechanisms"]["chosen"]]
    shape = entry["batch"]["chosen"], entry["seq"]["chosen"]
    found = rank.memory(*shape, mechanisms)
    found["hosted"], found["pinned"] = rank.hosted(*shape, mechanisms)
    sources = _sources(ledger, account, base, mechanisms)
    held = [name for name in (*STATE, "hosted") if name in sources and (name in _ALWAYS or found[name])]
    sharded = ["gathered"] if "gathered" in found else []
    for name in (*held, "pinned", "activations", *sharded, "buckets", "update"):
        if name == "muon_momentum":
            _momentum(ledger, account, place, rank, mechanisms, found[name])
        elif name == "activations":
            _activations(ledger, memory, rank.alive(*shape, mechanisms), sources[name], rank.kind)
        elif name != "pinned" or found[name]:
            why = _replaced(account, mechanisms, name) or (_SHARDED if sharded else {}).get(name) or _WHY[name]
            measurable = name not in ("rounding", "staging", "gathered", "buckets", "update")
            ledger.compute(
                f"{memory}/{name}", "B", lambda *_, name=name: found[name], sources[name], why, measurable=measurable
            )
            if rank.shards and name in _OF_ROWS:
                each, routes = _OF_ROWS[name]
                item = resolve(ledger.draft, f"{memory}/{name}")
                ledger.put(f"{memory}/{name}", {**item, "low": each * rank.shards.least(routes), "high": found[name]})
    if rank.kind == "cuda":  # its own memory is not the host's
        held = [*(name for name in held if name != "hosted"), "workspace"]
        ledger.put(f"{memory}/workspace", workspace_of(ledger.draft, entry).reading())
    _peaks(ledger, memory, [f"{memory}/{name}" for name in held], bool(sharded))
    if "allocator_reserve" in ledger.draft["fit"]:
        inputs, why = [f"{memory}/peak", "/fit/allocator_reserve"], "the peak, and what the allocator keeps beside it"
        ledger.compute(f"{memory}/reserved", "B", lambda peak, share: round(peak * share), inputs, why, measurable=True)
    if cpu:
        inputs = [f"{memory}/peak", "/fit/process_bytes"]
        why = "resident bytes of the process: peak and PyTorch itself"
        ledger.compute(f"{memory}/host", "B", lambda peak, process: round(peak + process), inputs, why, measurable=True)


def _activations(ledger: Ledger, memory: str, alive: Mapping[str, int], inputs: list[str], kind: str) -> None:
    """What is alive at the peak of forward and backward, each part a reading, and their sum. Where whole parameters
    come and go among them, no instrument tells the parts apart."""
    apart = not is_sharded(ledger.draft)
    for name, nbytes in alive.items():
        why = _ALIVE.get(name, "kept for backward by this part of the model, counted without memory")
        seen, place = apart and (name == RECURRENT or name not in _ALIVE), f"{memory}/alive/{name}"
        if name == RECURRENT:
            share = f"{memory}/recurrent_share"
            ledger.put(share, constants.RECURRENT_SHARE[kind].reading())
            kept = partial(_share_of, nbytes)
            ledger.compute(place, "B", kept, [share, *inputs], why, measurable=seen)
        else:
            ledger.compute(place, "B", lambda *_, n=nbytes: n, inputs, why, measurable=seen)
    parts = [f"{memory}/alive/{name}" for name in alive]
    ledger.compute(f"{memory}/activations", "B", lambda *values: sum(values), parts, _WHY["activations"])


def _share_of(nbytes: int, share: float, *_: Any) -> int:
    return round(nbytes * share)


_ALWAYS = ("masters", "gradients", "muon_momentum", "adamw_state")


def _sources(ledger: Ledger, account: Mapping[str, Json], base: str, mechanisms: Sequence[str]) -> dict[str, list[str]]:
    """The inputs of each component; of those that this workload and its mechanisms can have."""
    rows = [account["mechanisms"][name] for name in mechanisms]
    total, adamw, tables = (f"/workload/parameters/{name}" for name in ("total", "adamw", "tables"))
    where = [tables, f"{base}/mechanisms"] if any("moves" in row for row in rows) else []
    shape = ["/workload/digest", f"{base}/batch", f"{base}/seq", f"{base}/dtype", f"{base}/mechanisms"]
    exchange = "/exchange/reduce_dtype" if "reduce_dtype" in ledger.draft["exchange"] else "/exchange/backend"
    changed = ["/fit/mechanisms"] if any(row.get("component") == "adamw_state" for row in rows) else []
    found = dict.fromkeys(("staging", "hosted", "pinned", "activations"), shape)
    found |= {"masters": [total, *where], "gradients": [total, *where], "muon_momentum": [total]}
    found |= {"rounding": ["/workload/digest", *where], "adamw_state": [adamw, *changed], "buckets": [total, exchange]}
    if "bucket_bytes" in ledger.draft["exchange"]:
        found["buckets"] = [*found["buckets"], "/exchange/bucket_bytes"]
    found["model_buffers"] = ["/workload/digest"]
    found["update"] = ["/workload/digest", "/workload/config/ns_dtype", *changed]
    found |= {"tables_state": [tables, *where]} if account["parameters"]["tables"] else {}
    if is_sharded(ledger.draft):
        shared = ["/workload/digest", "/exchange/shard"]
        altered = ("masters", "gradients", "adamw_state", "tables_state", "rounding", "buckets", "update")
        found |= {name: [*sources, *shared] for name, sources in found.items() if name in altered}
        found = {name: list(dict.fromkeys(sources)) for name, sources in found.items()} | {"gathered": shared}
    return found


def _replaced(account: Mapping[str, Json], mechanisms: Sequence[str], component: str) -> str | None:
    """What a mechanism says of a component that it changes."""
    rows = (account["mechanisms"][name] for name in mechanisms)
    return next((row["why"] for row in rows if row.get("component") == component), None)


def _peaks(ledger: Ledger, memory: str, held: list[str], sharded: bool) -> None:
    """Both peaks over the components ``held`` from step to step."""
    overhead = "/fit/allocator_overhead"
    backward = ("activations", *(["gathered"] if sharded else []), "buckets")
    optimizer = ("update", *([] if sharded else ["buckets"]))
    for name, during in (("backward_peak", backward), ("optimizer_peak", optimizer)):
        why = " + ".join(("state", *during))
        inputs = [*held, *(f"{memory}/{part}" for part in during), overhead]
        ledger.compute(f"{memory}/{name}", "B", _sum_times_last, inputs, why, measurable=True)
    both = [f"{memory}/backward_peak", f"{memory}/optimizer_peak"]
    ledger.compute(f"{memory}/peak", "B", max, both, "the higher of the two peaks", measurable=True)


def _momentum(
    ledger: Ledger, account: Mapping[str, Json], place: int, rank: Rank, mechanisms: Sequence[str], most: int
) -> None:
    members = ledger.draft["ranks"][place]["members"]
    elements = [elements_of(account, owned_by(ledger.draft, account, member)) for member in members]
    least = round(most * min(elements) / max(elements)) if max(elements) else 0
    inputs = ["/exchange/owners"] if "owners" in ledger.draft["exchange"] else ["/workload/parameters/muon"]
    why = "momentum of the matrices a rank owns; of alike ranks, the one that owns most"
    item = reading(
        most, "B", "computed", why, inputs=[*inputs, "/fit/mechanisms"], low=least, high=most, measurable=True
    )
    ledger.put(f"/ranks/{place}/memory/muon_momentum", item)


def _sum_times_last(*values: float) -> int:
    return round(sum(values[:-1]) * values[-1])
