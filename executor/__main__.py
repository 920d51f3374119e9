"""The command ``torchrun -m executor PLAN``, or ``python -m executor PLAN``: load, honour, run, record.

Starts on the standard library alone, since a package of the working folder may stand before Dormouse's own; and without
the working folder, since any file in it (json.py, torch.py) would stand before the module that is meant.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

HERE, HOME_TEXT = os.path.realpath(os.getcwd()), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_FROM_HERE = not sys.flags.safe_path and os.path.realpath(sys.path[0] or HERE) == HERE != HOME_TEXT
if _FROM_HERE and __name__ == "__main__":
    del sys.path[0]

import argparse
import importlib.util
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from executor import launch, voice

if TYPE_CHECKING:
    from executor.run import Outcome, Places

HOME = Path(HOME_TEXT)
USAGE, REFUSED, FAILED = 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong usage or an unfaithful plan, 3 refused, 4 failed, stopped, or not recorded."""
    launch.attach()
    _listen()
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except (KeyboardInterrupt, launch.Terminated) as stop:
        return launch.leave_code(
            _rank(), _end(f"stopped: {launch.name_of(stop)} before the run began", FAILED), agreed=True
        )


def _main(given: list[str]) -> int:
    options = _options(given)
    shadow = _shadow()
    if shadow is not None:
        return _end(shadow, USAGE)
    from executor import early
    from planner.refusals.rules import Refused
    from schemas.form import Unfaithful
    from schemas.store import load, unrecordable_reason

    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    try:
        plan = load(options.plan)
        # Of several ranks one alone looks, later: they would look at the same place at the same time.
        unrecordable = unrecordable_reason(options.record or options.plan, plan) if alone else None
    except Unfaithful as error:
        return launch.leave_code(_rank(), _end(str(error), USAGE), agreed=True)
    ranks = sum(len(entry["members"]) for entry in plan["ranks"])
    due = launch.is_due(ranks, os.environ)
    found = ranks if due else int(os.environ.get("WORLD_SIZE", "1"))
    model = plan["workload"]["model"]
    if options.model not in (None, model):
        said = f"--model {options.model}: the plan is of the model {model}"
        return launch.leave_code(_rank(), _end(said, USAGE), agreed=True)
    strange = early.strange_code(plan, options.model)
    refusals = early.refusals(plan, found, options.plan, unrecordable, strange)
    if refusals:
        return launch.leave_code(_rank(), _end(Refused(refusals).text(), REFUSED), agreed=True)
    if due:
        voice.say(f"starting the plan's {ranks} ranks")
        threads = max((entry["threads"]["chosen"] for entry in plan["ranks"] if "threads" in entry), default=None)
        return launch.start(ranks, threads, given, HOME)
    return _run(plan, options)


def _options(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="executor", description="Run a plan exactly, or refuse it. Options choose places, never the work.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("plan", metavar="PLAN", help="the sealed plan")
    parser.add_argument("--record", metavar="PATH", help="the plan that the run is recorded in (default: PLAN)")
    parser.add_argument("--run-dir", metavar="DIR", help="metrics (default: runs/ and the seal's first 12 digits)")
    parser.add_argument(
        "--data", metavar="PATH", action="append", default=[],
        help="where the plan's data lies: one a source, in the plan's order (repeat, or separate by commas)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODULE:ATTRIBUTE", help="consent to import the model of your own that the plan names"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of the run's DIR")
    return parser.parse_args(given)


def _shadow() -> str | None:
    """Why schemas or planner are not Dormouse's own; None when they are."""
    found = _in_the_way("planner") or _in_the_way("schemas")
    if found is None:
        spec = importlib.util.find_spec("planner")
        first = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        own = first is not None and os.path.realpath(first) == os.path.realpath(HOME / "planner" / "__init__.py")
        found = None if own else (str(first), "planner")
    if found is not None:
        return f"{found[0]} shadows Dormouse's own {found[1]} (in {HOME}): start from another folder, or rename it"
    from planner.origin import Shadowed, check

    try:
        check(("schemas", "planner", "executor"), HOME)
    except Shadowed as error:
        return str(error)
    return None


def _in_the_way(name: str) -> tuple[str, str] | None:
    """(the file of the working folder that ``python -m`` would have taken for Dormouse's own ``name``, the name)."""
    places = (os.path.join(HERE, name, "__init__.py"), os.path.join(HERE, f"{name}.py"))
    return next(((place, name) for place in places if _FROM_HERE and os.path.isfile(place)), None)


def _run(plan: dict[str, Any], options: argparse.Namespace) -> int:
    """Run this process's rank, whose world is the plan's."""
    from executor.slices import rank_slice

    rank = _rank()
    own = rank_slice(plan, rank)
    launch.confine(own.device, own.kind, own.allocator)
    from executor.honour import BadRank
    from executor.run import Places, execute
    from planner.refusals.rules import Refused

    digest = plan["seal"]["digest"]
    places = Places(
        record=Path(options.record or options.plan),
        run_dir=Path(options.run_dir or Path("runs", digest[:12])),
        data=tuple(Path(path) for text in options.data for path in text.split(",") if path),
        resume=options.resume,
    )
    try:
        done = execute(plan, places, leave=lambda done: launch.vanish(_ended(done, places, rank)))
    except Refused as error:
        return launch.leave_code(rank, _end(error.text(), REFUSED), agreed=True)
    except BadRank as error:
        return launch.leave_code(rank, _end(str(error), USAGE), agreed=True)
    for number in launch.ending():  # the run is over and recorded: only its message is left
        signal.signal(number, signal.SIG_IGN)
    return _ended(done, places, rank)


def _ended(done: Outcome, places: Places, rank: int) -> int:
    """Tell how the run ended, once for all ranks, and give this rank's exit code."""
    code = FAILED if done.outcome != "finished" or done.notice is not None else 0
    if done.speaks:
        cause = done.outcome if done.reason is None else f"{done.outcome}: {done.reason}"
        recorded = f": recorded in {places.record}" if done.reason is None else ""
        _tell(f"{cause}{recorded}" if done.notice is None else f"{cause}, but the run {done.notice}")
        if done.newest is not None:
            voice.say(f"--resume goes on after step {done.newest}")
    return launch.leave_code(rank, code, done.agreed)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _listen() -> None:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: recorded. torchrun sends SIGTERM to the ranks left over when one
    fails."""

    def end(number: int, _: Any) -> NoReturn:
        for other in heard:  # once: what follows is the recording
            signal.signal(other, lambda *_: None)  # not SIG_IGN, which processes inherit that are started later
        launch.end_by(number)

    heard = launch.ending()
    for number in heard:
        signal.signal(number, end)


def _end(message: str, code: int) -> int:
    """Say it once for all ranks, and give the code."""
    if _rank() == 0:
        _tell(message)
    return code


def _tell(message: str) -> None:
    voice.say(message)
    launch.told()


if __name__ == "__main__":
    ended = main()
    if "torch" in sys.modules:
        launch.vanish(ended)
    sys.exit(ended)
