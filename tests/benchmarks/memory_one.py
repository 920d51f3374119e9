"""One process of ``tests/benchmarks/memory.py``: it runs one plan, or lets others estimate one.

    memory_one.py run PLAN RUN_DIR SEEN [CAP]   the executor itself; what the allocator tells beside goes to SEEN
    memory_one.py estimate PLAN                 bytes at the peak by other estimators, or why there are none

CAP bytes stand in for a smaller card: of CUDA's allocator, which then gets no more of the card; on a CPU of the
process's data, beyond what it has when it begins.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor import launch
from executor.slices import exchange_slice, rank_slice, work_slice
from schemas.store import load

STATISTICS = ("reserved_bytes", "allocated_bytes", "requested_bytes", "active_bytes")
PROCESS_SLACK = 2**29  # what a CPU process takes for its data, threads and libraries while it runs


def run(plan: str, run_dir: str, seen: str, cap: int | None) -> int:
    """Run ``plan`` by the executor's own command; gives its exit code."""
    own = rank_slice(load(plan), 0)
    launch.confine(own.device, own.kind, own.allocator)  # as the command itself does, before torch looks
    import torch

    from executor import __main__ as command
    from executor import peaks, run

    assert callable(run.execute)  # imported now, so that a CPU's cap is beyond it
    marks: dict[str, dict[str, int]] = {}
    if own.kind == "cuda":
        peaks.CardProbe = _watched(peaks.CardProbe, marks)  # type: ignore[misc]
    if cap is not None:
        (_cap_card if own.kind == "cuda" else _cap_process)(cap)
    code = command.main([plan, "--run-dir", run_dir])
    found: dict[str, Any] = {"marks": marks}
    if own.kind == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        statistics = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        found |= {"retries": statistics["num_alloc_retries"], "ooms": statistics["num_ooms"], "total": total,
                  "beside": total - free - statistics["reserved_bytes.all.current"]}  # fmt: skip
    Path(seen).write_text(json.dumps(found), encoding="utf-8")
    return code


def _watched(probe: Any, marks: dict[str, dict[str, int]]) -> Any:
    """The runtime's probe, which notes the allocator's other peaks at its two marks."""

    class Watched(probe):  # type: ignore[misc]
        def optimizer(self) -> None:
            _note(marks, "backward")
            super().optimizer()

        def end(self) -> None:
            _note(marks, "optimizer")
            super().end()

    return Watched


def _note(marks: dict[str, dict[str, int]], mark: str) -> None:
    from torch.cuda.memory import memory_stats_as_nested_dict

    now = memory_stats_as_nested_dict()
    before = marks.setdefault(mark, dict.fromkeys(STATISTICS, 0))
    for name in STATISTICS:
        before[name] = max(before[name], now[name]["all"]["peak"])


def _cap_card(cap: int) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory, 0)


def _cap_process(cap: int) -> None:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    limit = held + PROCESS_SLACK + cap
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def estimate(plan: Mapping[str, Any]) -> dict[str, int | str]:
    """Bytes at the peak by each estimator's own code, or why it gives none."""
    found: dict[str, int | str] = {}
    for name, ask in (("MemTracker", _memtracker), ("accelerate", _accelerate), ("DeepSpeed", _deepspeed)):
        try:
            found[name] = ask(plan)
        except ImportError as error:
            found[name] = f"not installed: {error.name}"
        except Exception as error:  # of another's code on our model: told in its place
            found[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return found


def _memtracker(plan: Mapping[str, Any]) -> int:
    """torch's MemTracker over two whole steps on fake tensors: of the CPU, since fake CUDA tensors need a card."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from executor import build, workloads
    from executor.precision import compute_in

    work, rank, shape = work_slice(plan), rank_slice(plan, 0), plan["ranks"][0]
    tokens = shape["batch"]["chosen"], shape["seq"]["chosen"]
    with FakeTensorMode():
        # Not as the runtime does, which then sees to it that all is fp32: fake parameters take no conversion.
        model = workloads.build(workloads.resolve(work.model), work.config, rank.kernels, work.model)
        optimizers = build.optimizers(model, work, rank, exchange_slice(plan).owners)
        inputs, targets = (torch.zeros(tokens, dtype=torch.int64) for _ in range(2))
        tracker = MemTracker()
        tracker.track_external(model, inputs, targets, *(t for of in optimizers.state().values() for t in of))
        keep = torch.ones((), dtype=torch.bool)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()  # what it asks for before a further step
                model.zero_grad(set_to_none=False)
                with compute_in(rank.dtype, "cpu"):
                    loss = model(inputs, targets)
                torch.autograd.backward(loss)
                if optimizers.muon is not None:
                    optimizers.muon.apply(optimizers.muon.updates(keep), 1e-3, keep)
                optimizers.adamw.step(1e-3, keep)
                if optimizers.tables is not None:
                    optimizers.tables.step(1e-3, keep)
        return sum(int(kinds["Total"]) for kinds in tracker.get_tracker_snapshot("peak").values())


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _accelerate(plan: Mapping[str, Any]) -> int:
    """What ``accelerate estimate-memory`` prints for training by Adam: it knows of no batch."""
    from accelerate.commands.estimate import estimate_training_usage

    dtype = _DTYPES[plan["ranks"][0]["dtype"]["chosen"]]
    return int(max(estimate_training_usage(4 * _parameters(plan), dtype).values()))


def _deepspeed(plan: Mapping[str, Any]) -> int:
    """DeepSpeed's model states of ZeRO 2 on one card, without offloading: no activations."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return int(estimate_zero2_model_states_mem_needs(_parameters(plan), 1, 1, cpu_offload=False)[1])


def _parameters(plan: Mapping[str, Any]) -> int:
    return int(plan["workload"]["parameters"]["total"]["value"])


def main(words: list[str]) -> int:
    commands: dict[str, Callable[..., int]] = {
        "run": lambda plan, run_dir, seen, cap=None: run(plan, run_dir, seen, None if cap is None else int(cap)),
        "estimate": lambda plan: print(json.dumps(estimate(load(plan)))) or 0,
    }
    return commands[words[0]](*words[1:])


if __name__ == "__main__":
    launch.vanish(main(sys.argv[1:]))
