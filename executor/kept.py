"""What is kept of a run: its checkpoints, those that it goes on from, and the trained model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from executor import checkpoint, resume
from executor.build import BadPlace
from executor.loop import Progress
from executor.slices import WorkSlice
from executor.state import Built, Given, Made, Places
from planner.door import BadWorkload
from schemas.form import Json


def wants_model(work: WorkSlice) -> bool:
    """Whether the trained model is to be left. A plan from before there was the choice always leaves it."""
    return bool(work.config.get("keep_model", "final") == "final")


def keeps_model(given: Given) -> bool:
    """Whether this rank leaves the trained model."""
    return given.rank.rank == 0 and wants_model(given.work)


def require_room(run_dir: Path, work: WorkSlice, model: nn.Module) -> None:
    """Raises BadPlace or BadWorkload where the trained model could not be kept: better now than after the run."""
    try:
        reason = checkpoint.no_room_reason(run_dir, model)
    except checkpoint.BadCheckpoint as error:
        raise BadWorkload(f"the plan's model {work.model}: {error}") from None
    if reason is not None:
        raise BadPlace(f"--run-dir {run_dir}: {reason}")


def lying(places: Places, work: WorkSlice) -> dict[str, Json]:
    """What lies in the run's folder: a checkpoint to go on from, where that is asked for, and the room for those to
    come, where any are planned."""
    found = resume.newest(places.run_dir) if places.resume else None
    line = found["chosen"]["line"] if found is not None and found["chosen"] is not None else None
    room = resume.room(places.run_dir, line) if work.config.get("checkpoint_every", 0) else None
    return {"resume": found, "room": room}


def go_on(given: Given, made: Made, built: Built) -> tuple[resume.Keeper, Progress]:
    """From the checkpoint that rank 0 chose, where one was asked for; gives what keeps those to come, and how far the
    run is."""
    found = made.rows[0]["resume"]
    chosen = None if found is None else found["chosen"]
    line, steps = (made.name, None) if chosen is None else (chosen["line"], chosen["steps"])
    rank, run_dir = given.rank, given.places.run_dir
    keeper = resume.Keeper(
        run_dir, line, given.work.config.get("keep_checkpoints", 2), rank.rank, given.meeting, given.stopping,
        made.model, built.optimizers, built.device, {**_facts(given, made), "ranks": rank.size}, given.sharded, steps,
        made.pulse,
    )  # fmt: skip
    if chosen is None:
        there = resume.lying(run_dir) if rank.rank == 0 else None
        if there is not None:
            made.reporter.say(f"starting anew; --resume would go on from {there}")
        return keeper, made.progress
    folder = run_dir / resume.FOLDER / chosen["name"]
    for passed in found["passed"]:
        made.reporter.say(f"passing over a checkpoint that is not whole: {passed}")
    made.reporter.say(f"going on after step {chosen['steps']} from {folder}")
    return keeper, resume.restore(folder, rank.rank, made.model, built.optimizers, built.device, given.sharded)


def keep_together(given: Given, made: Made) -> str | None:
    """Leave a model that ranks share, while all that hold parts of it are there; why it could not be left."""
    if keeps_model(given):
        return keep_model(given, made)
    if wants_model(given.work):
        with made.pulse.at("the trained model's tensors"):
            tensors = checkpoint.tensors_of(made.model)
        checkpoint.accompany(tensors)
    return None


def keep_model(given: Given, made: Made) -> str | None:
    """Leave the trained model in the run's folder; why it could not be, where it could not."""
    folder = given.places.run_dir / checkpoint.FINAL
    try:
        with made.pulse.at("the trained model's file"):
            facts = {**_facts(given, made), "steps": made.progress.steps}
            checkpoint.save(folder, made.model, facts, made.pulse.beat)
    except Exception as error:  # told with the outcome: whatever it is, the run must still be recorded
        return f"left no model in {folder} ({type(error).__name__}: {error})"
    made.reporter.say(f"the model is in {folder}")
    return None


def _facts(given: Given, made: Made) -> dict[str, Json]:
    """What a checkpoint says of its model, its plan and its run."""
    return {
        "model": given.work.model,
        "opt": given.work.opt,
        "seed": given.work.seed,
        "config": dict(given.work.config),
        "kernels": dict(given.rank.kernels),
        "dtype": given.rank.dtype,
        "plan": given.plan["seal"]["digest"],
        "id": made.name,
        "data": made.rows[0]["data"],
    }
