"""Which architectures the installed torch holds machine code for, without importing it.

torch's Python library holds the list as one constant, which ``torch.cuda.get_arch_list`` splits; reading that constant
from the file takes milliseconds where importing torch takes seconds. Where it is not found, torch is asked after all.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

from schemas.document import reading, unknown
from schemas.form import Json

LIBRARIES = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")
DEADLINE_SECONDS = 60.0
_NAME = rb"(?:sm|compute)_[0-9]+[a-z]?"
_FLAGS = re.compile(rb"%s(?: %s)*" % (_NAME, _NAME))
_LONGEST = 400  # bytes of the constant, many times today's


def read(folder: Path | None, cuda: str | None) -> dict[str, Json]:
    """The architectures, as compute capabilities ("8.6"), that the torch in ``folder``, built for ``cuda``, holds."""
    if folder is None or cuda is None:
        return unknown("", "torch is not installed" if folder is None else "this torch is a CPU build")
    flags = constant(folder)
    why = "the list of machine code in torch's library"
    if flags is None:
        flags, why = _asked(), "torch, asked in a process of its own: its library holds no such list"
    if flags is None:
        return unknown("", "neither torch's library nor torch itself tells its architectures")
    held = capabilities(flags, "sm")
    if not held:
        return unknown("", f"torch tells architectures of no known form: {flags[:60]!r}")
    later = capabilities(flags, "compute")
    return reading(held, "", "probed", why + (f"; and PTX of {', '.join(later)}, for newer cards" if later else ""))


def capabilities(flags: str, kind: str) -> list[str]:
    """Compute capabilities of ``kind`` in ``flags`` ("sm_80 sm_90a compute_120"): "sm" machine code, "compute" PTX."""
    found = re.findall(rf"\b{kind}_([0-9]+)([0-9])[a-z]?\b", flags)
    return list(dict.fromkeys(f"{major}.{minor}" for major, minor in found))


def constant(folder: Path) -> str | None:
    """The constant in torch's library below ``folder``; None when it is not there, or not there once."""
    for name in LIBRARIES:
        path = folder / "lib" / name
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
                found = constants(held)
            return found.pop() if len(found) == 1 else None
    return None


def constants(held: mmap.mmap) -> set[str]:
    """Every whole text in ``held`` that lists two architectures or more; one alone may be anything."""
    found: set[str] = set()
    place = held.find(b"\0sm_")
    while place >= 0:
        text = held[place + 1 : place + 1 + _LONGEST].partition(b"\0")[0]
        if b" " in text and _FLAGS.fullmatch(text):
            found.add(text.decode("ascii"))
        place = held.find(b"\0sm_", place + 1)
    return found


def _asked() -> str | None:
    """What torch answers; no card is looked at. None when it cannot be imported, or not in time."""
    code = "import torch; print(torch._C._cuda_getArchFlags() or '')"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
