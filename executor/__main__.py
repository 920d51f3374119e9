"""The command ``torchrun -m executor PLAN``, or ``python -m executor PLAN``: load, honour, run, record.

Starts on the standard library alone, since a package of the working folder may stand before Dormouse's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HOME = Path(__file__).resolve().parent.parent
USAGE, REFUSED, FAILED = 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong usage or an unfaithful plan, 3 refused, 4 the run failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    shadow = _shadow()
    if shadow is not None:
        return _end(shadow, USAGE)
    from schemas.form import Unfaithful
    from schemas.store import load

    try:
        plan = load(options.plan)
    except Unfaithful as error:
        return _end(str(error), USAGE)
    from executor import launch

    ranks = sum(len(entry["members"]) for entry in plan["ranks"])
    if launch.is_due(ranks, os.environ):
        print(f"dormouse: starting the plan's {ranks} ranks", file=sys.stderr, flush=True)
        threads = max((entry["threads"]["chosen"] for entry in plan["ranks"] if "threads" in entry), default=None)
        return launch.start(ranks, threads, given, HOME)
    return _run(plan, options, ranks)


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
    return parser.parse_args(given)


def _shadow() -> str | None:
    """Why schemas or planner are not Dormouse's own; None when they are."""
    spec = importlib.util.find_spec("planner")
    found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if found is None or os.path.realpath(found) != os.path.realpath(HOME / "planner" / "__init__.py"):
        return f"{found} shadows Dormouse's own planner (in {HOME}): start from another folder, or rename it"
    from planner.origin import Shadowed, check

    try:
        check(("schemas", "planner", "executor"), HOME)
    except Shadowed as error:
        return str(error)
    return None


def _run(plan: dict[str, Any], options: argparse.Namespace, ranks: int) -> int:
    from executor import launch

    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) == ranks:
        from executor.slices import rank_slice

        own = rank_slice(plan, rank)
        launch.confine(own.device, own.kind)
    from executor.honour import BadRank
    from executor.run import Places, execute
    from planner.refusals import Refused

    digest = plan["seal"]["digest"]
    places = Places(
        record=Path(options.record or options.plan),
        run_dir=Path(options.run_dir or Path("runs", digest[:12])),
        data=tuple(Path(path) for text in options.data for path in text.split(",") if path),
    )
    _listen()
    try:
        done = execute(plan, places)
    except Refused as error:
        return launch.leave_code(rank, _end(error.text(), REFUSED), agreed=True)
    except BadRank as error:
        return launch.leave_code(rank, _end(str(error), USAGE), agreed=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run is over and recorded: only its message is left
    code = 0 if done.outcome == "finished" else FAILED
    if done.notice is not None:
        _end(done.notice, code)
    if code:
        _end(f"{done.outcome}: {done.reason}", code)
    elif rank == 0:
        _end(f"finished: recorded in {places.record}" if done.notice is None else "finished", code)
    return launch.leave_code(rank, code, done.agreed)


def _listen() -> None:
    """SIGTERM ends the run as Ctrl-C does: recorded. torchrun sends it to the ranks left over when one fails."""
    from executor.run import Terminated

    def end(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what follows is the recording
        raise Terminated

    signal.signal(signal.SIGTERM, end)


def _end(message: str, code: int) -> int:
    """Say it once for all ranks, and give the code."""
    if os.environ.get("RANK", "0") == "0":
        print(f"dormouse: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
