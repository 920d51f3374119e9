"""The command line: which commands and options there are. What their texts mean is in `planner.request`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from planner import request
from planner.request import Usage
from planner.views.diff import FAIL_KINDS

COMMANDS = ("plan", "probe", "show", "diff", "verify")

_EPILOG = """\
commands:
  dormouse-plan [options] > plan.json     compile a plan (JSON on stdout, the summary on stderr)
  dormouse-plan probe                     the record of this machine alone
  dormouse-plan show PLAN                 a plan for a person
  dormouse-plan diff PLAN                 predicted against measured
  dormouse-plan diff OLD NEW              what changed, and which input caused it
  dormouse-plan verify PLAN               form, schema, seal and tally
Each has its own --help. Then: torchrun -m executor plan.json
exit codes: 0 done, 1 diff --fail-over, 2 wrong usage or unfaithful input, 3 refused"""


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one Usage instead of a printed usage and an exit."""

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message} (see {self.prog} --help)")


class Once(argparse.Action):
    """An option that may stand once: of two values one would be dropped unseen."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise Usage(f"{option} is given twice")
        setattr(namespace, self.dest, values)


def parser(command: str) -> Parser:
    """The parser of one of COMMANDS."""
    return {"plan": _plan, "probe": _probe, "show": _show, "diff": _diff, "verify": _verify}[command]()


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command that ``arguments`` begin with ("plan" when none), and the arguments that are left for it.

    Raises:
        Usage: they begin with a word that is no command.
    """
    if arguments and arguments[0] in COMMANDS[1:]:
        return arguments[0], list(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        word = arguments[0].encode("utf-8", "replace").decode("utf-8")
        known = ", ".join(COMMANDS[1:])
        raise Usage(f"there is no command {word!r}: one of {known}, or options alone to compile a plan (see --help)")
    return "plan", list(arguments)


def _made(command: str, what: str, epilog: str | None = None) -> Parser:
    prog = "dormouse-plan" if command == "plan" else f"dormouse-plan {command}"
    return Parser(
        prog=prog,
        description=what,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _plan() -> Parser:
    made = _made("plan", "Plan a training run for this machine and print the sealed plan on stdout.", _EPILOG)
    _devices(made)
    add = _adder(made)
    default = "default: tiny on a CPU, small on a card"
    add("--model", request.model, "WORKLOAD", f"a workload's name, or module:attribute ({default})")
    made.add_argument(
        "--set", type=request.setting, action="append", metavar="KEY=VALUE", help="the workload's own configuration"
    )
    add("--data", request.sources, "PATH[:WEIGHT][,...]", "what to train on (default: stdlib)")
    add("--batch", request.batch, "B", "sequences a rank before the split: the global batch is B x ranks")
    add("--seq", request.seq, "T", "length of a sequence in tokens")
    add("--steps", request.steps, "N", "optimizer steps")
    add("--seed", request.seed, "S", "0 to 2^32 - 1")
    add("--dtype", request.dtype, "DTYPE[,...]", "auto, bf16, fp16 or fp32, for all or one a rank")
    add("--capacity", request.capacity, "SPLIT", "auto, equal, or one a rank: B0,B1,... or B0xT0,B1xT1,...")
    add("--fit", request.fit, "N[,...]", "off, auto, or GB (10^9 bytes; GiB accepted) for all or one a rank")
    _choice(made, "--fit-policy", ("cheapest", "in-order"), "with --fit: how mechanisms are engaged until it fits")
    add("--mechanisms", request.mechanisms, "NAME[,...]", "memory mechanisms to engage whatever the budget")
    _choice(made, "--opt", ("muon", "adamw"), "optimizer of the matrices")
    _choice(made, "--shard", ("none", "fsdp"), "whether parameters are sharded over the ranks")
    _choice(made, "--reduce", request.DTYPES, "dtype of the gradient all-reduce")
    add("--calibrate", _paths, "PLAN[,...]", "measured plans whose newest finished runs this plan learns from")
    return made


# What only the optimizer of matrices reads.
_OF_MUON = ("muon_lr", "muon_momentum", "ns_dtype", "ns_steps")


def refuse_idle(asked: argparse.Namespace) -> None:
    """Raise Usage for an option of "plan" that would change nothing beside the others: what is asked has an effect."""
    if asked.fit_policy is not None and asked.fit in (None, "off"):
        beside = "" if asked.fit is None else " other than off"
        raise Usage(f"--fit-policy {asked.fit_policy} needs --fit{beside}: without a budget nothing is engaged")
    idle = [key for key, _ in asked.set or () if key in _OF_MUON]
    if asked.opt == "adamw" and idle:
        raise Usage(f"--set {idle[0]} needs --opt muon: under adamw no matrix has a Muon update")


def _probe() -> Parser:
    made = _made("probe", "Print the record of this machine, which `--devices RECORD.json` reads elsewhere.")
    _devices(made)
    return made


def _show() -> Parser:
    made = _made("show", "Show a plan for a person. Needs no device; a plan of any machine can be shown.")
    made.add_argument("plan", metavar="PLAN", help="the plan's file")
    return made


def _verify() -> Parser:
    made = _made("verify", "Check a plan's form, schema, seal, tally and runs. Needs no device.")
    made.add_argument("plan", metavar="PLAN", help="the plan's file")
    return made


def _diff() -> Parser:
    kinds = ", ".join(FAIL_KINDS)
    made = _made(
        "diff",
        "One PLAN: predicted against measured, by its newest run. OLD NEW: what changed, and which input caused it.",
        f"""\
--fail-over PERCENT judges every prediction; KIND=PERCENT those of one kind, and wins over a bare PERCENT. The kind is
the part of the plan that a pointer names: memory (/ranks/../memory), step (/ranks/../step and /step), exchange, fit,
and tokens (tokens per second, of a rank or of the fleet). KIND is one of {kinds}.
A measurable reading that was not measured fails too. Exit code 1.""",
    )
    made.add_argument("plan", metavar="PLAN", help="a plan, or the older of two")
    made.add_argument("new", metavar="NEW", nargs="?", help="the newer plan")
    add = _adder(made)
    add("--run", _run, "N", "which run, counted from 1 (default: the newest)")
    _choice(made, "--format", ("text", "markdown", "json"), "default: text")
    made.add_argument(
        "--fail-over", type=_limit, action="append", metavar="[KIND=]PERCENT", help="exit 1 when one misses by more"
    )
    return made


def _devices(made: Parser) -> None:
    _adder(made)(
        "--devices", request.devices, "DEVICES", "auto (default), cpu[:N], RECORD.json[,...], or CARD[xN][+CARD...]"
    )
    made.add_argument("--benchmark", action="store_true", help="time this machine instead of assuming its rates")


def _adder(made: Parser) -> Callable[[str, Callable[[str], Any], str, str], None]:
    def add(option: str, read: Callable[[str], Any], metavar: str, what: str) -> None:
        made.add_argument(option, type=read, action=Once, metavar=metavar, help=what)

    return add


def _choice(made: Parser, option: str, choices: Sequence[str], what: str) -> None:
    made.add_argument(option, choices=choices, action=Once, help=what)


def _paths(text: str) -> list[str]:
    paths = [path.strip() for path in text.split(",")]
    if not all(paths):
        raise Usage("--calibrate has an empty entry")
    if len(set(paths)) != len(paths):
        raise Usage("--calibrate names one plan twice")
    return paths


def _run(text: str) -> int:
    return request.whole(text, 1, 2**31, "--run")


def _limit(text: str) -> tuple[str | None, float]:
    """``PERCENT`` or ``KIND=PERCENT`` as (kind or None, percent)."""
    kind, equals, number = text.rpartition("=")
    if equals and kind not in FAIL_KINDS:
        raise Usage(f"--fail-over has the kind {kind!r}: one of {', '.join(FAIL_KINDS)}")
    try:
        percent = float(number)
    except ValueError:
        raise Usage(f"--fail-over has {number!r}: a number of percent, or KIND=PERCENT") from None
    if not 0 <= percent < float("inf"):
        raise Usage(f"--fail-over has {number!r}: the percentage is 0 or more")
    return kind or None, percent
