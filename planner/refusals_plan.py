"""The tests of the refusals that are judged while planning: on the request, and on the finished draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner import constants
from planner.data import least_length, longest_stride
from planner.layout import device_pointer
from planner.legality import begins_at, kernel_veto, sm_name
from planner.refusal import Refusal
from schemas.document import resolve
from schemas.form import Json

Facts = Mapping[str, Json]
_GIB = 2**30
_COMPONENTS = (
    "masters", "gradients", "muon_momentum", "adamw_state", "activations", "buckets", "update", "workspace",
)  # fmt: skip


def _world(facts: Facts) -> int:
    return sum(len(device["ids"]) for device in facts["record"]["devices"].values())


def mixed_kinds(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    kinds = sorted({device["kind"] for device in facts["record"]["devices"].values()})
    if len(kinds) > 1:
        yield Refusal(
            "mixed-kinds",
            "one fleet over the devices of these records",
            f"devices of kinds {' and '.join(kinds)}",
            "no backend reduces CPU and CUDA gradients together: NCCL takes CUDA tensors, gloo would stage every step",
            "plan the CUDA devices alone: --devices auto, or only their records",
        )


def per_rank_count(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    world = _world(facts)
    for option in ("dtype", "fit", "capacity"):
        asked = facts["request"][option]
        alone_serves_all = option != "capacity"
        if isinstance(asked, list) and len(asked) != world and not (alone_serves_all and len(asked) == 1):
            yield Refusal(
                "per-rank-count",
                f"--{option} with {len(asked)} values",
                f"{world} rank{'s' if world > 1 else ''}",
                "each rank needs a value of its own" + (", or all one" if alone_serves_all else ""),
                f"give --{option} {world} values, separated by commas",
            )


def capacity_batch(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    asked, batch = facts["request"]["capacity"], facts["request"]["batch"]
    if not isinstance(asked, list) or batch is None:
        return
    total, wanted = sum(row[0] for row in asked), batch * _world(facts)
    if total != wanted:
        yield Refusal(
            "capacity-batch",
            f"--batch {batch} and --capacity with {total} sequences in all",
            f"--batch {batch} on {_world(facts)} ranks makes {wanted} sequences",
            "declared batches make the global batch, and the two contradict each other",
            "leave --batch out, or declare batches that add up to it",
        )


def capacity_seq(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    asked, seq = facts["request"]["capacity"], facts["request"]["seq"]
    if not isinstance(asked, list) or seq is None:
        return
    other = sorted({row[1] for row in asked if row[1] not in (None, seq)})
    if other:
        yield Refusal(
            "capacity-seq",
            f"--seq {seq} and --capacity with lengths {', '.join(map(str, other))}",
            "two lengths for one rank",
            "declared lengths are the ranks' lengths, and the two contradict each other",
            "leave --seq out, or give --capacity batches alone",
        )


def fsdp_muon(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    request = facts["request"]
    if request["shard"] == "fsdp" and facts["account"]["made_from"]["opt"] == "muon":
        yield Refusal(
            "fsdp-muon",
            "--shard fsdp under --opt muon",
            "FSDP2 shards every matrix as a DTensor",
            "Newton-Schulz on a shard is not the whole matrix's polar factor, and mixed tensors fail in the optimizer",
            "--shard none (DDP, each matrix updated whole by one owner)",
        )


def fsdp_unbuilt(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if facts["request"]["shard"] == "fsdp" and facts["account"]["made_from"]["opt"] != "muon":
        yield Refusal(
            "fsdp-unbuilt",
            "--shard fsdp",
            "a runtime that reduces by DDP alone",
            "FSDP2 has not passed a numeric gate here, and until one holds it is not run",
            "--shard none",
        )


def reduce_alone(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    asked = facts["request"]["reduce"]
    if asked not in (None, "auto") and _world(facts) == 1:
        yield Refusal(
            "reduce-alone",
            f"--reduce {asked}",
            "one rank",
            "one rank reduces no gradients, so the dtype could have no effect",
            "leave --reduce out, or plan several ranks (--devices cpu:2, or several cards)",
        )


def fit_unknown_memory(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if facts["request"]["fit"] != "auto":
        return
    for key, device in facts["record"]["devices"].items():
        if device["memory_free"]["value"] is None:
            yield Refusal(
                "fit-unknown-memory",
                "--fit auto",
                f"{key}: free memory unknown ({device['memory_free']['why']})",
                "auto fills the memory that is free, and how much that is could not be read",
                "give a budget in GB: --fit 16",
            )


def data_too_short(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    stride = max(entry["seq"]["chosen"] for entry in plan["ranks"])
    for source in plan["workload"]["data"]["sources"]:
        length, least = source["length"]["value"], least_length(stride)
        if length is None or length >= least:  # what is bound at the start is judged there
            continue
        longest = longest_stride(length)
        yield Refusal(
            "data-too-short",
            f"sequences of {stride} bytes from {source['name']}",
            f"{source['name']} has {length} bytes",
            f"its last twentieth is held out and must hold one window of {stride + 1} bytes, so the least is {least}",
            f"give --data a file of at least {least} bytes"
            + (f", or sequences of at most {longest} (--seq {longest})" if longest > 1 else ""),
        )


def dtype_unsupported(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for entry in plan["ranks"]:
        asked = entry["dtype"]["asked"]
        if asked in (None, "auto", "fp32") or entry["capability"][asked]["value"]:
            continue
        pointer = device_pointer(plan, entry)
        yield Refusal(
            "dtype-unsupported",
            f"--dtype {asked} on rank {_members(entry)}",
            f"{_card(plan, pointer)}: {entry['capability'][asked]['why']}",
            f"native {asked} begins at {begins_at(asked)}; another dtype under that name would be another experiment",
            "--dtype auto, or for these ranks --dtype fp32",
        )


def fp16_forward(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for entry in plan["ranks"]:
        if entry["dtype"]["asked"] == "fp16" and entry["capability"]["fp16"]["value"]:
            yield Refusal(
                "fp16-forward",
                f"--dtype fp16 on rank {_members(entry)}",
                f"{_card(plan, device_pointer(plan, entry))}: {entry['capability']['fp16']['why']}",
                "the runtime has no fp16 forward with loss scaling yet, and without it small gradients vanish",
                "--dtype auto, or for these ranks --dtype fp32",
            )


def kernel_unsupported(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for entry in plan["ranks"]:
        device = resolve(plan, device_pointer(plan, entry))
        capability = device["sm"]["value"] if device["kind"] == "cuda" else None
        for name, choice in entry["kernels"].items():
            row = next(row for row in facts["account"]["kernels"][name] if row["name"] == choice["chosen"])
            veto = kernel_veto(row, device["kind"], capability, entry["dtype"]["chosen"], plan["toolchain"])
            if veto is not None:
                yield Refusal(
                    "kernel-unsupported",
                    f"kernel {name}={choice['chosen']} on rank {_members(entry)}",
                    f"{_card(plan, device_pointer(plan, entry))}, {entry['dtype']['chosen']}",
                    f"{choice['chosen']} {veto}",
                    f"--set {name}=auto",
                )


def does_not_fit(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for entry in plan["ranks"]:
        peak, limit = entry["memory"]["peak"]["value"], entry["memory"]["limit"]
        if peak is None or limit["value"] is None or peak <= limit["value"]:
            continue
        names = [name for name in _COMPONENTS if name in entry["memory"]]
        parts = ", ".join(f"{name} {entry['memory'][name]['value'] / _GIB:.3f}" for name in names)
        engaged = [*plan["fit"]["mechanisms"]["chosen"], *entry["mechanisms"]["chosen"]]
        yield Refusal(
            "does-not-fit",
            f"batch {entry['batch']['chosen']} x {entry['seq']['chosen']} on rank {_members(entry)}, "
            f"{_card(plan, device_pointer(plan, entry))}",
            f"peak {peak / _GIB:.3f} GiB over {limit['value'] / _GIB:.3f} GiB ({limit['why']}); GiB: {parts}",
            f"with {', '.join(engaged)} engaged, what is left is still over the limit"
            if engaged
            else "no memory mechanism is engaged, and a run would end out of memory",
            _smaller(plan, facts, entry),
        )


def _smaller(plan: Facts, facts: Facts, entry: Facts) -> str:
    """The flags that would make less of it: a budget where none engages mechanisms yet, a smaller batch or length."""
    ways = []
    device = resolve(plan, device_pointer(plan, entry))
    if facts["request"]["fit"] in (None, "off") and facts["account"]["mechanisms"]:
        known = device["memory_free"]["value"] is not None
        budget = "auto" if known else f"{device['memory_total']['value'] / 1e9:.4g}"
        ways.append(f"--fit {budget}, which engages memory mechanisms")
    if entry["batch"]["chosen"] > 1:
        ways.append(f"--batch {max(1, entry['batch']['chosen'] // 2)}")
    ways.append(f"--seq {max(2, entry['seq']['chosen'] // 2)}")
    if isinstance(facts["request"]["fit"], list):
        needed = entry["memory"]["peak"]["value"] / constants.FIT_HEADROOM / 1e9
        ways.append(f"--fit {needed + 0.05:.1f} if the card has it")
    return ", or ".join(ways)


def _members(entry: Facts) -> str:
    members = entry["members"]
    return str(members[0]) if len(members) == 1 else f"{members[0]} and {len(members) - 1} alike"


def _card(plan: Facts, pointer: str) -> str:
    device = resolve(plan, pointer)
    name = device["name"]["value"] or "a device without a name"
    identity = pointer.rsplit("/", 1)[1]
    if device["kind"] == "cuda" and device["sm"]["value"] is not None:
        return f"{name} ({identity}, {sm_name(device['sm']['value'])})"
    return f"{name} ({identity})"
