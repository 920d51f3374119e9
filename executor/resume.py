"""Checkpoints of a run, and going on from one: what comes after it is, bit for bit, what had come without the stop.

    RUN_DIR/checkpoints/LINE-STEP/model.safetensors      the model: parameters, buffers, tables in host memory
                                  optimizer.safetensors  what all ranks hold alike: AdamW, tables, the loss scale
                                  rank-R.safetensors     what rank R alone holds: its matrices' momentum, its
                                                         generators; its rows of all state where the model is sharded
                                  checkpoint.json        what it is; the rows and the digest of each file

LINE is the id of the run that began it; runs that go on from its checkpoints go on in its line. The position in the
data and the learning rate are functions of the step. Each rank writes its own file, since all are on one node: momentum
that lives on its owner alone needs no gathering and no memory. Only what is whole gets its name; an older checkpoint is
removed after that.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from executor import checkpoint
from executor.build import Optimizers
from executor.checkpoint import MODEL, BadCheckpoint
from executor.loop import Progress, RunFailed
from executor.meeting import Meeting
from executor.pulse import Pulse
from executor.stopping import Stopping
from schemas.form import Json

FOLDER, OPTIMIZER = "checkpoints", "optimizer.safetensors"
_NAME = re.compile(r"\w.*-\d{10}")
_FACTS = ("id", "line", "steps", "plan", "ranks", "progress")

Value = TypeVar("Value")


@dataclass
class Keeper:
    """Saves the ranks' parts of a run together: ``count`` checkpoints of the ``line`` are kept, with ``facts`` in each.

    ``sharded``: each rank holds its rows of the model and of its state. ``newest`` is the step of the newest whole one.
    """

    run_dir: Path
    line: str
    count: int
    rank: int
    meeting: Meeting
    stopping: Stopping
    model: nn.Module
    optimizers: Optimizers
    device: torch.device
    facts: Mapping[str, Json]
    sharded: bool = False
    newest: int | None = None
    pulse: Pulse = field(default_factory=Pulse)

    def save(self, progress: Progress) -> str:
        """Keep a checkpoint after so many steps, on all ranks or on none; gives the line that tells of it.

        Raises:
            RunFailed: on every rank, where one could not write its part; the checkpoint before it is whole still.
            RankFailed: a rank did not come.
        """
        name = f"{self.line}-{progress.steps:010}"
        folder = self.run_dir / FOLDER / name
        made = folder.with_name(f".{name}.new")
        try:
            self._together(progress, lambda: self._begin(made))
            rows = self._together(progress, lambda: self._write(made))
            files = {file: row for part in rows for file, row in part.items()}
            self._together(progress, lambda: self._complete(made, folder, progress, files))
        except RunFailed as error:
            if self.rank == 0:
                shutil.rmtree(made, ignore_errors=True)
            raise RunFailed(f"{error}: the checkpoint of step {progress.steps} could not be kept") from None
        self.newest = progress.steps
        return f"a checkpoint of step {progress.steps} is in {folder}"

    def _together(self, progress: Progress, job: Callable[[], Value]) -> list[Value]:
        """What ``job`` gives on each rank, however long it takes. Raises RunFailed on all where it failed on one."""
        value, fault = None, None
        try:
            with self.pulse.at(f"the checkpoint of step {progress.steps}"):
                value = job()
        except OSError as error:
            fault = f"rank {self.rank}: {error.strerror or error}"
        except BadCheckpoint as error:
            fault = f"rank {self.rank}: {error}"
        self.pulse.work = None
        found = self.meeting.gather({"value": value, "fault": fault}, math.inf, self.stopping.overdue)
        faults = [row["fault"] for row in found if row["fault"] is not None]
        if faults:
            raise RunFailed("; ".join(faults))
        return [row["value"] for row in found]

    def _begin(self, made: Path) -> None:
        if self.rank == 0:
            made.parent.mkdir(parents=True, exist_ok=True)
            for left in made.parent.glob(f".{self.line}-*"):  # by a run that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)
            made.mkdir()

    def _write(self, made: Path) -> dict[str, Json]:
        """Write this rank's files; gives their rows by name. The model comes first: ranks may write it together."""
        parts = {}
        if self.rank == 0:
            parts[MODEL] = checkpoint.tensors_of(self.model)
            parts[OPTIMIZER] = _flat(_shared_state(self.optimizers, self.sharded))
        elif self.sharded:
            tensors = checkpoint.tensors_of(self.model)
            with self.pulse.waiting():
                checkpoint.accompany(tensors)
        parts[_file_of(self.rank)] = _flat(_own_state(self.optimizers, self.device, self.sharded))
        return {file: checkpoint.write(made / file, tensors, self.pulse.beat) for file, tensors in parts.items()}

    def _complete(self, made: Path, folder: Path, progress: Progress, files: Mapping[str, Json]) -> None:
        if self.rank != 0:
            return
        facts = {**self.facts, "line": self.line, "steps": progress.steps, "progress": _written(progress)}
        checkpoint.complete(made, folder, facts, files, self.pulse.beat)
        kept = sorted(path for path in folder.parent.glob(f"{self.line}-*") if path != folder)
        for old in kept[: len(kept) - (self.count - 1)]:
            aside = old.with_name(f".{old.name}.old")  # what has its name is whole
            old.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            self.pulse.beat()


def newest(run_dir: Path) -> dict[str, Json]:
    """Of the run in ``run_dir`` the newest whole checkpoint, every byte of it proved, as a fact for the refusals.

    Returns:
        ``at``: the folder of the checkpoints; ``passed``: why newer ones are not whole; ``chosen``: None, or its
        ``name``, ``id`` of the run that saved it, ``line``, ``steps``, ``plan`` (the seal) and number of ``ranks``.
    """
    passed: list[str] = []
    for folder in reversed(_found(run_dir)):
        try:
            document = _proved(folder)
        except BadCheckpoint as error:
            passed.append(str(error))
            continue
        chosen = {key: document[key] for key in ("id", "line", "steps", "plan", "ranks")}
        return {"at": str(run_dir / FOLDER), "passed": passed, "chosen": {"name": folder.name, **chosen}}
    return {"at": str(run_dir / FOLDER), "passed": passed, "chosen": None}


def room(run_dir: Path, line: str | None) -> dict[str, Json]:
    """Where checkpoints of the run in ``run_dir`` would lie, the bytes free there, and those that checkpoints of
    ``line`` hold already, as a fact for the refusals."""
    at = run_dir / FOLDER
    held = [path for folder in _found(run_dir) if folder.name.rpartition("-")[0] == line for path in folder.iterdir()]
    return {"at": str(at), "free": checkpoint.free_bytes(at), "held": sum(path.stat().st_size for path in held)}


def lying(run_dir: Path) -> str | None:
    """The name of the newest checkpoint in ``run_dir``, whole or not."""
    found = _found(run_dir)
    return found[-1].name if found else None


def _found(run_dir: Path) -> list[Path]:
    """In order of their lines' beginnings, then of steps."""
    at = run_dir / FOLDER
    return sorted(path for path in at.iterdir() if _NAME.fullmatch(path.name)) if at.is_dir() else []


def _proved(folder: Path) -> dict[str, Json]:
    """The document of a checkpoint whose files are all there and what was saved. Raises BadCheckpoint."""
    document = checkpoint.read_facts(folder)
    if any(key not in document for key in _FACTS) or not isinstance(document["ranks"], int):
        raise BadCheckpoint(f"{folder}: is not a checkpoint of a run")
    for file in (MODEL, OPTIMIZER, *map(_file_of, range(document["ranks"]))):
        checkpoint.prove(folder, document, file)
    return document


def restore(
    folder: Path, rank: int, model: nn.Module, optimizers: Optimizers, device: torch.device, sharded: bool = False
) -> Progress:
    """Put the checkpoint in ``folder`` into ``rank``'s model, optimizers and generators, in place; of a ``sharded``
    model, this rank's rows.

    Raises:
        BadCheckpoint: it is of other work, or was changed.
    """
    document = checkpoint.read_facts(folder)
    checkpoint.read_into(folder, document, MODEL, checkpoint.tensors_of(model))
    shared = _read(folder, document, OPTIMIZER, _shared_state(optimizers, sharded))
    own = _read(folder, document, _file_of(rank), _own_state(optimizers, device, sharded))
    for part, optimizer in _parts(optimizers).items():
        optimizer.load_state_dict({**shared, **own}[part])
    torch.set_rng_state(own["random"]["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(own["random"]["cuda"], device)
    return _progress(document["progress"])


def _read(folder: Path, document: Mapping[str, Json], file: str, state: dict[str, Any]) -> dict[str, Any]:
    tensors = _flat(state)
    checkpoint.read_into(folder, document, file, tensors)
    found: dict[str, Any] = _nested(state, tensors)
    return found


def _file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _parts(optimizers: Optimizers) -> dict[str, Any]:
    parts = {name: getattr(optimizers, name) for name in ("muon", "adamw", "tables", "scaler")}
    return {name: part for name, part in parts.items() if part is not None}


def _shared_state(optimizers: Optimizers, sharded: bool) -> dict[str, Any]:
    """State that every rank holds, the same bits on each."""
    return {name: part.state_dict() for name, part in _parts(optimizers).items() if name not in _apart(sharded)}


def _apart(sharded: bool) -> tuple[str, ...]:
    """The optimizers of whose state each rank holds its own."""
    return ("muon", "adamw", "tables") if sharded else ("muon",)


def _own_state(optimizers: Optimizers, device: torch.device, sharded: bool) -> dict[str, Any]:
    """State that this rank alone holds. A model may draw random numbers (dropout), each rank its own."""
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    parts = _parts(optimizers)
    return {"random": random} | {name: parts[name].state_dict() for name in _apart(sharded) if name in parts}


def _flat(state: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts and lists by their path, themselves and no copies; a count becomes one."""
    if isinstance(state, Tensor):
        return {name: state}
    if isinstance(state, int):
        return {name: torch.tensor(state)}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {path: tensor for key, item in items for path, tensor in _flat(item, f"{name}/{key}".strip("/")).items()}


def _nested(state: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """``tensors`` by their path in the form of ``state``."""
    if isinstance(state, Tensor):
        return tensors[name]
    if isinstance(state, int):
        return int(tensors[name])
    if isinstance(state, dict):
        return {key: _nested(item, tensors, f"{name}/{key}".strip("/")) for key, item in state.items()}
    return [_nested(item, tensors, f"{name}/{place}".strip("/")) for place, item in enumerate(state)]


def _written(progress: Progress) -> dict[str, Json]:
    """With every bit of its numbers: a document keeps six digits of a float."""
    return {
        "final_loss": _exact(progress.final_loss),
        "evaluations": [[step, _exact(bits)] for step, bits in progress.evaluations],
        "compared": progress.compared,
        "skipped": progress.skipped,
        "overflows": progress.overflows,
        "loss_scale": _exact(progress.loss_scale),
        "steps": progress.steps,
    }


def _exact(number: float | None) -> str | None:
    return None if number is None else float(number).hex()


def _number(text: str | None) -> float | None:
    return None if text is None else float.fromhex(text)


def _progress(saved: Mapping[str, Json]) -> Progress:
    return Progress(
        steps=saved["steps"],
        final_loss=_number(saved["final_loss"]),
        evaluations=[(step, float.fromhex(bits)) for step, bits in saved["evaluations"]],
        compared=saved["compared"],
        skipped=saved["skipped"],
        overflows=saved["overflows"],
        loss_scale=_number(saved["loss_scale"]),
    )
