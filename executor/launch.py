"""Starting ranks: as many processes as the plan has ranks, through torch's own launcher. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = "DORMOUSE_RELAUNCHED"
OUTCOME = "DORMOUSE_OUTCOME"

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
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    if all(os.path.realpath(entry) != os.path.realpath(home) for entry in path):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), environ.get("PYTHONPATH"))))
    return kept


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """What starts the ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "-m", "executor", *arguments]


def start(ranks: int, threads: int | None, arguments: Sequence[str], home: Path) -> int:
    """Start the ranks in this process's stead, or under it, and give their exit code.

    Under torchrun this process becomes the launcher. Else it waits for one: torchrun turns every code into 1, so the
    ranks leave theirs in a folder (`leave_code`).
    """
    environ = environment(os.environ, threads, home)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.execve(sys.executable, command(ranks, arguments), environ)
    with tempfile.TemporaryDirectory(prefix="dormouse-") as folder:
        return _wait(command(ranks, arguments), {**environ, OUTCOME: folder}, Path(folder))


def _wait(words: Sequence[str], environ: Mapping[str, str], folder: Path) -> int:
    with subprocess.Popen(words, env=environ) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            returned = process.wait()
        except KeyboardInterrupt:  # the terminal sent it to the ranks too: let them end
            returned = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    codes = [int(path.read_text()) for path in sorted(folder.glob("rank-*"))]
    if codes:
        return codes[0] if codes[0] else max(codes)
    return 4 if returned else 0


def leave_code(rank: int, code: int, agreed: bool) -> int:
    """Leave this rank's exit code for the process that waits, and give the code to exit with.

    Where all ranks agreed on the end, none fails in torchrun's eyes, so its own report does not bury the message.
    """
    folder = os.environ.get(OUTCOME)
    if folder is None:
        return code
    Path(folder, f"rank-{rank:06}").write_text(str(code))
    return 0 if agreed else code


def confine(device: str, kind: str) -> None:
    """Let this process see its own card alone, before torch or any kernel library looks. CPU ranks see none."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda-") if kind == "cuda" else ""
