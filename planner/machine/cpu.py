"""What the CPU of this machine is, from the kernel's own files: metadata only, nothing is timed.

``root`` stands before every path, so that another machine's files can be read in a test.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path

from schemas.document import reading, unknown
from schemas.form import Json

_ROOT = Path("/")
_UNLIMITED = 2**60  # cgroup v1 says "no limit" with a number near 2^63


def node_id(root: Path = _ROOT, host: str | None = None) -> str:
    """A stable name for this machine that does not tell its host name."""
    text = (_text(root / "etc/machine-id") or "") + (platform.node() if host is None else host)
    return f"node-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def node(root: Path = _ROOT, affinity: int | None = None) -> dict[str, Json]:
    """The node's readings: cores that this process may use, and memory."""
    return {
        "cores": cores(root, affinity),
        "memory_total": memory_total(root),
        "memory_free": memory_free(root),
    }


def device(ids: list[str], owner: str, root: Path = _ROOT, affinity: int | None = None) -> dict[str, Json]:
    """The device entry of ``len(ids)`` CPU ranks of node ``owner``, all alike. Memory and cores are the node's."""
    return {
        "ids": ids,
        "node": owner,
        "kind": "cpu",
        "name": name(root),
        "cores": cores(root, affinity),
        "vector_bits": vector_bits(root),
        "clock": clock(root),
        "memory_total": memory_total(root),
        "memory_free": memory_free(root),
    }


def name(root: Path = _ROOT) -> dict[str, Json]:
    """The processor's own name."""
    found = _cpuinfo(root, "model name") or platform.processor() or platform.machine()
    if not found:
        return unknown("", "neither /proc/cpuinfo nor the platform names the processor")
    return reading(found, "", "probed", "the processor's own name")


def cores(root: Path = _ROOT, affinity: int | None = None) -> dict[str, Json]:
    """Logical cores that this process may run on: its affinity, or less where a cgroup's quota is less."""
    allowed = affinity if affinity is not None else _affinity()
    if allowed is None:
        return unknown("", "the platform does not say how many cores there are")
    quota = _cpu_quota(root)
    if quota is not None and quota < allowed:
        return reading(max(1, int(quota)), "", "probed", f"a cgroup's quota of {quota:.6g} of {allowed} cores")
    return reading(allowed, "", "probed", "logical cores in this process's affinity")


def _affinity() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def vector_bits(root: Path = _ROOT) -> dict[str, Json]:
    """Width of the widest vector unit, from the processor's flags."""
    flags = set((_cpuinfo(root, "flags") or _cpuinfo(root, "Features") or "").split())
    for flag, bits in (("avx512f", 512), ("avx2", 256), ("sse2", 128), ("asimd", 128), ("neon", 128)):
        if flag in flags:
            return reading(bits, "bit", "probed", f"the processor has {flag}")
    if flags:
        return reading(128, "bit", "assumed", "none of avx512f, avx2, sse2, asimd and neon among the processor's flags")
    return unknown("bit", "/proc/cpuinfo lists no flags")


def clock(root: Path = _ROOT) -> dict[str, Json]:
    """The highest clock where it can be read, else the one of this moment, in Hz."""
    highest = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if highest and highest.isdigit():
        return reading(int(highest) * 1000, "Hz", "probed", "cpufreq's highest clock")
    now = _cpuinfo(root, "cpu MHz")
    if now and re.fullmatch(r"[0-9.]+", now):
        return reading(round(float(now) * 1e6), "Hz", "probed", "the clock at the time of probing; no highest is given")
    return unknown("Hz", "neither cpufreq nor /proc/cpuinfo gives a clock")


def memory_total(root: Path = _ROOT) -> dict[str, Json]:
    """RAM that this process may use, in bytes: the machine's, or a cgroup's limit where that is less."""
    total, _ = _ram(root)
    if total is None:
        return unknown("B", "the platform does not say how much memory there is")
    limits = [limit for limit, _ in _memory_limits(root)]
    if limits and min(limits) < total:
        return reading(min(limits), "B", "probed", "a cgroup's limit, below the machine's memory")
    return reading(total, "B", "probed", "the machine's memory")


def memory_free(root: Path = _ROOT) -> dict[str, Json]:
    """RAM available without swapping, in bytes, within every cgroup's limit."""
    _, free = _ram(root)
    if free is None:
        return unknown("B", "the platform does not say how much memory is available")
    left = [max(0, limit - used) for limit, used in _memory_limits(root)]
    if left and min(left) < free:
        return reading(min(left), "B", "probed", "what a cgroup's limit leaves at the time of probing")
    return reading(free, "B", "probed", "available at the time of probing")


def _ram(root: Path) -> tuple[int | None, int | None]:
    """(total, available) bytes; /proc/meminfo where there is one, else what psutil knows of this platform."""
    text = _text(root / "proc/meminfo") or ""
    found = {key: int(size) * 1024 for key, size in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.M)}
    if found or root != _ROOT:
        return found.get("MemTotal"), found.get("MemAvailable")
    import psutil  # only needed where there is no /proc

    seen = psutil.virtual_memory()
    return seen.total, seen.available


def _cpu_quota(root: Path) -> float | None:
    """Cores that the tightest cgroup's quota leaves; None when none limits."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = (_text(folder / "cpu.max") or "").split()
        if not words:
            words = [_text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of each cgroup that limits this process; caches that can be dropped count as unused."""
    limits = []
    for folder in _groups(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            continue
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        stats = _text(folder / "memory.stat") or ""
        reclaimable = re.search(r"^(?:total_)?inactive_file (\d+)$", stats, re.M)
        held = int(used) if used.isdigit() else 0
        limits.append((int(limit), max(0, held - (int(reclaimable[1]) if reclaimable else 0))))
    return limits


def _groups(root: Path, controller: str) -> list[Path]:
    """The cgroup folders, own and above, that ``controller`` may limit this process in: version 2, then version 1."""
    folders: list[Path] = []
    for line in (_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        steps = [part for part in path.split("/") if part not in ("", "..")]
        for base in {root / "sys/fs/cgroup" / name for name in ((controller, controllers) if controllers else ("",))}:
            folders += [base.joinpath(*steps[:depth]) for depth in range(len(steps) + 1)]
    return folders


def _cpuinfo(root: Path, key: str) -> str | None:
    found = re.search(rf"^{key}\s*: *(.+)$", _text(root / "proc/cpuinfo") or "", re.M)
    return found[1].strip() if found else None


def _text(path: Path) -> str | None:
    """The text of a small file of the kernel; None when it is not there or not readable, which is common and lawful."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None
