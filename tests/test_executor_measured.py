"""What is measured: taken from what was really there, put beside what was predicted, or absent with its reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import plans
from executor import build, measured, peaks
from executor.clock import Clock
from executor.data import open_corpus
from executor.exchange import Exchanged
from executor.kernels.offload import pool
from executor.meter import Meter
from executor.peaks import CardProbe, CpuProbe, pressure, probe, storage_bytes
from executor.run import Places, execute
from executor.slices import data_slice
from schemas.document import is_reading, resolve, walk
from schemas.seal import append_run, verify


def run(tmp_path: Path, steps: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the plan, the entry) of a one-rank run."""
    data = plans.corpus(tmp_path)
    plan = plans.plan(data, 1, steps=steps, **more)
    done = execute(plan, Places(None, tmp_path / "run", (data,)))
    assert done.entry is not None
    return plan, done.entry


def test_every_measurable_reading_is_measured_or_absent_and_predictions_are_copied(tmp_path: Path) -> None:
    plan, entry = run(tmp_path, 6)
    flagged = {pointer for pointer, item in walk(plan) if item.get("measurable")}
    labels = [*entry["measured"], *entry["absent"]]
    assert flagged <= {label.split(" @")[0] for label in labels}
    assert len(set(labels)) == len(labels)
    assert all(entry["absent"].values())
    for label, line in entry["measured"].items():
        item = resolve(plan, label.split(" @")[0])
        assert line["predicted"] == (item["value"] if is_reading(item) else item["chosen"])
    verify(append_run(plan, entry), "recorded")


def test_nothing_of_a_cpu_run_is_left_unmeasured(tmp_path: Path) -> None:
    _, entry = run(tmp_path, 6)
    assert entry["absent"] == {}
    assert {"clocks", "allocator_retries"} <= entry["conditions"].keys()


def test_a_run_too_short_for_the_profiler_says_so(tmp_path: Path) -> None:
    _, entry = run(tmp_path, 3)
    assert "3 steps has none to spare" in entry["absent"]["/ranks/0/memory/peak @0"]
    assert entry["measured"]["/ranks/0/memory/masters @0"]["value"] > 0


def test_the_parts_of_a_step_make_its_total(tmp_path: Path) -> None:
    _, entry = run(tmp_path, 8)
    value = {label: line["value"] for label, line in entry["measured"].items()}
    parts = value["/ranks/0/step/compute @0"] + value["/ranks/0/step/optimizer @0"]
    assert parts == pytest.approx(value["/ranks/0/step/total @0"], rel=0.3)  # medians of parts, of few steps
    assert value["/step/seconds"] == value["/ranks/0/step/total @0"]


def test_bits_per_byte_are_the_mean_over_the_held_out_windows(tmp_path: Path) -> None:
    data = plans.corpus(tmp_path)
    plan = plans.plan(data, 1, {"eval_windows": 5}, steps=2, batch=2)
    done = execute(plan, Places(None, tmp_path / "run", (data,)))
    held_out = build.reader([open_corpus(data)], data_slice(plan, 0)).held_out(5, 32)
    with torch.no_grad():
        nats = [float(done.model(inputs[None], targets[None])) for inputs, targets in zip(*held_out, strict=True)]
    assert done.entry is not None
    assert done.entry["bits_per_byte"] == pytest.approx(sum(nats) / 5 / math.log(2), rel=1e-5)


def test_state_is_the_bytes_of_live_storages(tmp_path: Path) -> None:
    plan, entry = run(tmp_path, 3)
    elements = {key: item["value"] for key, item in plan["workload"]["parameters"].items()}
    value = {label: line["value"] for label, line in entry["measured"].items()}
    assert value["/ranks/0/memory/masters @0"] == 4 * elements["total"]
    assert value["/ranks/0/memory/adamw_state @0"] == 8 * elements["adamw"]
    assert value["/ranks/0/memory/muon_momentum @0"] == 4 * elements["muon"]


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    whole = torch.zeros(100)
    assert storage_bytes([whole, whole[:50], whole.view(10, 10)]) == 400


def test_the_profiler_finds_the_highest_bytes_of_each_phase() -> None:
    probe = CpuProbe(6, lambda: 1000)
    probe.begin(1)
    kept = torch.empty(250_000)  # 1 MB
    passing = torch.empty(500_000)  # 2 MB
    del passing
    probe.optimizer()
    passing = torch.empty(750_000)  # 3 MB
    del passing, kept
    probe.end()
    assert probe.peaks.absent is None
    assert probe.peaks.backward == 1000 + 3_000_000
    assert probe.peaks.optimizer == 1000 + 4_000_000


def test_a_cards_peaks_are_the_highest_of_each_phase_over_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # (allocated, reserved) at the two marks of each step, as the allocator would tell them.
    told = iter([(50, 70), (40, 70), (60, 80), (30, 95)])
    now: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: now.append(next(told)) if not now else None)
    names = ("allocated_bytes", "reserved_bytes")
    monkeypatch.setattr(
        peaks,
        "memory_stats_as_nested_dict",
        lambda: {name: {"all": {"peak": value}} for name, value in zip(names, now[-1], strict=True)},
    )
    probe = CardProbe()
    for step in range(2):
        now.clear()
        probe.begin(step)
        probe.optimizer()
        now[:] = [next(told)]
        probe.end()
    assert (probe.peaks.backward, probe.peaks.optimizer, probe.peaks.reserved) == (60, 40, 95)
    assert probe.peaks.samples == 2


def test_how_near_a_card_came_to_its_end_is_a_condition_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    assert pressure("cuda") == {"allocator_retries": {"value": 3, "reason": None}}
    (unknown,) = pressure("cpu").values()
    assert unknown["value"] is None
    assert unknown["reason"]


@pytest.mark.gpu
def test_what_a_card_reserves_is_no_less_than_what_it_gives_out() -> None:
    probe = CardProbe()
    probe.begin(0)
    kept = torch.empty(2**22, device="cuda")
    probe.optimizer()
    probe.end()
    assert probe.peaks.reserved is not None
    assert probe.peaks.reserved >= probe.peaks.backward >= kept.nbytes
    assert all(item["value"] is not None for item in pressure("cuda").values())


def test_spans_that_overlap_count_once() -> None:
    clock = Clock("cpu")
    assert clock.union([(0.0, 1.0), (0.5, 2.0), (5.0, 6.0), (5.2, 5.4)]) == pytest.approx(3.0)
    assert clock.union([]) == 0.0


def test_what_of_spans_lies_before_a_moment_counts_alone() -> None:
    clock = Clock("cpu")
    spans = [(0.0, 2.0), (1.0, 3.0), (4.0, 6.0), (7.0, 8.0)]
    assert [clock.union(spans, until) for until in (0.0, 1.5, 3.5, 5.0, 9.0)] == [0.0, 1.5, 3.0, 4.0, 6.0]


def test_an_exchange_is_hidden_up_to_the_launch_of_its_last_bucket() -> None:
    """Three buckets of one, two and one seconds; the last is launched while the second still travels."""
    seen = Exchanged(4, {"fp32"}, buckets=3, spans=[[1.0, 2.0], [3.0, 5.0], [4.0, 6.0]])
    meter = Meter(Clock("cpu"), probe("cpu", 9, lambda: 0), 0, lambda: seen)
    meter._moments = [0.0, 6.0, 7.0]
    meter._keep(seen)
    assert meter.samples.reduced == [4.0] and meter.samples.hidden == [0.5]  # 1 + 1 of 1 + 3
    assert meter.samples.parts["compute"] == [4.0] and meter.samples.parts["exchange"] == [2.0]
    seen.stalls = [(3.5, 4.0)]  # backward waited for the second: so much of it is not hidden, and is no compute
    meter._keep(seen)
    assert meter.samples.hidden == [0.5, 0.375]
    assert meter.samples.parts["compute"][1:] == [3.5] and meter.samples.parts["exchange"][1:] == [2.5]


def test_a_rank_that_gave_nothing_is_absent_with_the_reason(tmp_path: Path) -> None:
    plan = plans.plan(plans.corpus(tmp_path), 2, steps=4)
    found, absent = measured.lines(plan, {}, "the run failed before")
    assert found == {}
    assert absent["/ranks/0/memory/peak @1"] == "the run failed before"
    assert len(absent) == sum(2 if p.startswith("/ranks") else 1 for p, i in walk(plan) if i.get("measurable"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_dtype_that_the_products_had_is_recorded(tmp_path: Path, dtype: str) -> None:
    _, entry = run(tmp_path, 2, dtype=dtype)
    assert entry["measured"]["/ranks/0/dtype @0"]["value"] == dtype


TABLES = {"engram_rows": 1500, "engram_heads": 1, "engram_dim": 16}


def values_of(entry: dict[str, Any], name: str) -> tuple[Any, Any]:
    """(predicted, measured) of one component of rank 0's memory."""
    line = entry["measured"][f"/ranks/0/memory/{name} @0"]
    return line["predicted"], line["value"]


def test_tables_are_measured_where_they_lie(tmp_path: Path) -> None:
    _, here = run(tmp_path, 6, settings=TABLES)
    _, away = run(tmp_path, 6, settings=TABLES, mechanisms=["engram_ram"])
    for name in ("masters", "gradients", "tables_state"):
        predicted, value = values_of(here, name)
        assert predicted == value > 0
    assert "/ranks/0/memory/hosted @0" not in here["measured"]
    for name in ("masters", "gradients"):
        predicted, value = values_of(away, name)
        assert predicted == value < values_of(here, name)[1]
    predicted, value = values_of(away, "hosted")
    assert value == pytest.approx(predicted, rel=0.1)
    # The pool of offloaded buffers is the process's, and other tests have filled it.
    assert value - pool(torch.device("cpu")).bytes == 3 * values_of(here, "tables_state")[1] / 2
    assert here["final_loss"] == pytest.approx(away["final_loss"], rel=1e-5)
    assert away["absent"] == {}


def test_state_in_eight_bits_and_quantised_activations_are_measured_as_planned(tmp_path: Path) -> None:
    _, plain = run(tmp_path, 6)
    _, entry = run(tmp_path, 6, mechanisms=["act_ckpt", "optim_8bit", "muon_state_bf16"])
    for name in ("adamw_state", "muon_momentum"):
        predicted, value = values_of(entry, name)
        assert predicted == value < values_of(plain, name)[1]
    predicted, value = values_of(entry, "backward_peak")
    assert value == pytest.approx(predicted, rel=0.03) and value < values_of(plain, "backward_peak")[1]


def test_the_loss_scale_that_a_run_came_to_is_beside_the_one_it_began_with(tmp_path: Path) -> None:
    _, entry = run(tmp_path, 4, dtype=["fp16"], settings={"loss_scale": 4.0, "loss_scale_growth": 1})
    line = entry["measured"]["/workload/config/loss_scale"]
    assert (line["predicted"], line["value"]) == (4, 64)
    assert entry["measured"]["/ranks/0/dtype @0"]["value"] == "fp16"
    _, plain = run(tmp_path, 2)
    assert "/workload/config/loss_scale" not in {**plain["measured"], **plain["absent"]}


@pytest.mark.parametrize("mechanisms", [None, ["act_ckpt"], ["recompute"]])
def test_what_each_part_keeps_for_backward_is_measured_as_it_was_counted(
    tmp_path: Path, mechanisms: list[str] | None
) -> None:
    routed = {"layers": 3, "width": 32, "heads": 2, "experts": 4, "topk": 2, "expert_ffn": 16, **TABLES}
    sizes: dict[str, Any] = {"batch": 4, "seq": 64, "dtype": ["bf16"]}
    plan, entry = run(tmp_path, 4, model="tiny", settings=routed, mechanisms=mechanisms, **sizes)
    alive = "/ranks/0/memory/alive/"
    found = {label.removeprefix(alive): line for label, line in entry["measured"].items() if label.startswith(alive)}
    assert {name.split(" ")[0] for name in found} == plan["ranks"][0]["memory"]["alive"].keys() - {"backward_beyond"}
    assert {name: line["value"] for name, line in found.items()} == {n: line["predicted"] for n, line in found.items()}
