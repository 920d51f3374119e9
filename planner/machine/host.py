"""What the node around the devices is: memory and cores within this process's limits, NUMA, pinned memory, platform.

``root`` stands before every path, so that another machine's files can be read in a test.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from planner.machine import cpu
from schemas.document import reading, unknown
from schemas.form import Json

_ROOT = Path("/")
_PLATFORMS = {"win32": "windows"}


def node(root: Path = _ROOT, affinity: int | None = None) -> dict[str, Json]:
    """The node's readings."""
    return {
        "cores": cpu.cores(root, affinity),
        "memory_total": cpu.memory_total(root),
        "memory_free": cpu.memory_free(root),
        "pinned_limit": pinned_limit(root),
        "numa_nodes": numa_nodes(root),
        "platform": platform(root),
    }


def pinned_limit(root: Path = _ROOT) -> dict[str, Json]:
    """Bytes of memory that may be pinned for a card. No system says so: the reasons why not are the reading.

    NVIDIA's driver pins pages itself, and RLIMIT_MEMLOCK (``ulimit -l``) counts those of mlock alone; what a cgroup
    limits is all memory, pinned or not, and is in ``memory_total``.
    """
    if is_wsl(root):
        return unknown("B", "Windows limits what WSL may pin, and does not say at how much")
    limits = _text(root / "proc/self/limits") or ""
    found = re.search(r"^Max locked memory\s+(\S+)", limits, re.M)
    if not found:
        return unknown("B", "the platform does not say how much memory may be pinned")
    shown = "unlimited" if found[1] == "unlimited" else f"{found[1]} bytes"
    return unknown("B", f"ulimit -l is {shown}, but NVIDIA's driver pins pages itself and does not count them there")


def numa_nodes(root: Path = _ROOT) -> dict[str, Json]:
    """NUMA nodes that have memory or cores."""
    folder = root / "sys/devices/system/node"
    try:
        found = [path.name for path in folder.iterdir() if re.fullmatch(r"node[0-9]+", path.name)]
    except OSError as error:
        return unknown("", f"the kernel does not list NUMA nodes: {error.strerror}")
    if not found:
        return unknown("", "the kernel lists no NUMA node")
    return reading(len(found), "", "probed", "the kernel's list of NUMA nodes")


def platform(root: Path = _ROOT) -> dict[str, Json]:
    """ "linux", "wsl", "windows", or Python's name of another system."""
    if is_wsl(root):
        return reading("wsl", "", "probed", "the kernel names Microsoft")
    return reading(_PLATFORMS.get(sys.platform, sys.platform), "", "probed", "the system that Python runs on")


def is_wsl(root: Path = _ROOT) -> bool:
    """Whether this Linux runs under Windows (WSL)."""
    return "microsoft" in (_text(root / "proc/version") or "").lower()


def _text(path: Path) -> str | None:
    """The text of a small file of the kernel; None when it is not there or not readable, which is common and lawful."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
