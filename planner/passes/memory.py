"""Every rank's memory by component, both peaks and, on a CPU, what the process will hold: the readings of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.passes import constants
from planner.passes.cost import ADAMW_BYTES, GRADIENT_BYTES, MASTER_BYTES, Rank
from planner.passes.ledger import Ledger
from planner.passes.ranks import elements_of, owned_by, rank_facts
from schemas.document import reading
from schemas.form import Json

_STATE = ("masters", "gradients", "muon_momentum", "adamw_state")


def put_memory(ledger: Ledger, account: Mapping[str, Json], place: int, cpu: bool) -> None:
    """Put entry ``place``'s memory by component, both peaks and, on a CPU, what the process will hold."""
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    rank = rank_facts(ledger.draft, account, place)
    mechanisms = [*ledger.value("/fit/mechanisms"), *entry["mechanisms"]["chosen"]]
    found = rank.memory(entry["batch"]["chosen"], entry["seq"]["chosen"], mechanisms)
    total, adamw = "/workload/parameters/total", "/workload/parameters/adamw"
    memory = f"{base}/memory"

    def put(name: str, inputs: list[str], why: str, measurable: bool = False) -> None:
        ledger.compute(f"{memory}/{name}", "B", lambda *_: found[name], inputs, why, measurable=measurable)

    put("masters", [total], f"{MASTER_BYTES} B an element: fp32 master weights", True)
    put("gradients", [total], f"{GRADIENT_BYTES} B an element: fp32 gradients, kept from step to step", True)
    _momentum(ledger, account, place, rank, mechanisms, found["muon_momentum"])
    put("adamw_state", [adamw], f"{ADAMW_BYTES} B an element: two fp32 moments", True)
    shape = ["/workload/digest", f"{base}/batch", f"{base}/seq", f"{base}/dtype", f"{base}/mechanisms"]
    put("activations", shape, "highest bytes alive in forward and backward, counted on the meta build")
    exchange = ["/exchange/reduce_dtype"] if "reduce_dtype" in ledger.draft["exchange"] else ["/exchange/backend"]
    put(
        "buckets",
        [total, *exchange],
        "a narrower copy of the gradients while they are reduced; gradients lie in fp32 buckets",
    )
    put(
        "update",
        ["/workload/digest", "/workload/config/ns_dtype"],
        "temporaries of the update: the stacks' work, updates as sent and received, AdamW's",
    )
    overhead = "/fit/allocator_overhead"
    state = [f"{memory}/{name}" for name in _STATE]
    if rank.kind == "cuda":
        state.append(f"{memory}/workspace")
        ledger.put(f"{memory}/workspace", constants.GPU_WORKSPACE_BYTES.reading())
    backward = [*state, f"{memory}/activations", f"{memory}/buckets", overhead]
    ledger.compute(
        f"{memory}/backward_peak", "B", _sum_times_last, backward, "state + activations + buckets", measurable=True
    )
    optimizer = [*state, f"{memory}/update", f"{memory}/buckets", overhead]
    ledger.compute(
        f"{memory}/optimizer_peak", "B", _sum_times_last, optimizer, "state + update + buckets", measurable=True
    )
    both = [f"{memory}/backward_peak", f"{memory}/optimizer_peak"]
    ledger.compute(f"{memory}/peak", "B", max, both, "the higher of the two peaks", measurable=True)
    if cpu:
        inputs = [f"{memory}/peak", "/fit/process_bytes"]
        why = "resident bytes of the process: peak and PyTorch itself"
        ledger.compute(f"{memory}/host", "B", lambda peak, process: round(peak + process), inputs, why, measurable=True)


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
