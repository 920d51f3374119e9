"""Run a function of a test module in two processes whose CPU kernels round differently, and compare the bytes."""

from __future__ import annotations

import subprocess
import sys

from processes import ROOT, environment


def bytes_of(expression: str, capability: str | None) -> bytes:
    """What ``expression`` (a bytes value; the tests folder is importable) gives under ATEN_CPU_CAPABILITY."""
    environ = environment(ROOT / "tests", OMP_NUM_THREADS="1")
    environ.pop("ATEN_CPU_CAPABILITY", None)
    environ |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    module = expression.split(".")[0]
    script = f"import sys, {module}; sys.stdout.buffer.write({expression})"
    return subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True).stdout


def both(expression: str) -> tuple[bytes, bytes]:
    """The bytes under plain scalar kernels and under this machine's own (vectors and fused multiply-adds)."""
    return bytes_of(expression, "default"), bytes_of(expression, None)
