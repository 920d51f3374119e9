"""Every measured quantity, one entry each: its pointer into the plan, its unit, its statistic, and how it is taken.

Nothing here reckons what should be; what is predicted is only copied beside what was seen.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from torch import nn
from torch.cuda.memory import host_memory_stats

from executor.build import Optimizers
from executor.kernels import tuned
from executor.kernels.offload import pool
from executor.meter import Samples, quantile_range
from executor.parts import own
from executor.peaks import Peaks, storage_bytes
from executor.slices import DataSlice, RankSlice
from executor.trial import Trial
from schemas.document import is_reading, resolve, walk
from schemas.form import Json, six

_NO_STEP = "the run ended before a step of the measuring window was done"
_ALONE = "one rank exchanges nothing"


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its run. ``state`` is what `state_bytes` gives, ``ran`` the smoke launch's row, ``trial``
    that of the link (None: there is none)."""

    rank: RankSlice
    data: DataSlice
    samples: Samples
    clock: str
    peaks: Peaks
    state: Mapping[str, float]
    ran: Mapping[str, Json]
    trial: Trial | None = None


@dataclass(frozen=True)
class Taken:
    """A value with its samples and instrument, or (value None) why there is none."""

    value: Json
    samples: int = 0
    instrument: str = ""
    reason: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quantity:
    """``pointer`` is below a rank's entry, or, where ``across`` makes one value of all ranks', from the plan's root."""

    pointer: str
    unit: str
    statistic: str
    take: Callable[[Seen], Taken]
    across: Callable[[Sequence[float]], float] | None = None


def _seconds(part: str) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        value = seen.samples.median(part)
        if value is None:
            return Taken(None, reason=_NO_STEP)
        return Taken(value, seen.samples.count, seen.clock, spread=seen.samples.spread(part))

    return take


def _rate(tokens: Callable[[DataSlice], int]) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        value = seen.samples.median("total")
        if value is None:
            return Taken(None, reason=_NO_STEP)
        return Taken(tokens(seen.data) / value, seen.samples.count, seen.clock)

    return take


def _state(component: str) -> Callable[[Seen], Taken]:
    return lambda seen: Taken(seen.state[component], 1, "storages of live tensors")


def _hosted(component: str, instrument: str) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        if seen.rank.kind == "cpu" and component == "pinned":
            return Taken(None, reason="nothing is pinned for a CPU")
        return Taken(seen.state[component], 1, instrument)

    return take


def _loss_scale(seen: Seen) -> Taken:
    if "loss_scale" not in seen.state:
        return Taken(None, reason="no rank computes in fp16, so no loss is scaled")
    return Taken(seen.state["loss_scale"], 1, "the scaler's own, after the last step")


def _peak(read: Callable[[Peaks], int]) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        peaks = seen.peaks
        if peaks.absent is not None or peaks.samples == 0:
            return Taken(None, reason=peaks.absent or _NO_STEP)
        return Taken(read(peaks), peaks.samples, peaks.instrument)

    return take


def _reserved(seen: Seen) -> Taken:
    if seen.peaks.reserved is None:
        return Taken(None, reason="a CPU's allocator reserves nothing" if seen.rank.kind == "cpu" else _NO_STEP)
    return Taken(seen.peaks.reserved, seen.peaks.samples, seen.peaks.instrument)


def _host(seen: Seen) -> Taken:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there and KiB elsewhere
    return Taken(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 1, "getrusage")


def _exchanged(read: Callable[[Samples], float | None], instrument: str) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        if seen.rank.size == 1:
            return Taken(None, reason=_ALONE)
        value = read(seen.samples)
        if value is None:
            return Taken(None, reason=_NO_STEP)
        return Taken(value, seen.samples.count, instrument or seen.clock)

    return take


def _reduced(seen: Seen) -> Taken:
    taken = _exchanged(lambda samples: median(samples.reduced) if samples.reduced else None, "")(seen)
    return taken if taken.value is None else replace(taken, spread=quantile_range(seen.samples.reduced))


def _hidden(seen: Seen) -> Taken:
    taken = _exchanged(lambda samples: median(samples.hidden) if samples.hidden else None, "")(seen)
    return taken if taken.value is None else replace(taken, spread=quantile_range(seen.samples.hidden))


def _tried(read: Callable[[Trial], float]) -> Callable[[Seen], Taken]:
    def take(seen: Seen) -> Taken:
        trial = seen.trial
        if trial is None:
            return Taken(None, reason=_ALONE)
        return Taken(read(trial), len(trial.seconds), f"{seen.clock}, {trial.bytes} B before the first step")

    return take


def _reduce_dtype(seen: Seen) -> Taken:
    exchanged = seen.samples.exchanged
    if exchanged is None:
        return Taken(None, reason=_ALONE if seen.rank.size == 1 else _NO_STEP)
    return Taken(",".join(sorted(exchanged.dtypes)), seen.samples.count, "counted at the hook")


def _payload(samples: Samples) -> float | None:
    return None if samples.exchanged is None else samples.exchanged.bytes


def _buckets(samples: Samples) -> float | None:
    return None if samples.exchanged is None else samples.exchanged.buckets


def _gathered(samples: Samples) -> float | None:
    return None if samples.exchanged is None else samples.exchanged.gathered


def _dtype(seen: Seen) -> Taken:
    return Taken(seen.ran.get("dtype"), 1, "dispatch of the smoke launch", "the smoke launch did not come so far")


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("memory/masters", "B", "last", _state("masters")),
    Quantity("memory/gradients", "B", "last", _state("gradients")),
    Quantity("memory/muon_momentum", "B", "last", _state("muon_momentum")),
    Quantity("memory/adamw_state", "B", "last", _state("adamw_state")),
    Quantity("memory/tables_state", "B", "last", _state("tables_state")),
    Quantity("memory/model_buffers", "B", "last", _state("model_buffers")),
    Quantity("memory/hosted", "B", "last", _hosted("hosted", "storages of host tables, what is pinned")),
    Quantity("memory/pinned", "B", "max", _hosted("pinned", "torch's pinned allocator, buffers of what is offloaded")),
    Quantity("memory/backward_peak", "B", "max", _peak(lambda peaks: peaks.backward)),
    Quantity("memory/optimizer_peak", "B", "max", _peak(lambda peaks: peaks.optimizer)),
    Quantity("memory/peak", "B", "max", _peak(lambda peaks: max(peaks.backward, peaks.optimizer))),
    Quantity("memory/reserved", "B", "max", _reserved),
    Quantity("memory/host", "B", "max", _host),
    Quantity("step/compute", "s", "median", _seconds("compute")),
    Quantity("step/exchange", "s", "median", _seconds("exchange")),
    Quantity("step/optimizer", "s", "median", _seconds("optimizer")),
    Quantity("step/owners", "s", "median", _seconds("owners")),
    Quantity("step/total", "s", "median", _seconds("total")),
    Quantity("step/tokens_per_second", "tokens/s", "median", _rate(lambda data: data.tokens)),
    Quantity("dtype", "", "all", _dtype),
    Quantity("/workload/config/loss_scale", "", "last", _loss_scale, max),
    Quantity("/step/seconds", "s", "median", _seconds("total"), max),
    Quantity("/step/tokens_per_second", "tokens/s", "median", _rate(lambda data: data.global_tokens), min),
    Quantity("/exchange/payload", "B", "last", _exchanged(_payload, "counted at the hook"), max),
    Quantity("/exchange/gathered", "B", "last", _exchanged(_gathered, "counted at the hook"), max),
    Quantity("/exchange/buckets", "", "last", _exchanged(_buckets, "counted at the hook"), max),
    # Of all ranks the least: a rank that reaches its bucket early also waits for the others, and that is no transfer.
    Quantity("/exchange/seconds", "s", "median", _reduced, min),
    # A rank that waits for a slower one hides less of it: of all ranks the most is what backward leaves room for.
    Quantity("/exchange/hidden", "", "median", _hidden, max),
    Quantity("/exchange/reduce_dtype", "", "all", _reduce_dtype, max),
    Quantity("/exchange/alone_seconds", "s", "median", _tried(lambda trial: median(trial.seconds)), max),
    Quantity("/exchange/bus_rate", "B/s", "median", _tried(lambda trial: trial.rate), min),
    Quantity("/exchange/owners_payload", "B", "last", _exchanged(lambda s: s.owners_bytes, "counted at the hook"), max),
)


def state_bytes(model: nn.Module, optimizers: Optimizers) -> dict[str, float]:
    """Bytes by component, of the storages that live now on the device and in host memory; and the loss's scale, where
    it is scaled."""
    masters = [own(parameter) for parameter in model.parameters()]
    gradients = [own(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    found: dict[str, float] = {"masters": storage_bytes(masters), "gradients": storage_bytes(gradients)}
    found["model_buffers"] = storage_bytes(list(model.buffers()))
    found |= {component: storage_bytes(tensors) for component, tensors in optimizers.state().items()}
    device = masters[0].device
    tables = {} if optimizers.tables is None else optimizers.tables.state_bytes()
    found["hosted"] = pool(device).bytes + tables.get("tables_host", 0)
    if device.type == "cuda":
        pinned = host_memory_stats().get("allocated_bytes.peak", 0)
        found["pinned"] = pool(device).bytes + pinned
        found["hosted"] += pinned
    if optimizers.scaler is not None:
        found["loss_scale"] = float(optimizers.scaler.scale)
    return found


def of_rank(seen: Seen) -> dict[str, Json]:
    """What this rank measured, as plain JSON for the meeting: rows by label, ``{"value", "samples", ...}``."""
    rank, rows = seen.rank, {}
    for quantity in QUANTITIES:
        label = quantity.pointer if quantity.across else f"/ranks/{rank.entry}/{quantity.pointer} @{rank.rank}"
        rows[label] = _row(quantity.take(seen), quantity.unit, quantity.statistic)
    for name, choice in seen.ran.get("kernels", {}).items():
        taken = Taken(choice, 1, "calls counted in the smoke launch")
        rows[f"/ranks/{rank.entry}/kernels/{name} @{rank.rank}"] = _row(taken, "", "all")
    for name, nbytes in seen.ran.get("kept", {}).items():
        taken = Taken(nbytes, 1, "storages that lie there after the smoke launch's forward")
        rows[f"/ranks/{rank.entry}/memory/alive/{name} @{rank.rank}"] = _row(taken, "B", "last")
    for name, match in tuned.used.items():
        taken = Taken(match, 1, "the folder that the kernels read")
        rows[f"/ranks/{rank.entry}/tuned/{name} @{rank.rank}"] = _row(taken, "", "all")
    return rows


def _row(taken: Taken, unit: str, statistic: str) -> dict[str, Json]:
    value = six(taken.value) if isinstance(taken.value, float) else taken.value
    row = {"value": value, "unit": unit, "statistic": statistic, "samples": taken.samples}
    if taken.spread is not None:
        row["spread"] = [six(end) for end in taken.spread]
    return {**row, "instrument": taken.instrument, "reason": taken.reason}


def lines(plan: Mapping[str, Json], ranks: Mapping[int, Mapping[str, Json]], missing: str) -> tuple[Json, Json]:
    """(measured, absent) of a run entry, from the rows of the ranks that gave theirs (``missing``: why others did not).

    Each measured line holds what the plan predicted, copied. Every reading that the plan flags measurable is in one of
    the two.
    """
    rows = _one_a_label(list(ranks.values()))
    measured, absent = {}, {}
    for label, row in rows.items():
        item = _planned(plan, label)
        if item is None:
            continue
        if row["value"] is None:
            absent[label] = row["reason"]
            continue
        ends = {end: item[end] for end in ("low", "high") if end in item}
        predicted = item["value"] if is_reading(item) else item["chosen"]
        rest = {key: value for key, value in row.items() if key != "reason"}
        measured[label] = {"predicted": predicted, **ends, **rest}
    for label, rank in _measurable(plan):
        if label not in measured and label not in absent:
            gone = rank is not None and rank not in ranks
            absent[label] = missing if gone else "this executor has no instrument for it"
    flagged = {label for label, _ in _measurable(plan)}
    return measured, {label: reason for label, reason in absent.items() if label in flagged}


def _one_a_label(ranks: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Rows by label; those that every rank has become one by the quantity's ``across``."""
    across = {quantity.pointer: quantity.across for quantity in QUANTITIES if quantity.across}
    rows: dict[str, Json] = {}
    for label in dict.fromkeys(label for rank in ranks for label in rank):
        found = [rank[label] for rank in ranks if label in rank]
        known = [row for row in found if row["value"] is not None]
        rows[label] = known[0] if known else found[0]
        if label in across and known:
            chosen = across[label]([row["value"] for row in known])
            rows[label] = next(row for row in known if row["value"] == chosen)
    return rows


def _planned(plan: Mapping[str, Json], label: str) -> Json:
    try:
        return resolve(plan, label.split(" @")[0])
    except KeyError:
        return None


def _measurable(plan: Mapping[str, Json]) -> Iterator[tuple[str, int | None]]:
    """(label, rank) of every reading flagged measurable; rank None for one of the fleet."""
    for pointer, item in walk(plan):
        if not item.get("measurable"):
            continue
        if not pointer.startswith("/ranks/"):
            yield pointer, None
            continue
        for rank in plan["ranks"][int(pointer.split("/")[2])]["members"]:
            yield f"{pointer} @{rank}", rank
