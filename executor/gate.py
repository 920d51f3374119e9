"""The command ``torchrun --standalone --nproc_per_node=N -m executor.gate``, or ``python -m executor.gate`` which
starts the ranks itself: whether several ranks do here what one process does. An owner of several cards runs it first.

Exit codes: 0 all held, 2 wrong usage, 3 refused (no plan for what was asked), 4 something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from executor import launch, voice
from executor.gates import Lost
from planner.origin import Shadowed, check
from schemas.form import Json

if TYPE_CHECKING:
    from executor.gates.checks import Check, Gates
    from executor.gates.plans import Asked
    from executor.meeting import Meeting

HOME = Path(__file__).resolve().parent.parent
MODES = ("all", "losses", "identity", "gradref", "nan", "refusals")
USAGE, REFUSED, FAILED = 2, 3, 4

_WORD_SECONDS = 3.0  # a rank that fails leaves word of it before it goes


class _Ended(Exception):
    """The gate ends on every rank with a code and one message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them, and give the exit code."""
    launch.attach()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check(("schemas", "planner", "executor"), HOME)
        asked = _asked(options)
        if world == 1:
            return _start(asked, given)
        return _leave(_rank(asked, options))
    except Shadowed as error:
        return _leave(_said(str(error), USAGE))
    except _Ended as end:
        return _leave(_said(str(end), end.code))
    except (KeyboardInterrupt, launch.Terminated) as stop:
        name = launch.name_of(stop)
        return _leave(_said(f"stopped: {name}", FAILED))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="executor.gate", description="Check that several ranks do here what one process does.", allow_abbrev=False
    )
    parser.add_argument("--mode", choices=MODES, default="all", help="which gates (default: all)")
    parser.add_argument("--steps", default="20", help="steps of a run (default: 20)")
    parser.add_argument("--batch", default="3", help="sequences a rank (default: 3)")
    parser.add_argument("--capacity", metavar="B0,B1,...", help="what each rank reads in the unequal runs, as 4,2")
    parser.add_argument("--opt", choices=("muon", "adamw"), default="muon")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32, which has the tightest bounds"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--shard", choices=("none", "fsdp"), default="none")
    parser.add_argument("--out", metavar="DIR", type=Path, help="takes rank0.json, rank1.json, ...: all that was seen")
    parser.add_argument("--report-link", action="store_true", help="reckon and time the link between the ranks too")
    return parser


def _asked(options: argparse.Namespace) -> Asked:
    from executor.gates.plans import Asked
    from planner import request

    try:
        shapes = None if options.capacity is None else request.capacity(options.capacity)
        if isinstance(shapes, str):
            raise request.Usage(f"--capacity is {shapes}: one B or BxT a rank, as in 4,2")
        batch = request.whole(options.batch, 2 if shapes is None else 1, 4096, "--batch")
        steps = request.whole(options.steps, 2, 10**6, "--steps")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
    except request.Usage as error:
        raise _Ended(USAGE, str(error)) from None
    except OSError as error:
        raise _Ended(USAGE, f"--out {options.out}: {error.strerror}") from None
    return Asked(steps, batch, shapes, options.opt, options.dtype, options.device, options.shard)


def _start(asked: Asked, given: Sequence[str]) -> int:
    """Start a rank for each card, or for each entry of --capacity, or two on the CPU."""
    if launch.GUARD in os.environ:
        raise _Ended(USAGE, "the gate is of several ranks: torchrun --standalone --nproc_per_node=2 -m executor.gate")
    from executor.gates.plans import visible_cards

    ranks = len(asked.capacity) if asked.capacity else max(2, visible_cards(asked.device))
    if ranks == 1:
        raise _Ended(USAGE, "--capacity names one rank, and the gate is of several: as in 4,2")
    return launch.start(ranks, 1, given, HOME, "executor.gate")


def _rank(asked: Asked, options: argparse.Namespace) -> int:
    """This rank's part. Every rank comes to the same code, or to the same _Ended."""
    # A run's store lives in its first rank: where that one dies, torch warns by a page at each look into it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.distributed_c10d import PrefixStore

    from executor.meeting import Meeting, RankFailed, meet

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise _Ended(USAGE, "the gate is of one machine's ranks: several machines have no gate yet (multi-node)")
    _, store = meet(rank, world)
    meeting = Meeting(rank, world, PrefixStore("gate", store))
    # Each run of the gate has a store of its own, which its first rank holds.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    _listen()
    try:
        code = _gate(asked, options, meeting)
    except (RankFailed, Lost) as error:
        meeting.end()
        message = str(error) if isinstance(error, Lost) else f"failed: {error}"
        return _told(message, FAILED) if meeting.speaks(_WORD_SECONDS) else FAILED
    except _Ended:
        meeting.leave()
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
        meeting.fail(cause)
        traceback.print_exc()
        return _told(f"failed: rank {rank}: {cause}", FAILED)
    meeting.leave()
    return code


def _listen() -> None:
    """SIGTERM, which torchrun sends to the ranks left over when one is gone, ends a run as Ctrl-C does: told."""

    def end(number: int, _: Any) -> NoReturn:
        for other in heard:  # once: what follows is the telling
            signal.signal(other, lambda *_: None)
        launch.end_by(number)

    heard = launch.ending()
    for number in heard:
        signal.signal(number, end)


def _gate(asked: Asked, options: argparse.Namespace, meeting: Meeting) -> int:
    with tempfile.TemporaryDirectory(prefix="dormouse-gate-") as own:
        shared = meeting.gather(_prepared(asked, options, meeting.size, Path(own)) if meeting.rank == 0 else None)[0]
        if "message" in shared:
            raise _Ended(shared["code"], shared["message"])
        gates, checks = _checked(shared, options, meeting)
        meeting.gather(None)  # until then the others read in the first rank's folder
    if options.out is not None:
        _keep(options.out, meeting, gates, checks, shared["link"])
    if meeting.rank == 0:
        print(_verdict(checks, meeting.size), flush=True)
        launch.told()
    return FAILED if any(check.passed is False for check in checks) else 0


def _prepared(asked: Asked, options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Json]:
    """All that the first rank finds out for the others before any of them takes a card: plans, what was refused, the
    link; or how the gate ends."""
    from executor.gates import plans, wire
    from planner.refusals.rules import Refused
    from planner.request import Usage

    try:
        if asked.capacity is not None and len(asked.capacity) != ranks:
            raise Usage(f"--capacity names {len(asked.capacity)} ranks, and {ranks} were started")
        here = plans.machine(asked.device, ranks)
        maker = plans.Maker(asked, here, plans.corpus(folder), _note)
        made = maker.named(options.mode)
        refused = maker.refusals() if options.mode in ("all", "refusals") else []
    except Usage as error:
        return {"code": USAGE, "message": str(error)}
    except Refused as error:
        return {"code": REFUSED, "message": error.text()}
    link = None
    if options.report_link or here.cards:  # a broken path between cards would hold up every run
        wanted = (wire.WHOLE if options.report_link else wire.BRIEF) if here.cards else wire.OF_CPUS
        link = wire.timed(here.cards, ranks, wire.largest(here.record, wanted))
    return {"kind": here.kind, "folder": str(folder), "plans": made, "refused": refused, "link": link}


def _checked(shared: Mapping[str, Json], options: argparse.Namespace, meeting: Meeting) -> tuple[Gates, list[Check]]:
    """Every check, told as it is done; where the link fails, it alone."""
    from executor.slices import rank_slice

    plan = shared["plans"]["equal"]
    own = rank_slice(plan, meeting.rank)
    launch.confine(own.device, own.kind, own.allocator)
    from executor.gates import link
    from executor.gates.bench import Bench
    from executor.gates.checks import Gates
    from executor.gates.plans import TEXT

    folder, lines = Path(shared["folder"]), _Lines(meeting)
    gates = Gates(Bench(meeting, folder, folder / TEXT), shared["plans"], shared["refused"], options.dtype, own.kind)
    lines.say(f"gate: {meeting.size} ranks on {_devices(plan)}, {options.dtype}, {options.opt}")
    if options.report_link:
        for line in link.report(plan, shared["link"]):
            lines.say(line)
    if shared["link"] is not None and not lines.add(link.check(shared["link"])):
        return gates, lines.checks
    for each in gates.of(options.mode):
        lines.add(each)
    return gates, lines.checks


class _Lines:
    """The table, which the first rank prints a line at a time."""

    def __init__(self, meeting: Meeting) -> None:
        self._prints = meeting.rank == 0
        self.checks: list[Check] = []

    def say(self, line: str) -> None:
        if self._prints:
            print(line, flush=True)

    def add(self, check: Check) -> bool:
        """Whether it passed."""
        self.checks.append(check)
        self.say(_line(check))
        return bool(check.passed)


def _line(check: Check) -> str:
    verdict = {True: "pass", False: "FAIL", None: "   -"}[check.passed]
    bound = "" if check.bound is None or check.bound == 0 else f" (bound {check.bound:g})"
    return f"{verdict}  {check.mode:<9} {check.name:<58} {check.found}{bound}"


def _verdict(checks: Sequence[Check], ranks: int) -> str:
    failed = [check for check in checks if check.passed is False]
    tried = sum(check.passed is not None for check in checks)
    if not failed:
        return f"gate: {tried} of {tried} held on {ranks} ranks"
    return (
        f"gate: {len(failed)} of {tried} FAILED on {ranks} ranks, in {', '.join({check.mode: 0 for check in failed})}"
    )


def _devices(plan: Mapping[str, Json]) -> str:
    names = [f"{len(item['ids'])} x {item['name']['value']}" for item in plan["fleet"]["devices"].values()]
    return " and ".join(names)


def _keep(folder: Path, meeting: Meeting, gates: Gates, checks: Sequence[Check], link: Json) -> None:
    """What this rank saw, as rankN.json in ``folder``."""
    seen = {
        "rank": meeting.rank,
        "world": meeting.size,
        "checks": [asdict(check) for check in checks],
        "runs": {name: run.row() for name, run in gates.runs.items()},
        "link": link,
    }
    (folder / f"rank{meeting.rank}.json").write_text(json.dumps(_finite(seen), indent=1) + "\n", encoding="utf-8")


def _finite(item: Any) -> Any:
    """``item`` as strict JSON: a number that is not finite is null."""
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and item - item != 0 else item


def _note(message: str) -> None:
    voice.say(f"note: {message}")


def _said(message: str, code: int) -> int:
    """Say it once for all ranks, and give the code."""
    return _told(message, code) if os.environ.get("RANK", "0") == "0" else code


def _told(message: str, code: int) -> int:
    voice.say(message)
    launch.told()
    return code


def _leave(code: int) -> int:
    return launch.leave_code(int(os.environ.get("RANK", "0")), code, agreed=True)


if __name__ == "__main__":
    ended = main()
    if "torch" in sys.modules:
        launch.vanish(ended)
    sys.exit(ended)
