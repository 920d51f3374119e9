"""The tests of the refusals that the executor judges: at the start, and after the smoke launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from planner.door import ALLOCATORS
from planner.passes.cost import MASTER_BYTES, TABLES_BYTES
from planner.passes.layout import device_pointer
from planner.passes.legality import sm, sm_name
from planner.passes.likeness import node_count
from planner.passes.sharding import is_sharded
from planner.refusals.refusal import Refusal
from planner.views.words import size
from schemas.document import resolve
from schemas.form import Json

Facts = Mapping[str, Json]
_GIB = 2**30
_REPLAN = "plan this machine as it is now: dormouse-plan, with the options of the plan's request"

_BESIDE = 2**16

# Parts of the toolchain that affect every run; a kernel's or mechanism's own packages are added by the plan's choices.
_ALWAYS = ("torch",)


def entry_of(plan: Facts, rank: int) -> Facts:
    """The entry of ``plan`` that ``rank`` is a member of."""
    return next(entry for entry in plan["ranks"] if rank in entry["members"])


def world_of(plan: Facts) -> int:
    return sum(len(entry["members"]) for entry in plan["ranks"])


def multi_node(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    nodes = node_count(plan)
    if nodes > 1:
        yield Refusal(
            "multi-node",
            f"a run over {nodes} nodes",
            f"{nodes} nodes, the first of them {next(iter(plan['fleet']['nodes']))}",
            "a fleet of several nodes can be planned and compared, but its run has not passed a gate of its own",
            "plan the devices of one node",
        )


def model_unnamed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """A plan may come from anywhere: the code that it names is not run on its word alone."""
    if facts.get("strange"):
        name = plan["workload"]["model"]
        yield Refusal(
            "model-unnamed",
            f"to import the plan's model {name}",
            facts["strange"],
            "the plan alone names it, and whoever wrote the plan would choose what code runs here",
            f"read that code, then say --model {quote(name)} to have it run",
        )


def world_mismatch(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    planned, found = world_of(plan), facts["world_size"]
    if planned != found:
        starter = "python" if planned == 1 else f"torchrun --nproc_per_node={planned}"
        how = f"{starter} -m executor {quote(facts.get('plan_path', 'PLAN'))}"
        yield Refusal(
            "world-mismatch",
            f"a plan for {planned} rank{'s' if planned > 1 else ''}",
            f"{found} process{'es' if found > 1 else ''} (WORLD_SIZE={found})",
            "each process is one planned rank: more would train the same data twice, fewer would leave some of it out",
            f"start it as: {how}",
        )


def digest_disagrees(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    seals = {row["rank"]: row["seal"] for row in facts["ranks"]}
    if len(set(seals.values())) > 1:
        yield Refusal(
            "digest-disagrees",
            "one plan for all ranks",
            ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in sorted(seals.items())),
            "the ranks read different plans, and would train different things as if they were one",
            "give every rank the same file",
        )


def device_changed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["ranks"]:
        entry = entry_of(plan, row["rank"])
        planned, found = resolve(plan, device_pointer(plan, entry)), row["device"]
        identity = entry["devices"][entry["members"].index(row["rank"])]
        listed = identity.startswith("card-")
        changes = _less_capable(planned, found) if listed else _changes(planned, found, identity)
        if changes:
            yield Refusal(
                "device-changed",
                f"rank {row['rank']} on {planned['name']['value']} ({identity})",
                "; ".join(changes),
                "dtype, kernels, batch and memory were decided for the planned device",
                f"show the cards in the plan's order (CUDA_VISIBLE_DEVICES), or {_REPLAN}" if listed else _REPLAN,
            )


def _changes(planned: Facts, found: Facts, identity: str) -> list[str]:
    """What of a probed device is another now."""
    if planned["kind"] == "cuda" and found["kind"] == "cpu":
        return [f"it is not here: {found.get('here', 'no card is visible here')}"]
    changes = [
        f"{key} was {planned[key]['value']}, is {found[key]}"
        for key in ("name", "vector_bits", "sm")
        if key in planned and key in found and planned[key]["value"] != found[key]
    ]
    if planned["kind"] != found["kind"] or (planned["kind"] == "cuda" and identity != found["id"]):
        changes.insert(0, f"was {planned['kind']} {identity}, is {found['kind']} {found['id']}")
    if planned["kind"] == "cpu" and _fewer(planned["cores"]["value"], found["cores"]):
        changes.append(f"cores were {planned['cores']['value']}, are {found['cores']}")
    return changes


def _less_capable(planned: Facts, found: Facts) -> list[str]:
    """What a device has less of than the card of the catalogue that was planned. Memory may be a tenth less: a data
    sheet's is the marketed one."""
    if found["kind"] != "cuda":
        return [f"no card is there for it: {found.get('here', 'no card is visible here')}"]
    name, wanted, total = found.get("name") or found["id"], planned["sm"]["value"], planned["memory_total"]["value"]
    less = []
    if found.get("sm") is None or sm(found["sm"]) < sm(wanted):
        less.append(f"{name} is {sm_name(found['sm']) if found.get('sm') else 'of unknown capability'}")
    if _fewer(0.9 * total, found.get("memory_total")):
        less.append(f"{name} has {size(found['memory_total'])}, and {size(total)} were planned")
    return less


def _fewer(planned: float | None, found: float | None) -> bool:
    return planned is not None and found is not None and found < planned


def memory_taken(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    together: dict[str, float] = {}  # ranks on one CPU draw on the same memory
    for row in facts["ranks"]:
        entry, free = entry_of(plan, row["rank"]), row["device"]["memory_free"]
        pool = "cpu" if row["device"]["kind"] == "cpu" else row["device"]["id"]
        together[pool] = together.get(pool, 0) + (entry["memory"]["peak"]["value"] or 0)
        if free is not None and free < together[pool]:
            yield Refusal(
                "memory-taken",
                f"a predicted peak of {together[pool] / _GIB:.3f} GiB up to rank {row['rank']}",
                f"{free / _GIB:.3f} GiB free on {pool}",
                "the run would end out of memory, perhaps after hours",
                "end what holds the memory, or plan within it: --fit auto",
            )
            return


def toolchain_changed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["ranks"]:
        for name in (*_ALWAYS, *_needed(plan, entry_of(plan, row["rank"]))):
            if plan["toolchain"][name]["basis"] == "assumed":
                continue  # a catalogue's toolchain is one that would serve, not one that is there
            planned, found = plan["toolchain"][name]["value"], row["toolchain"].get(name)
            if planned is not None and planned != found:
                yield Refusal(
                    "toolchain-changed",
                    f"{name} {planned} on rank {row['rank']}",
                    f"{name} {found or 'not installed'}",
                    "another version rounds, fuses and allocates otherwise: what was predicted is not what would run",
                    f"install {name}=={planned}, or {_REPLAN}",
                )


def _needed(plan: Facts, entry: Facts) -> list[str]:
    """The packages that the kernels and mechanisms of an entry were decided by."""
    decisions = [*entry["kernels"].values(), plan["fit"]["mechanisms"]]
    sources = [source for item in decisions for source in item.get("inputs", ())]
    return [source.rpartition("/")[2] for source in dict.fromkeys(sources) if source.startswith("/toolchain/")]


def workload_changed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["ranks"]:
        if row["workload_digest"] != plan["workload"]["digest"]:
            yield Refusal(
                "workload-changed",
                f"workload {plan['workload']['model']} {plan['workload']['digest'][:12]}",
                f"rank {row['rank']} builds {row['workload_digest'][:12]}",
                "names, shapes, routing or kernels of the model differ from those planned",
                _REPLAN,
            )


def data_changed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    sources = plan["workload"]["data"]["sources"]
    for row in facts["ranks"]:
        for source, found in zip(sources, row["data"], strict=True):
            digest = source["sha256"]["value"]
            if digest is not None and digest != found["sha256"]:
                yield Refusal(
                    "data-changed",
                    f"{source['name']}: {source['length']['value']} B, SHA-256 {digest[:12]}",
                    f"rank {row['rank']} read {found['length']} B, SHA-256 {found['sha256'][:12]}",
                    "a run on other bytes is another run",
                    "give the planned file by --data PATH, or plan anew on this one",
                )


def nccl_missing(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    if plan["exchange"]["backend"]["chosen"] != "nccl":
        return
    for row in facts["ranks"]:
        if not row.get("nccl_available", True):
            yield Refusal(
                "nccl-missing",
                "an exchange through NCCL",
                f"rank {row['rank']}: this torch was built without NCCL",
                "gloo would carry CUDA gradients through the host, an order of magnitude slower, under the plan's name",
                "install a CUDA build of torch with NCCL (Linux), or plan one card",
            )


def record_unwritable(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    reason = facts.get("record_unwritable")
    if reason:
        yield Refusal(
            "record-unwritable",
            "to record the run into its plan",
            reason,
            "a run whose measurements cannot be kept is not the run that was asked for",
            "--record PATH, at a place that can be written",
        )


def already_running(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    held = facts["ranks"][0].get("held") if facts["ranks"] else None
    if held:
        yield Refusal(
            "already-running",
            f"a run of the plan with seal {plan['seal']['digest'][:12]}",
            held,
            "two runs at once would take each other's devices, and write over each other's metrics and checkpoints",
            "wait for its end, or end it by SIGTERM, which saves; beside it runs a copy of the plan with --run-dir DIR",
        )


def _resume(facts: Facts) -> Json:
    """What rank 0 found to go on from, where that was asked for."""
    return facts["ranks"][0].get("resume") if facts["ranks"] else None


def nothing_to_resume(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    resume = _resume(facts)
    if resume is not None and resume["chosen"] is None:
        yield Refusal(
            "nothing-to-resume",
            f"--resume from the newest whole checkpoint in {resume['at']}",
            "; ".join(resume["passed"]) or "no checkpoint there",
            "what is not whole cannot be gone on from, and a run from the start is not what was asked for",
            "start anew without --resume, or name the folder of the run that was stopped: --run-dir DIR",
        )


def resume_finished(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    resume, last = _resume(facts), plan["runs"][-1] if plan.get("runs") else None
    if resume is not None and resume["chosen"] is not None and last is not None and last["outcome"] == "finished":
        yield Refusal(
            "resume-finished",
            f"--resume from {resume['chosen']['name']} in {resume['at']}",
            f"the plan's newest run finished after {last['steps']} steps ({last['id']})",
            "its last steps would be run again, and what it left be written over",
            "nothing is left to do; to train anew leave --resume out, to train on make a plan of more --steps",
        )


def resume_other_plan(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    resume = _resume(facts)
    chosen = None if resume is None else resume["chosen"]
    if chosen is not None and chosen["plan"] != plan["seal"]["digest"]:
        yield Refusal(
            "resume-other-plan",
            f"--resume of the plan with seal {plan['seal']['digest'][:12]}, of {_ranks(world_of(plan))}",
            f"{chosen['name']} in {resume['at']} is of seal {chosen['plan'][:12]}, of {_ranks(chosen['ranks'])}",
            "its state is of other work or of another split, and what came of it would be neither plan's",
            "give the plan that it was saved under, or the folder of this plan's run: --run-dir DIR",
        )


def checkpoints_no_room(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    room = facts["ranks"][0].get("room") if facts["ranks"] else None
    if room is None:
        return
    kept, one = plan["workload"]["config"].get("keep_checkpoints", {"chosen": 2})["chosen"], checkpoint_bytes(plan)
    needed = (kept + 1) * one - room["held"]
    if needed > room["free"]:
        beside = f", beside {size(room['held'])} of them there already" if room["held"] else ""
        yield Refusal(
            "checkpoints-no-room",
            f"to keep {kept} checkpoint{'s' if kept != 1 else ''} of {size(one)} each",
            f"{size(room['free'])} free where {room['at']} would lie{beside}",
            f"a new one is written whole before the oldest goes, which takes {size(needed)}: the run would fail at one",
            f"free {size(needed - room['free'])}, name a folder with room (--run-dir DIR), or plan fewer of them: "
            "--set keep_checkpoints=N, or checkpoint_every=0 for none but where the run is stopped",
        )


def checkpoint_bytes(plan: Facts) -> int:
    """Bytes of one checkpoint of ``plan``, by its readings: every parameter in fp32 and what the optimizers keep.

    What all ranks hold alike is written once, momentum by the rank that owns it; of alike ranks, all are taken to own
    as much as the one that owns most. Names, places and generators are `_BESIDE`.
    """
    parameters, ranks = plan["workload"]["parameters"], plan["ranks"]
    momentum = sum(_reading(entry, "muon_momentum") * len(entry["members"]) for entry in ranks)
    moved = "tables" in parameters and "tables_state" not in ranks[0]["memory"]  # hosted, with the tables
    tables: float = parameters["tables"]["value"] * TABLES_BYTES if moved else _reading(ranks[0], "tables_state")
    adamw, whole = _reading(ranks[0], "adamw_state"), float(parameters["total"]["value"]) * MASTER_BYTES
    if is_sharded(plan):  # each rank writes its rows of it
        tables, adamw = (
            sum(_reading(entry, name) * len(entry["members"]) for entry in ranks)
            for name in ("tables_state", "adamw_state")
        )
    return round(whole + adamw + tables + momentum + _BESIDE)


def _reading(entry: Facts, component: str) -> float:
    found = entry["memory"].get(component)
    return 0.0 if found is None or found["value"] is None else float(found["value"])


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def smoke_failed(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["smoke"]:
        asked = f"one discarded forward and backward on rank {row['rank']}"
        entry = entry_of(plan, row["rank"])
        if row["error"] is not None and not row.get("lost"):  # a rank that lost another says nothing of itself
            yield Refusal("smoke-failed", asked, row["error"], *_raised(entry, row["error"]))
        if row["unused"]:
            yield Refusal(
                "smoke-failed",
                asked,
                f"no gradient reached {_some(row['unused'])}",
                "a parameter outside of the loss is never trained, and ranks would wait for its gradient for ever",
                "use it in forward, remove it, or leave it untrained: requires_grad_(False) on it in __init__",
            )
        if row["nonfinite"]:
            options = _other_options(entry)
            yield Refusal(
                "smoke-failed",
                asked,
                f"not finite: {_some(row['nonfinite'])}",
                "a run that starts from an infinity or a NaN trains nothing",
                "mend the model: its loss, initial values, or an overflow in them"
                + (f"; or plan {' or '.join(options)}" if options else ""),
            )


def buffers_apart(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    rows = [row.get("moved", {}) for row in facts["smoke"]]
    apart = [name for name in dict.fromkeys(name for row in rows for name in row)
             if len({row.get(name) for row in rows}) > 1]  # fmt: skip
    if apart and not any(row["error"] for row in facts["smoke"]):
        yield Refusal(
            "buffers-apart",
            f"one discarded forward on {_ranks(len(rows))}, each of its own data",
            f"a buffer differs between them afterwards: {_some(apart)}",
            "gradients are summed over ranks, what a module keeps of its own data is not: their models would part",
            "plan one rank; or use a norm that keeps no running statistics: nn.LayerNorm, nn.GroupNorm",
        )


def _raised(entry: Facts, error: str) -> tuple[str, str]:
    """Why, and the way out, for a smoke launch of ``entry`` that raised ``error``."""
    if error.startswith("OutOfMemoryError"):
        return "the device's memory does not hold the run", "plan within it: --fit auto, or a smaller --batch"
    options, kernels = _other_options(entry), [f"{name}={item['chosen']}" for name, item in entry["kernels"].items()]
    with_what = f" with {', '.join(kernels)}" if kernels else ""
    why = f"what the plan holds, {entry['dtype']['chosen']}{with_what}, does not come through on this very device"
    mend = "mend the model where it raises this"
    return why, f"plan {' or '.join(options)}; or {mend}" if options else mend


def _other_options(entry: Facts) -> list[str]:
    """Options of another dtype or kernel, where the plan of ``entry`` has any but the plainest."""
    dtypes = [] if entry["dtype"]["chosen"] == "fp32" else ["another dtype (--dtype fp32)"]
    return dtypes + [f"another kernel (--set {name}=NAME)" for name in entry["kernels"]]


def _some(names: Sequence[str], most: int = 4) -> str:
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def allocator_set(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """What the environment tells torch of a card's memory, beside the plan."""
    planned = _allocator(plan)
    for name, text in facts.get("allocator", {}).items() if planned in ALLOCATORS else ():
        if text != ALLOCATORS[planned]:
            yield Refusal(
                "allocator-set",
                f"allocator={planned}, which is {ALLOCATORS[planned]}",
                f"{name}={text} in the environment",
                "the peak was predicted of blocks that are split and kept as the plan says",
                f"unset {name}, or plan with --set allocator={'segments' if planned == 'expandable' else 'expandable'}",
            )


def allocator_differs(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    planned = _allocator(plan)
    for row in facts["smoke"]:
        if row["error"] is None and row.get("allocator") not in (None, planned):
            yield Refusal(
                "allocator-differs",
                f"allocator={planned} on rank {row['rank']}",
                f"torch's memory grows by {row['allocator']}",
                "this build of torch, or this driver, does not do what was planned",
                "plan with --set allocator=segments",
            )


def _allocator(plan: Facts) -> str:
    row = plan["workload"]["config"].get("allocator")
    return "" if row is None else str(row["chosen"])


def kernel_differs(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["smoke"]:
        planned = {name: item["chosen"] for name, item in entry_of(plan, row["rank"])["kernels"].items()}
        for name in [*planned, *(name for name in row["kernels"] if name not in planned)]:
            if row["error"] is None and row["kernels"].get(name) != planned.get(name):
                yield Refusal(
                    "kernel-differs",
                    f"kernel {name}={planned.get(name, 'none')} on rank {row['rank']}",
                    f"{row['kernels'].get(name) or 'none'} ran",
                    "a library chose another kernel than the plan did",
                    "report it: this is a fault of the runtime, not of the plan",
                )


def dtype_differs(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for row in facts["smoke"]:
        planned = entry_of(plan, row["rank"])["dtype"]["chosen"]
        if row["error"] is None and row["dtype"] not in (None, planned):  # None: no product to have a dtype
            yield Refusal(
                "dtype-differs",
                f"products in {planned} on rank {row['rank']}",
                f"products in {row['dtype']}",
                "the model's matrix products did not have the dtype that was planned",
                "report it: this is a fault of the runtime, not of the plan",
            )
