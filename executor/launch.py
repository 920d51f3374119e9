"""Starting ranks: as many processes as the plan has ranks, through torch's own launcher. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

from executor import voice

GUARD = "DORMOUSE_RELAUNCHED"
OUTCOME = "DORMOUSE_OUTCOME"

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"

_EAR, _LAUNCHER, _TOLD = "stderr", "launcher", "told"  # in the folder that OUTCOME names
_DRAIN_SECONDS = 5.0


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run: the last comes when the terminal is closed or the connection to it breaks."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP came, as the message says: from the user, or from torchrun to the ranks that are left when one
    fails."""


def ending() -> list[signal.Signals]:
    """Those of ENDS that end this process; nohup has it not hear of the terminal's end."""
    return [number for number in ENDS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def end_by(number: int) -> NoReturn:
    """Raise what stands for the signal."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(signal.Signals(number).name)


def name_of(stop: BaseException) -> str:
    """The signal that ``stop``, of `end_by`, stands for."""
    return str(stop) if isinstance(stop, Terminated) else "SIGINT"


_OWN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
}  # fmt: skip
_OWN_PREFIXES = ("TORCHELASTIC_", "PET_")


def is_due(ranks: int, environ: Mapping[str, str]) -> bool:
    """Whether this process stands for a plan of ``ranks`` and should start them: it is alone, and no child of ours."""
    return ranks > 1 and int(environ.get("WORLD_SIZE", "1")) == 1 and GUARD not in environ


def environment(environ: Mapping[str, str], threads: int | None, home: Path) -> dict[str, str]:
    """``environ`` for the ranks: without what another launcher left, and with no module taken from the working folder.

    ``home`` is where Dormouse lies; it is named only where the import path without the working folder would miss it.
    """
    kept = {name: text for name, text in environ.items() if name not in _OWN and not name.startswith(_OWN_PREFIXES)}
    kept |= {GUARD: "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(threads or 1)}
    # Else torchrun warns that it ends the other ranks before these have told the cause.
    kept.setdefault("TORCH_LOGS", "-torch.distributed.elastic")
    here = os.path.realpath(os.getcwd())
    path = [place for place in map(os.path.realpath, sys.path) if place != here]
    if os.path.realpath(home) not in path:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), environ.get("PYTHONPATH"))))
    return kept


def command(ranks: int, arguments: Sequence[str], module: str = "executor") -> list[str]:
    """What starts the ranks of ``module``."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "-m", module, *arguments]


def start(ranks: int, threads: int | None, arguments: Sequence[str], home: Path, module: str = "executor") -> int:
    """Start the ranks in this process's stead, or under it, and give their exit code.

    Under torchrun this process becomes the launcher. Else it waits for one: torchrun turns every code into 1, so the
    ranks leave theirs in a folder (`leave_code`).
    """
    environ = environment(os.environ, threads, home)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.execve(sys.executable, command(ranks, arguments, module), environ)
    with tempfile.TemporaryDirectory(prefix="dormouse-") as folder:
        return _wait(command(ranks, arguments, module), {**environ, OUTCOME: folder}, Path(folder))


def _wait(words: Sequence[str], environ: Mapping[str, str], folder: Path) -> int:
    """Run the launcher and give the ranks' code. The ranks speak on our stderr through a pipe in ``folder``; what the
    launcher itself says (a traceback whenever a rank ends with a code, a signal included) is shown only where no rank
    told how the run ended."""
    with (
        _hearing(folder),
        (folder / _LAUNCHER).open("wb") as log,
        subprocess.Popen(words, env=environ, stderr=log) as process,
    ):
        returned, stopped = _patiently(process)
    codes = [int(path.read_text()) for path in sorted(folder.glob("rank-*"))]
    code = (codes[0] or max(codes)) if codes else 4 * bool(returned)
    if code and not (folder / _TOLD).exists():
        text = (folder / _LAUNCHER).read_text("utf-8", "replace")
        voice.say(f"stopped: {stopped} before the run began" if stopped else _unexplained(text))
    return code


def _patiently(process: subprocess.Popen[bytes]) -> tuple[int, str | None]:
    """Wait for the launcher, whatever signals come; gives its code, and the name of the first signal.

    The terminal's Ctrl-C reaches the launcher and the ranks too; any other is passed on, once, as SIGTERM.
    """
    came: list[signal.Signals] = []

    def hear(number: int, _: Any) -> None:
        if number != signal.SIGINT and number not in came:
            process.terminate()
        came.append(signal.Signals(number))

    before = {number: signal.signal(number, hear) for number in ending()}
    try:
        return process.wait(), came[0].name if came else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _hearing(folder: Path) -> Iterator[None]:
    """Pass on what the ranks write into the pipe, to the last line. Where our stderr is closed it is read all the same:
    no rank is held up or ended by that."""
    pipe = folder / _EAR
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    held = os.open(pipe, os.O_WRONLY)  # the pipe ends when we let go of it, not between two ranks
    os.set_blocking(reading, True)
    thread = Thread(target=_pass_on, args=(reading,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(held)
        thread.join(_DRAIN_SECONDS)


def _pass_on(reading: int) -> None:
    heard = True
    while data := os.read(reading, 2**16):
        try:
            while heard and data:
                data = data[os.write(2, data) :]
        except OSError:
            heard = False


def _unexplained(text: str) -> str:
    return "failed: the ranks ended and told no cause" + (f"; their launcher says:\n{text}" if text else "")


def attach() -> None:
    """In a rank: speak through the pipe of the process that waits, where one does."""
    folder = os.environ.get(OUTCOME)
    if folder is None:
        return
    try:
        pipe = os.open(Path(folder, _EAR), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no one reads any more
        return
    os.set_blocking(pipe, True)
    os.dup2(pipe, 2)
    os.close(pipe)


def told() -> None:
    """Leave word for the process that waits that how the run ended was told."""
    folder = os.environ.get(OUTCOME)
    if folder is not None:
        Path(folder, _TOLD).touch()


def vanish(code: int) -> NoReturn:
    """End this process at once: all is recorded and told, and torch's own teardown can crash after a failure."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_code(rank: int, code: int, agreed: bool) -> int:
    """Leave this rank's exit code for the process that waits, and give the code to exit with.

    Where all ranks agreed on the end, none fails in torchrun's eyes, so its own report does not bury the message.
    """
    folder = os.environ.get(OUTCOME)
    if folder is None:
        return code
    Path(folder, f"rank-{rank:06}").write_text(str(code))
    return 0 if agreed else code


def confine(device: str, kind: str, allocator: str = "none") -> None:
    """Let this process see its own card alone, before torch or any kernel library looks. CPU ranks see none. Its memory
    grows as ``allocator`` says ("none": as torch has it): torch reads that once, when it begins.

    A card of the catalogue has no identity: the rank takes the visible card of its place, and the facts say whether
    that one is no less capable. A card that tells no UUID is named by its place.
    """
    from planner.door import ALLOCATORS  # not before it is known that this is Dormouse's own planner
    from planner.machine.visible import named

    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if allocator in ALLOCATORS:
        os.environ[ALLOCATOR_VARIABLE] = ALLOCATORS[allocator]
    if kind != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif device.startswith("card-"):
        place = int(os.environ.get("LOCAL_RANK", "0"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(place)] if visible is None else visible.split(",")[place : place + 1]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = named(device)
