"""The training loop: one path for one rank and for many. What differs between them stands behind `executor.fleet`.

A step is launched whole before anything of it is read: whether it counts is decided on the device (``keep``), and where
it does not its updates change nothing. So the host runs ahead of a card, and a launched step could be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor.build import Optimizers
from executor.data import Reader
from executor.fleet import Agreed, Fleet, Forward, agreed
from executor.meter import Meter
from executor.models.moe import balanced
from executor.optim.muon import Muon
from executor.optim.schedule import factor
from executor.optim.tables import HostTables
from executor.parts import own
from executor.precision import compute_in
from executor.pulse import Pulse
from executor.reporter import Reporter
from executor.slices import DataSlice, WorkSlice
from executor.stopping import Stopping

Observe = Callable[[int, float, nn.Module], None]


class Stopped(Exception):
    """The run was asked to stop: every rank ends here, after the same step. Exit code 4."""


class RunFailed(Exception):
    """Every rank ends here, having agreed on it. The message names the rank, the step and the cause; exit code 4."""


@dataclass
class Progress:
    """How far a run came, kept outside the loop so that a failed run is recorded too. Steps are counted when done.

    ``overflows`` of the ``skipped`` steps are those that only lowered ``loss_scale`` (None: losses are not scaled).
    """

    steps: int = 0
    final_loss: float | None = None
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    compared: int = 0
    skipped: int = 0
    overflows: int = 0
    loss_scale: float | None = None


@dataclass
class Training:
    """The parts that the loop drives. ``model`` is the module itself, ``forward`` calls it (through DDP or not);
    ``keep`` keeps a checkpoint, on all ranks together, and gives the line that tells of it (None: none is kept)."""

    model: nn.Module
    forward: Forward
    optimizers: Optimizers
    fleet: Fleet
    reader: Reader
    meter: Meter
    reporter: Reporter
    dtype: str
    device: torch.device
    stopping: Stopping = field(default_factory=Stopping)
    keep: Callable[[Progress], str] | None = None
    pulse: Pulse = field(default_factory=Pulse)
    parameters: list[nn.Parameter] = field(init=False)
    _ahead: tuple[int, Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._balanced, self.parameters = balanced(self.model), list(self.model.parameters())

    def batch(self, data: DataSlice, step: int) -> tuple[Tensor, Tensor]:
        """This rank's windows of ``step``, on its device."""
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1:]
        pair = self.reader.batch(step, data.global_batch, data.offset, data.batch, data.seq)
        inputs, targets = (self._placed(part) for part in pair)
        return inputs, targets

    def _placed(self, part: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return part
        # From pinned memory, since a copy from any other holds the host up; not by `pin_memory`, which asks CUDA first.
        return torch.empty_like(part, pin_memory=True).copy_(part).to(self.device, non_blocking=True)

    def look_ahead(self, data: DataSlice, step: int) -> None:
        """Have what the host keeps of the model ready for ``step``, where it keeps any."""
        if isinstance(self.optimizers.tables, HostTables):
            self._ahead = step, *self.batch(data, step)
            self.optimizers.tables.prefetch(self._ahead[1])

    def gradients(self) -> list[Tensor]:
        """Every gradient that this rank holds, that of rows in host memory included."""
        tables = self.optimizers.tables
        leaves = tables.leaves() if isinstance(tables, HostTables) else []
        return [own(p.grad) for p in (*self.parameters, *leaves) if p.grad is not None]

    def balance(self, keep: Tensor) -> None:
        """Move every mixture's balance by what the fleet counted in a step; not where ``keep`` is False."""
        if self._balanced:
            counts = torch.cat([mixture.counts for mixture in self._balanced]).mul_(keep)
            parts = torch.split(self.fleet.total(counts), [len(mixture.counts) for mixture in self._balanced])
            for mixture, part in zip(self._balanced, parts, strict=True):
                mixture.balance_step(part)


def train(
    parts: Training, work: WorkSlice, data: DataSlice, progress: Progress, observe: Observe | None = None
) -> None:
    """Run every step of ``work`` from where ``progress`` is, and leave in it what came of them.

    Args:
        observe: told (step, the fleet's loss, the model) after each step.

    Raises:
        RunFailed: on every rank, where a step was not finite (and the plan says stop), or ranks' weights differ.
        Stopped: on every rank, after the step that was under way when one was asked to stop, and its checkpoint.
    """
    if parts.optimizers.scaler is not None and progress.steps == 0:
        parts.reporter.say(f"a rank computes in fp16: losses are scaled, at first by {work.config['loss_scale']:g}")
    for step in range(progress.steps, work.steps):
        last = step == work.steps - 1
        every = work.config["fingerprint_every"]
        with parts.pulse.at(f"step {step + 1}", "step", joint=parts.fleet.size > 1):
            found = _step(parts, work, data, step, progress)
            loss = found.loss
            if parts.fleet.size > 1 and (_due(step, every) or (last and every)):
                _compare(parts, step, progress)
            progress.steps, progress.final_loss = step + 1, loss if math.isfinite(loss) else progress.final_loss
            if observe is not None:
                observe(step, loss, parts.model)
        if last or _due(step, work.config["eval_every"]):
            _evaluate(parts, work, data, step, progress)
        if not last and (found.stop or _due(step, work.config.get("checkpoint_every", 0))):
            _keep(parts, progress)
        if not last and found.stop:
            parts.stopping.take()
            raise Stopped
    if progress.skipped == work.steps:
        parts.reporter.say(f"none of the {work.steps} steps was kept: the model is as it was at first")
    if progress.loss_scale is not None:
        parts.reporter.say(f"the loss scale is {progress.loss_scale:g}; {progress.overflows} steps overflowed")


def _due(step: int, every: int) -> bool:
    """Whether something done every ``every`` steps (0: never) is due after ``step``."""
    return every > 0 and (step + 1) % every == 0


def _keep(parts: Training, progress: Progress) -> None:
    """Keep a checkpoint. Raises RankFailed."""
    if parts.keep is not None:
        with parts.fleet.saving():
            kept = parts.keep(progress)
        parts.reporter.say(kept)
        parts.fleet.wait()  # the next step's exchange is timed from one start


def _step(parts: Training, work: WorkSlice, data: DataSlice, step: int, progress: Progress) -> Agreed:
    """One step; gives what the fleet agreed on of it. Raises RunFailed."""
    meter = parts.meter
    meter.begin(step)
    scale = factor(step, work.steps, work.config["warmup"], work.config["final_lr"])
    told = launch(parts, work, data, step, scale)
    meter.launched()
    *verdict, norm, loss_scale = told.tolist()  # the one thing that a step reads
    found = agreed(verdict)
    kept = not found.nonfinite and math.isfinite(norm)
    parts.optimizers.settle(kept)
    scaled = parts.optimizers.scaler is not None
    progress.loss_scale = loss_scale if scaled else None
    if not kept:
        meter.skipped()
        overflow = scaled and not found.nonfinite
        _skip(parts, work, step, progress, overflow, _not_finite(found.nonfinite, loss_scale if scaled else None))
        return found
    meter.end(parts.fleet.owners_bytes())
    parts.reporter.step(step, work.steps, found.loss, scale, meter.step_seconds(), data.global_tokens)
    return found


def launch(parts: Training, work: WorkSlice, data: DataSlice, step: int, scale: float) -> Tensor:
    """All of a step, read nowhere by the host. ``scale`` is the factor on the learning rates.

    Returns:
        [ranks + 4] float64 on the device: the fleet's verdict, the gradient's norm, the loss scale after the step.
    """
    fleet, scaler = parts.fleet, parts.optimizers.scaler
    inputs, targets = parts.batch(data, step)
    fleet.begin()
    fleet.clear(parts.parameters)
    with compute_in(parts.dtype, parts.device.type):
        loss = parts.forward(inputs, targets)
    if step + 1 < work.steps:
        parts.look_ahead(data, step + 1)
    verdict = fleet.announce(loss, parts.stopping.asked)
    weighted = fleet.weighted(loss)
    torch.autograd.backward(weighted if scaler is None else weighted * scaler.scale)
    parts.meter.backward_done()
    told, gradients = verdict(), parts.gradients()
    norm = fleet.norm(gradients)
    if scaler is not None:
        norm = norm / scaler.scale
    finite = (told[1:-1] == 0).all()
    keep = finite & torch.isfinite(norm)
    _shrink(gradients, norm, work.config["clip"], None if scaler is None else scaler.scale)
    _update(parts, work, scale, keep)
    parts.balance(keep)
    if scaler is not None:
        scaler.update(finite & ~keep)
    after = torch.ones_like(norm) if scaler is None else scaler.scale
    return torch.cat([told, torch.stack([norm, after]).to(told.dtype)])


def _shrink(gradients: list[Tensor], norm: Tensor, limit: float, scale: Tensor | None) -> None:
    """Divide ``gradients`` by the loss's ``scale``, and clip them to ``limit`` (0: none) by the ``norm`` that they then
    have: by the factor of torch.nn.utils.clip_grad_norm_, the same bits on every rank."""
    clip = (limit / (norm + 1e-6)).clamp_(max=1.0) if limit else torch.ones_like(norm)
    if limit or scale is not None:
        torch._foreach_mul_(gradients, clip if scale is None else clip / scale)


def _skip(parts: Training, work: WorkSlice, step: int, progress: Progress, overflow: bool, reason: str) -> None:
    """Count a step that changed nothing. Raises RunFailed where the plan says stop, or no loss scale is left to try."""
    exhausted = overflow and progress.loss_scale is not None and progress.loss_scale < 1
    if exhausted or (not overflow and work.config["nonfinite"] == "stop"):
        raise RunFailed(f"{reason} at step {step + 1}")
    progress.skipped += 1
    progress.overflows += overflow
    parts.reporter.skipped(step, reason)


def _not_finite(ranks: Sequence[int], loss_scale: float | None) -> str:
    """What was not finite, the same words on every rank; ``loss_scale`` is the one after the step."""
    if ranks:
        return f"rank {_listed(ranks)}: loss is not finite"
    if loss_scale is None:
        return "all ranks: the reduced gradient is not finite, though every rank's loss was"
    if loss_scale < 1:
        return "all ranks: the gradient overflows fp16 even with no loss scale (--dtype fp32 has the range)"
    return f"the gradient overflows at a loss scale of {2 * loss_scale:g}, which is now {loss_scale:g}"


def _update(parts: Training, work: WorkSlice, scale: float, keep: Tensor) -> None:
    """Compute the owned updates, send them, apply all."""
    config, optimizers = work.config, parts.optimizers
    if optimizers.muon is not None:
        _update_matrices(parts, optimizers.muon, config["muon_lr"] * scale, keep)
    optimizers.adamw.step(config["adamw_lr"] * scale, keep)
    if optimizers.tables is not None:
        optimizers.tables.step(config["adamw_lr"] * scale, keep)


def _update_matrices(parts: Training, muon: Muon, lr: float, keep: Tensor) -> None:
    """Muon's half, in a scope of its own: what was received is free before AdamW makes its temporaries."""
    updates = muon.updates(keep)
    if parts.fleet.size > 1:
        parts.meter.sending()
        updates = parts.fleet.share(updates)
        parts.meter.sent()
    muon.apply(updates, lr, keep)


def _compare(parts: Training, step: int, progress: Progress) -> None:
    """Compare the weights of all ranks. Raises RunFailed where they differ."""
    odd, first = parts.fleet.unlike(parts.model)
    progress.compared += 1
    if odd:
        follows = first in dict(parts.model.named_buffers())
        why = ", a buffer: one that follows each rank's own data, as BatchNorm's, trains on one rank only" * follows
        raise RunFailed(f"rank {_listed(odd)}: weights differ from rank 0's after step {step + 1}, first {first}{why}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _evaluate(parts: Training, work: WorkSlice, data: DataSlice, step: int, progress: Progress) -> None:
    """Held-out bits per byte on rank 0, while the others wait, since weights are the same on all; where they are
    sharded, all ranks compute the same together."""
    windows, shape = work.config["eval_windows"], (data.batch, data.seq)
    if parts.fleet.sharded:
        shape = data.least_batch, data.first_seq
    if parts.fleet.rank == 0 or parts.fleet.sharded:
        at = parts.pulse.at(f"the evaluation after step {step + 1}", "evaluation", joint=parts.fleet.sharded)
        with parts.fleet.evaluating(parts.model), at:
            bits = bits_per_byte(parts, windows, *shape)
        if parts.fleet.rank == 0:
            progress.evaluations.append((step + 1, bits))
            parts.reporter.evaluated(step + 1, bits)
    parts.fleet.wait()


@contextmanager
def looking_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While entered, ``model`` is in its mode of evaluation. Afterwards each module is in the mode that it was in, and
    random numbers go on as if nobody had looked: training is the same however often it is evaluated."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def bits_per_byte(parts: Training, windows: int, batch: int, seq: int) -> float:
    """Mean cross-entropy over the held-out windows, in bits a byte."""
    inputs, targets = parts.reader.held_out(windows, seq)
    total = 0.0
    with looking_on(parts.model, parts.device):
        for start in range(0, windows, batch):
            rows = slice(start, start + batch)
            part, wanted = inputs[rows].to(parts.device), targets[rows].to(parts.device)
            with compute_in(parts.dtype, parts.device.type):
                total += float(parts.model(part, wanted)) * len(part)
            parts.pulse.beat()
    return total / windows / math.log(2)
