"""The training loop: one path for one rank and for many. What differs between them stands behind `executor.fleet`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor.build import Optimizers
from executor.data import Reader
from executor.fleet import Agreed, Fleet, Forward
from executor.meter import Meter
from executor.optim.muon import Muon
from executor.optim.schedule import factor
from executor.precision import compute_in
from executor.reporter import Reporter
from executor.slices import DataSlice, WorkSlice

Observe = Callable[[int, float, nn.Module], None]


class RunFailed(Exception):
    """Every rank ends here, having agreed on it. The message names the rank, the step and the cause; exit code 4."""


@dataclass
class Progress:
    """How far a run came, kept outside the loop so that a failed run is recorded too. Steps are counted when done."""

    steps: int = 0
    final_loss: float | None = None
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    compared: int = 0
    skipped: int = 0


@dataclass
class Training:
    """The parts that the loop drives. ``model`` is the module itself, ``forward`` calls it (through DDP or not)."""

    model: nn.Module
    forward: Forward
    optimizers: Optimizers
    fleet: Fleet
    reader: Reader
    meter: Meter
    reporter: Reporter
    dtype: str
    device: torch.device


def train(
    parts: Training, work: WorkSlice, data: DataSlice, progress: Progress, observe: Observe | None = None
) -> None:
    """Run every step of ``work``, and leave what came of them in ``progress``.

    Args:
        observe: told (step, the fleet's loss, the model) after each step.

    Raises:
        RunFailed: on every rank, where a step was not finite (and the plan says stop), or ranks' weights differ.
    """
    for step in range(work.steps):
        loss = _step(parts, work, data, step, progress)
        last = step == work.steps - 1
        every = work.config["fingerprint_every"]
        if parts.fleet.size > 1 and (_due(step, every) or (last and every)):
            _compare(parts, step, progress)
        progress.steps, progress.final_loss = step + 1, loss if math.isfinite(loss) else progress.final_loss
        if observe is not None:
            observe(step, loss, parts.model)
        if last or _due(step, work.config["eval_every"]):
            _evaluate(parts, work, data, step, progress)


def _due(step: int, every: int) -> bool:
    """Whether something done every ``every`` steps (0: never) is due after ``step``."""
    return every > 0 and (step + 1) % every == 0


def _step(parts: Training, work: WorkSlice, data: DataSlice, step: int, progress: Progress) -> float:
    """One step; gives the fleet's loss. Raises RunFailed."""
    meter, fleet = parts.meter, parts.fleet
    meter.begin(step)
    inputs, targets = _batch(parts, data, step)
    fleet.begin()
    parts.model.zero_grad(set_to_none=False)
    with compute_in(parts.dtype, parts.device.type):
        loss = parts.forward(inputs, targets)
    verdict = fleet.announce(loss)
    torch.autograd.backward(fleet.weighted(loss))
    meter.backward_done()
    agreed = verdict()
    gradients = [p.grad for p in parts.model.parameters() if p.grad is not None]
    norm = fleet.norm(gradients)
    bad = _not_finite(agreed, norm)
    if bad is not None:
        meter.skipped()
        if work.config["nonfinite"] == "stop":
            raise RunFailed(f"{bad} at step {step + 1}")
        progress.skipped += 1
        parts.reporter.skipped(step, bad)
        return agreed.loss
    scale = factor(step, work.steps, work.config["warmup"], work.config["final_lr"])
    _update(parts, work, norm, scale)
    meter.end(fleet.owners_bytes())
    parts.reporter.step(step, work.steps, agreed.loss, scale, meter.step_seconds(), data.global_tokens)
    return agreed.loss


def _batch(parts: Training, data: DataSlice, step: int) -> tuple[Tensor, Tensor]:
    """This rank's windows of ``step``, on its device."""
    inputs, targets = parts.reader.batch(step, data.global_batch, data.offset, data.batch, data.seq)
    return inputs.to(parts.device), targets.to(parts.device)


def _not_finite(agreed: Agreed, norm: Tensor) -> str | None:
    """What was not finite, the same words on every rank; None when all was."""
    if agreed.nonfinite:
        return f"rank {_listed(agreed.nonfinite)}: loss is not finite"
    if not math.isfinite(float(norm)):
        return "all ranks: the reduced gradient is not finite, though every rank's loss was"
    return None


def _update(parts: Training, work: WorkSlice, norm: Tensor, scale: float) -> None:
    """Clip, compute the owned updates, send them, apply all."""
    config = work.config
    if config["clip"]:
        torch.nn.utils.clip_grads_with_norm_(parts.model.parameters(), config["clip"], norm)
    if parts.optimizers.muon is not None:
        _update_matrices(parts, parts.optimizers.muon, config["muon_lr"] * scale)
    parts.optimizers.adamw.step(config["adamw_lr"] * scale)


def _update_matrices(parts: Training, muon: Muon, lr: float) -> None:
    """Muon's half, in a scope of its own: what was received is free before AdamW makes its temporaries."""
    updates = muon.updates()
    if parts.fleet.size > 1:
        parts.meter.sending()
        updates = parts.fleet.share(updates)
        parts.meter.sent()
    muon.apply(updates, lr)


def _compare(parts: Training, step: int, progress: Progress) -> None:
    """Compare the weights of all ranks. Raises RunFailed where they differ."""
    found = parts.fleet.fingerprints(parts.model)
    progress.compared += 1
    odd = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if odd:
        raise RunFailed(f"rank {_listed(odd)}: weights differ from rank 0's after step {step + 1}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _evaluate(parts: Training, work: WorkSlice, data: DataSlice, step: int, progress: Progress) -> None:
    """Held-out bits per byte on rank 0, while the others wait; weights are the same on all."""
    if parts.fleet.rank == 0:
        bits = bits_per_byte(parts, work.config["eval_windows"], data.batch, data.seq)
        progress.evaluations.append((step + 1, bits))
        parts.reporter.evaluated(step + 1, bits)
    parts.fleet.wait()


@torch.no_grad()
def bits_per_byte(parts: Training, windows: int, batch: int, seq: int) -> float:
    """Mean cross-entropy over the held-out windows, in bits a byte."""
    inputs, targets = parts.reader.held_out(windows, seq)
    total = 0.0
    for start in range(0, windows, batch):
        rows = slice(start, start + batch)
        part, wanted = inputs[rows].to(parts.device), targets[rows].to(parts.device)
        with compute_in(parts.dtype, parts.device.type):
            total += float(parts.model(part, wanted)) * len(part)
    return total / windows / math.log(2)
