"""Everything Dormouse refuses, as one ordered list.

Each rule is a pure function of a plan (or what is drafted of one) and of facts, and says when it is judged:

- "request": before the passes, on what was asked (facts: request, record, account)
- "plan":    on the finished draft (facts as above)
- "start":   by the executor before it builds (facts: world_size, ranks, record_unwritable, allocator)
- "running": after the smoke launch and during the run (facts: smoke)

docs/refusals.md is generated from this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from planner.refusals import of_machines as refusals_machine
from planner.refusals import of_plans as refusals_plan
from planner.refusals import of_runs as refusals_run
from planner.refusals.refusal import Refusal
from schemas.form import Json

Test = Callable[[Mapping[str, Json], Mapping[str, Json]], Iterable[Refusal]]
WHENS = ("request", "plan", "start", "running")


class Refused(Exception):
    """What was asked cannot be honoured; exit code 3. Holds every refusal found, not only the first."""

    def __init__(self, refusals: list[Refusal]) -> None:
        super().__init__("; ".join(refusal.code for refusal in refusals))
        self.refusals = refusals

    def text(self) -> str:
        """The message for a person: each refusal once."""
        return "\n".join(dict.fromkeys(refusal.text() for refusal in self.refusals))


@dataclass(frozen=True)
class Rule:
    """One refusal: its stable code, when it is judged, what it refuses in a line, and the test that finds it."""

    code: str
    when: str
    meaning: str
    test: Test


RULES: tuple[Rule, ...] = (
    Rule("mixed-kinds", "request", "CPU and CUDA ranks in one fleet", refusals_plan.mixed_kinds),
    Rule("cuda-missing", "request", "cards under a CPU build of torch", refusals_machine.cuda_missing),
    Rule("no-wheel-serves", "request", "cards that no one build of torch serves", refusals_machine.no_wheel_serves),
    Rule("wheel-lacks-card", "request", "a card that this torch has no code for", refusals_machine.wheel_lacks_card),
    Rule("mig-parent", "request", "a divided card without a visible slice", refusals_machine.mig_parent),
    Rule("mig-fleet", "request", "several MIG slices in one run", refusals_machine.mig_fleet),
    Rule("compute-mode", "request", "a card that no process, or no second one, may use", refusals_machine.compute_mode),
    Rule("nccl-windows", "request", "several cards on Windows, which has no NCCL", refusals_machine.nccl_platform),
    Rule(
        "per-rank-count", "request", "a value a rank, but not as many as there are ranks", refusals_plan.per_rank_count
    ),
    Rule("capacity-batch", "request", "--capacity contradicts an explicit --batch", refusals_plan.capacity_batch),
    Rule("capacity-seq", "request", "--capacity contradicts an explicit --seq", refusals_plan.capacity_seq),
    Rule("fsdp-muon", "request", "FSDP2 under Muon: Newton-Schulz needs whole matrices", refusals_plan.fsdp_muon),
    Rule("fsdp-scalar", "request", "FSDP2 of a parameter without dimensions", refusals_plan.fsdp_scalar),
    Rule("fsdp-alone", "request", "FSDP2 for one rank, which has no one to share with", refusals_plan.fsdp_alone),
    Rule("reduce-alone", "request", "a reduce dtype for one rank, which reduces nothing", refusals_plan.reduce_alone),
    Rule("fit-unknown-memory", "request", "--fit auto where free memory is unknown", refusals_plan.fit_unknown_memory),
    Rule("mechanism-fleet", "request", "a mechanism of one rank asked for on a fleet", refusals_plan.mechanism_fleet),
    Rule("mechanisms-exclude", "request", "mechanisms that exclude each other", refusals_plan.mechanisms_exclude),
    Rule("data-too-short", "plan", "a file that holds no window of the planned length", refusals_plan.data_too_short),
    Rule("dtype-unsupported", "plan", "a dtype that the card cannot compute in", refusals_plan.dtype_unsupported),
    Rule(
        "moe-capacity-fleet",
        "plan",
        "a capacity of experts on a fleet, where the split would change the model",
        refusals_plan.moe_capacity_fleet,
    ),
    Rule("loss-scale-idle", "plan", "a scale of losses without a rank in fp16", refusals_plan.loss_scale_idle),
    Rule("adamw-fused", "plan", "torch's fused AdamW over unlike devices", refusals_plan.adamw_fused),
    Rule(
        "allocator-unfit",
        "plan",
        "an allocator of cards for CPU ranks, or none for cards",
        refusals_plan.allocator_unfit,
    ),
    Rule(
        "mechanism-unavailable",
        "plan",
        "a memory mechanism asked for that the model or the fleet cannot have",
        refusals_plan.mechanism_unavailable,
    ),
    Rule(
        "kernel-unsupported", "plan", "a kernel whose conditions a rank does not meet", refusals_plan.kernel_unsupported
    ),
    Rule("calibration-unlike", "plan", "runs to calibrate by that are of other work", refusals_plan.calibration_unlike),
    Rule("does-not-fit", "plan", "a predicted peak over a rank's limit", refusals_plan.does_not_fit),
    Rule("host-does-not-fit", "plan", "more in host memory than it has free", refusals_plan.host_does_not_fit),
    Rule("multi-node", "start", "running ranks on several nodes", refusals_run.multi_node),
    Rule("model-unnamed", "start", "code of a model that the command did not name", refusals_run.model_unnamed),
    Rule("world-mismatch", "start", "another number of processes than the plan has ranks", refusals_run.world_mismatch),
    Rule("digest-disagrees", "start", "ranks that read different plans", refusals_run.digest_disagrees),
    Rule("device-changed", "start", "another device than the one planned", refusals_run.device_changed),
    Rule("memory-taken", "start", "less free memory than the predicted peak", refusals_run.memory_taken),
    Rule("toolchain-changed", "start", "another version of what affects the run", refusals_run.toolchain_changed),
    Rule("workload-changed", "start", "another model than the one planned", refusals_run.workload_changed),
    Rule("data-changed", "start", "other bytes than the ones planned", refusals_run.data_changed),
    Rule("nccl-missing", "start", "CUDA ranks without NCCL: never a fallback to gloo", refusals_run.nccl_missing),
    Rule("record-unwritable", "start", "a plan that the run could not be recorded in", refusals_run.record_unwritable),
    Rule("already-running", "start", "a second run at once of a plan, or in a folder", refusals_run.already_running),
    Rule("nothing-to-resume", "start", "--resume where no checkpoint is whole", refusals_run.nothing_to_resume),
    Rule("resume-finished", "start", "--resume where the newest run finished", refusals_run.resume_finished),
    Rule("resume-other-plan", "start", "--resume from another plan's checkpoint", refusals_run.resume_other_plan),
    Rule(
        "checkpoints-no-room",
        "start",
        "a disk that cannot hold the planned checkpoints",
        refusals_run.checkpoints_no_room,
    ),
    Rule("allocator-set", "start", "an allocator's setting in the environment", refusals_run.allocator_set),
    Rule("smoke-failed", "running", "the discarded first step fails or is not finite", refusals_run.smoke_failed),
    Rule("buffers-apart", "running", "a buffer follows each rank's own data", refusals_run.buffers_apart),
    Rule("allocator-differs", "running", "another allocator than planned", refusals_run.allocator_differs),
    Rule("kernel-differs", "running", "another kernel ran than the one planned", refusals_run.kernel_differs),
    Rule("dtype-differs", "running", "the products had another dtype than planned", refusals_run.dtype_differs),
)


def judge(when: str, plan: Mapping[str, Json], facts: Mapping[str, Json]) -> list[Refusal]:
    """All refusals of the rules tagged ``when``, in the list's order."""
    if when not in WHENS:
        raise ValueError(f"when is {when!r}: none of {', '.join(WHENS)}")
    return [refusal for rule in RULES if rule.when == when for refusal in rule.test(plan, facts)]


def refuse(when: str, plan: Mapping[str, Json], facts: Mapping[str, Json]) -> None:
    """Raise Refused when any rule tagged ``when`` refuses."""
    found = judge(when, plan, facts)
    if found:
        raise Refused(found)
