"""The tests of the refusals that are judged while planning: on the request, and on the finished draft."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

from planner.data import least_length, longest_stride
from planner.door import ALLOCATORS
from planner.passes.calibration import unlike
from planner.passes.cost import COMPONENTS
from planner.passes.fit import fit
from planner.passes.layout import device_pointer
from planner.passes.legality import begins_at, kernel_veto, sm_name
from planner.passes.mechanisms import barred, kinds_of
from planner.passes.order import PASSES, draft_of
from planner.passes.ranks import host_room, world_size
from planner.passes.smaller import ways_to_fit
from planner.refusals.refusal import Refusal
from planner.views.words import size
from schemas.document import resolve
from schemas.form import Json

Facts = Mapping[str, Json]

MUON_MEETS_DTENSOR = (
    "aten.lerp_.Scalar got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling "
    "distributed operators!"
)
"""What torch raises when this Muon is given a model that FSDP2 has sharded; a test has it raised."""


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
            several = "s" if len(asked) != 1 else ""
            yield Refusal(
                "per-rank-count",
                f"--{option} with {len(asked)} value{several}",
                f"{world} rank{'s' if world > 1 else ''}",
                "each rank needs a value of its own" + (", or all one" if alone_serves_all else ""),
                f"give --{option} {world} value{'s, separated by commas' if world > 1 else ''}",
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
            "FSDP2 makes every matrix and its gradient a DTensor, and Muon's momentum is one stacked tensor a shape: "
            f"torch says {MUON_MEETS_DTENSOR!r}",
            "of a rank's rows alone, Newton-Schulz would not give the whole matrix's polar factor",
            "--shard fsdp --opt adamw, or --shard none (DDP, each matrix updated whole by one owner)",
        )


def fsdp_scalar(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    scalars = facts["account"].get("scalars", ())
    if facts["request"]["shard"] == "fsdp" and scalars:
        yield Refusal(
            "fsdp-scalar",
            "--shard fsdp",
            f"{', '.join(scalars[:4])}{' and more' * (len(scalars) > 4)}: no dimension to share by",
            "FSDP2 deals each parameter's rows to the ranks, and takes none that has no rows",
            "give it one: torch.zeros(1) in place of torch.zeros(()); or --shard none",
        )


def fsdp_alone(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if facts["request"]["shard"] == "fsdp" and _world(facts) == 1:
        yield Refusal(
            "fsdp-alone",
            "--shard fsdp",
            "one rank",
            "a model is shared by several ranks, so it could have no effect",
            "leave --shard out, or plan several ranks (--devices cpu:2, or several cards)",
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
    free = {key: device["memory_free"] for key, device in facts["record"]["devices"].items()}
    unread = [f"{key}: free memory unknown ({item['why']})" for key, item in free.items() if item["value"] is None]
    if unread:
        yield Refusal(
            "fit-unknown-memory",
            "--fit auto",
            "; ".join(unread),
            "auto fills the memory that is free, and how much that is could not be read",
            "give each rank a budget in GB, as in --fit 16",
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
        asked = _dtype(entry)
        if asked == "fp32" or entry["capability"][asked]["value"]:
            continue
        pointer = device_pointer(plan, entry)
        yield Refusal(
            "dtype-unsupported",
            f"--dtype {asked} on rank {_members(entry)}",
            f"{_card(plan, pointer)}: {entry['capability'][asked]['why']}",
            _why_not(plan, entry, asked),
            "--dtype auto, or for these ranks --dtype fp32",
        )


def _why_not(plan: Facts, entry: Facts, asked: str) -> str:
    if resolve(plan, device_pointer(plan, entry))["kind"] == "cpu":
        return f"a CPU's products in {asked} would be computed in another dtype under that name"
    return f"native {asked} begins at {begins_at(asked)}; another dtype under that name would be another experiment"


def _dtype(entry: Facts) -> str:
    """What the rank would run: the dtype asked for, else the one chosen (which no plan of ours chooses illegally)."""
    asked = entry["dtype"]["asked"]
    return str(entry["dtype"]["chosen"] if asked in (None, "auto") else asked)


def moe_capacity_fleet(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    row, world = plan["workload"]["config"].get("moe_capacity"), world_size(plan)
    if world > 1 and row is not None and row["chosen"] > 0:
        yield Refusal(
            "moe-capacity-fleet",
            f"moe_capacity={row['chosen']:g} on {world} ranks",
            "each expert takes ceil(moe_capacity x tokens x topk / experts) tokens of a window and drops the rest",
            "which are dropped depends on what else is in the window, so a split over ranks changes the model: "
            "logits of 4 sequences and of 2 x 2 differ by 2.3 in a small mixture with 1.0, and by 0 dropless",
            "--set moe_capacity=0 (dropless), or plan one rank",
        )


def loss_scale_idle(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """A scale of losses that no rank scales."""
    if any(entry["dtype"]["chosen"] == "fp16" for entry in plan["ranks"]):
        return
    for name in ("loss_scale", "loss_scale_growth"):
        row = plan["workload"]["config"].get(name)
        if row is not None and row["asked"] is not None:
            dtypes = sorted({entry["dtype"]["chosen"] for entry in plan["ranks"]})
            yield Refusal(
                "loss-scale-idle",
                f"--set {name}={row['asked']:g}",
                f"ranks that compute in {' and '.join(dtypes)}",
                "losses are scaled where a rank computes in fp16, so it would change nothing",
                f"leave {name} out, or compute in fp16: --dtype fp16",
            )


def adamw_fused(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    row = plan["workload"]["config"].get("adamw")
    cards = all(device["kind"] == "cuda" for device in plan["fleet"]["devices"].values())
    if row is not None and row["chosen"] == "fused" and not (cards and len(kinds_of(plan)) == 1):
        yield Refusal(
            "adamw-fused",
            "--set adamw=fused",
            f"ranks on {', '.join(kinds_of(plan))}",
            "a fused kernel rounds as its device does, and ranks of unlike devices would part; it is a card's kernel",
            "--set adamw=auto",
        )


def allocator_unfit(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    row, cards = plan["workload"]["config"].get("allocator"), "cuda" in _kinds(plan)
    if row is not None and (row["chosen"] in ALLOCATORS) != cards:
        yield Refusal(
            "allocator-unfit",
            f"--set allocator={row['chosen']}",
            "every rank is a card" if cards else "every rank is a CPU",
            "it says how a card's memory grows: a card's does so in one of the two ways, a CPU's in neither",
            "--set allocator=auto",
        )


def _kinds(plan: Facts) -> set[str]:
    """The kinds of the fleet's devices: cpu, cuda."""
    return {device["kind"] for device in plan["fleet"]["devices"].values()}


def mechanism_unavailable(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """What was asked for by name and this model, or this fleet, cannot have."""
    if "account" not in facts:  # at a start: what was asked for is engaged already
        return
    rows = facts["account"]["mechanisms"]
    kinds = _kinds(plan)
    for name in facts["request"].get("mechanisms") or ():
        if name not in rows:
            offered = sorted(rows, key=lambda name: int(rows[name]["order"]))
            found = f"{plan['workload']['model']} offers {', '.join(offered) or 'none'}"
            why = "no mechanism of this name has anything to act on in it"
        elif kinds - set(rows[name]["devices"]):
            found = f"ranks on {' and '.join(sorted(kinds))}"
            why = f"{name} runs on {' and '.join(rows[name]['devices'])}"
        elif rows[name].get("fleet") is not False and barred(plan, rows[name]):
            found, why = str(barred(plan, rows[name])), f"{name} could not run, or its ranks would part"
        else:
            continue
        yield Refusal("mechanism-unavailable", f"--mechanisms {name}", found, why, f"leave {name} out of --mechanisms")


def mechanism_fleet(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    rows, world = facts["account"]["mechanisms"], _world(facts)
    for name in facts["request"].get("mechanisms") or ():
        if world > 1 and rows.get(name, {}).get("fleet") is False:
            yield Refusal(
                "mechanism-fleet",
                f"--mechanisms {name} on {world} ranks",
                f"{world} ranks, and {name} is for one alone",
                rows[name]["fleet_why"],
                f"leave {name} out of --mechanisms, or plan one rank",
            )


def mechanisms_exclude(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    rows, asked = facts["account"]["mechanisms"], facts["request"].get("mechanisms") or ()
    for name, other in itertools.combinations(asked, 2):
        if other in rows.get(name, {}).get("excludes", ()) or name in rows.get(other, {}).get("excludes", ()):
            yield Refusal(
                "mechanisms-exclude",
                f"--mechanisms {','.join(asked)}",
                f"{name} and {other} in one run",
                "both decide what is kept of the same activations",
                f"leave {name} or {other} out of --mechanisms",
            )


def kernel_unsupported(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if "account" not in facts:  # at a start: the smoke launch proves the kernels instead
        return
    for entry in plan["ranks"]:
        device = resolve(plan, device_pointer(plan, entry))
        capability = device["sm"]["value"] if device["kind"] == "cuda" else None
        for name, choice in entry["kernels"].items():
            row = next(row for row in facts["account"]["kernels"][name] if row["name"] == choice["chosen"])
            shape, dtype = facts["account"]["kernel_shapes"].get(name, {}), entry["dtype"]["chosen"]
            veto = kernel_veto(row, device["kind"], capability, dtype, plan["toolchain"], shape)
            if veto is not None:
                yield Refusal(
                    "kernel-unsupported",
                    f"kernel {name}={choice['chosen']} on rank {_members(entry)}",
                    f"{_card(plan, device_pointer(plan, entry))}, {entry['dtype']['chosen']}",
                    f"{choice['chosen']} {veto}",
                    f"--set {name}=auto",
                )


def calibration_unlike(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if "request" not in facts:  # at a start: what was calibrated by is no longer at hand
        return
    for seal, traits in unlike(facts["request"], plan).items():
        yield Refusal(
            "calibration-unlike",
            f"--calibrate by the runs of plan {seal[:12]}",
            f"no rank of it is alike to one of this plan: unlike in {', '.join(traits)}",
            "a measurement of other work, or of another device, says nothing of this one",
            "leave that plan out of --calibrate, or plan what it planned",
        )


def does_not_fit(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if "account" not in facts:  # at a start: the memory that is free by then is judged instead
        return
    ways: str | None = None
    for entry in _over(plan):
        peak, limit = entry["memory"]["peak"]["value"], entry["memory"]["limit"]
        parts = _components(entry["memory"])
        engaged = [*plan["fit"]["mechanisms"]["chosen"], *entry["mechanisms"]["chosen"]]
        if ways is None:
            ways = ways_to_fit(plan, facts["request"], facts["account"], partial(_planned, facts))
        yield Refusal(
            "does-not-fit",
            f"batch {entry['batch']['chosen']} x {entry['seq']['chosen']} on rank {_members(entry)}, "
            f"{_card(plan, device_pointer(plan, entry))}",
            f"peak {size(peak)} over {size(max(0, limit['value']))} ({limit['why']}): {parts}",
            f"with {', '.join(engaged)} engaged, what is left is still over the limit"
            if engaged
            else "no memory mechanism is engaged, and a run would end out of memory",
            ways,
        )


def _planned(facts: Facts, changes: Mapping[str, Json]) -> bool:
    """Whether the request with ``changes`` makes a plan that fits and that no rule here refuses."""
    changed = {**facts, "request": {**facts["request"], **changes}}
    asked = (capacity_batch, capacity_seq, fsdp_muon, fsdp_scalar, fsdp_alone, reduce_alone, fit_unknown_memory)
    if any(True for rule in asked for _ in rule({}, changed)):
        return False
    draft = draft_of(changed["request"], facts["record"], facts["account"], PASSES[: PASSES.index(fit) + 1])
    made = (dtype_unsupported, kernel_unsupported, mechanism_unavailable, data_too_short, host_does_not_fit)
    return not _over(draft) and not any(True for rule in made for _ in rule(draft, changed))


def _over(plan: Facts) -> list[Facts]:
    """The rank entries whose peak is over their limit."""
    rows = [(entry, entry["memory"]["peak"]["value"], entry["memory"]["limit"]["value"]) for entry in plan["ranks"]]
    return [entry for entry, peak, limit in rows if None not in (peak, limit) and peak > limit]


def _components(memory: Facts) -> str:
    """Every component of memory with its size, and of the activations what they are, the largest first."""
    alive = sorted(memory.get("alive", {}).items(), key=lambda item: -item[1]["value"])
    within = ", ".join(f"{name} {size(item['value'])}" for name, item in alive)
    parts = []
    for name in COMPONENTS:
        if name in memory:
            told = f"{name} {size(memory[name]['value'])}"
            parts.append(f"{told} ({within})" if name == "activations" and within else told)
    return ", ".join(parts)


def host_does_not_fit(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """What mechanisms keep in host memory, where a device's memory is not the host's."""
    for entry in plan["ranks"]:
        room, held = host_room(plan, entry), entry["memory"].get("hosted", {}).get("value")
        if room is not None and held is not None and held > room:
            names = [*plan["fit"]["mechanisms"]["chosen"], *entry["mechanisms"]["chosen"]]
            yield Refusal(
                "host-does-not-fit",
                f"{', '.join(names)} on rank {_members(entry)}",
                f"{size(held)} in host memory, and {size(max(0, round(room)))} of it free for each rank of the node",
                "tables or activations that the host cannot hold would end the run, or the machine's other programs",
                "free memory of the host, a larger --fit, or another of --mechanisms",
            )


def _members(entry: Facts) -> str:
    members = entry["members"]
    if len(members) == 1:
        return str(members[0])
    return f"{members[0]} and the {len(members) - 1} alike" if len(members) > 2 else f"{members[0]} and {members[1]}"


def _card(plan: Facts, pointer: str) -> str:
    device = resolve(plan, pointer)
    name = device["name"]["value"] or "a device without a name"
    identity = pointer.rsplit("/", 1)[1]
    if device["kind"] == "cuda" and device["sm"]["value"] is not None:
        return f"{name} ({identity}, {sm_name(device['sm']['value'])})"
    return f"{name} ({identity})"
