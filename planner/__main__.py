"""The command ``dormouse-plan``: compile, probe, show, diff, verify.

Exit codes: 0 done, 1 ``diff --fail-over``, 2 wrong usage or unfaithful input, 3 refused. Everything is imported when it
is needed: what only reads a plan must answer at once, and nothing of Dormouse may be imported before `origin.check`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from planner import origin

DONE, FAILED_OVER, UNUSABLE, REFUSED = 0, 1, 2, 3
_SIGINT, _SIGPIPE = 128 + 2, 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one message on stderr, never a traceback."""
    if sys.stdout is None or sys.stderr is None:
        return UNUSABLE  # started with one of them closed: there is nowhere to speak
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a plan may hold what this terminal cannot show
    try:
        origin.check(("schemas", "executor"), Path(__file__).resolve().parent.parent)
        code = _command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except origin.Shadowed as error:
        return _said(str(error))
    except BrokenPipeError:
        _abandon_stdout()  # the reader went away, as head does
        return _SIGPIPE
    except OSError as error:
        _abandon_stdout()
        return _said(str(error))
    except KeyboardInterrupt:
        return _said("stopped", _SIGINT)
    return code


def _abandon_stdout() -> None:
    """Let what is still buffered go nowhere: Python would complain once more while closing stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(message: str, code: int = UNUSABLE) -> int:
    shown = (mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in message)
    print(f"dormouse-plan: {''.join(shown)}", file=sys.stderr)  # a document's words must not steer the terminal
    return code


def _command(arguments: list[str]) -> int:
    from planner import options
    from planner.request import Usage
    from schemas.form import Unfaithful

    commands: dict[str, Callable[[Namespace], int]] = {
        "plan": _plan,
        "probe": _probe,
        "show": _show,
        "diff": _diff,
        "verify": _verify,
    }
    try:
        command, rest = options.split(arguments)
        return commands[command](options.parser(command).parse_args(rest))
    except (Usage, Unfaithful) as error:
        return _said(str(error))


def _plan(asked: Namespace) -> int:
    from planner import accounts, data, options, request
    from planner.machine import probe
    from planner.passes.compile import compile_plan
    from planner.refusals.rules import Refused
    from planner.views.page import Page
    from planner.views.summary import summarise
    from schemas.form import render

    options.refuse_idle(asked)
    settings = request.settings(asked.set or ())
    record = probe.record(asked.devices or "auto", timed=asked.benchmark, say=_note)
    wanted = request.compose(
        vars(asked), data.describe(asked.data), _source(asked.devices, record), _calibration(asked.calibrate)
    )
    kinds = {device["kind"] for device in record["devices"].values()}
    model = asked.model or _default_model(record)
    lengths = request.lengths(wanted)
    account = accounts.account(model, settings, asked.opt or "muon", kinds=sorted(kinds), lengths=lengths, say=_note)
    try:
        plan = compile_plan(wanted, record, account)
    except Refused as refusal:
        print(refusal.text(), file=sys.stderr)
        return REFUSED
    _print(render(plan))
    summarise(plan, Page(sys.stderr))
    return DONE


def _default_model(record: Any) -> str:
    """tiny on CPU ranks, small on cards."""
    kinds = {device["kind"] for device in record["devices"].values()}
    return "small" if kinds == {"cuda"} else "tiny"


def _source(devices: Any, record: Any) -> str:
    """How the request names the fleet: a record by its seal, never by the path it was read from."""
    if isinstance(devices, list):
        return f"record:{record['seal']['digest'][:12]}"
    return devices or "auto"


def _calibration(paths: Sequence[str] | None) -> list[dict[str, Any]]:
    """What the measured plans at ``paths`` teach, as rows of the request."""
    from planner.passes.calibration import rows
    from schemas.store import load

    return [row for path in paths or () for row in rows(load(path), path)]


def _note(message: str) -> None:
    print(f"dormouse-plan: note: {message}", file=sys.stderr)


def _print(document: bytes) -> None:
    """The document on stdout, in one go: a refused command prints nothing there."""
    sys.stdout.flush()
    sys.stdout.buffer.write(document)
    sys.stdout.buffer.flush()


def _probe(asked: Namespace) -> int:
    from planner.machine import probe
    from schemas.form import render

    _print(render(probe.record(asked.devices or "auto", timed=asked.benchmark, beyond=True, say=_note)))
    return DONE


def _show(asked: Namespace) -> int:
    from planner.views.page import Page
    from planner.views.show import show
    from schemas.store import load

    show(load(asked.plan), Page(sys.stdout))
    return DONE


def _verify(asked: Namespace) -> int:
    from planner.views.words import clean, plural
    from schemas.store import load

    plan = load(asked.plan)
    runs = plural(len(plan["runs"]), "run")
    print(f"{clean(asked.plan)}: faithful; seal {plan['seal']['digest'][:12]}, {runs}")
    return DONE


def _diff(asked: Namespace) -> int:
    from planner.request import Usage
    from planner.views import changes, diff
    from planner.views.diff_render import as_json, as_markdown, as_text
    from planner.views.page import Page
    from schemas.store import load

    limits = asked.fail_over or ()
    if asked.new is None:
        document = diff.measured(load(asked.plan), asked.run, limits)
    elif limits or asked.run is not None:
        raise Usage("--fail-over and --run judge the runs of one PLAN, not two plans")
    else:
        document = changes.changed(load(asked.plan), load(asked.new))
    if asked.format == "json":
        _print(as_json(document))
    elif asked.format == "markdown":
        sys.stdout.write(as_markdown(document))
    else:
        as_text(document, Page(sys.stdout))
    return FAILED_OVER if document.get("failures") else DONE


if __name__ == "__main__":
    sys.exit(main())
