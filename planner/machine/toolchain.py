"""Which software would run here, read from installed metadata and text: nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import platform
from importlib import metadata
from pathlib import Path

from planner.machine import arches
from schemas.document import reading, unknown
from schemas.form import Json

DISTRIBUTIONS = ("triton", "fla-core", "flash-linear-attention", "bitsandbytes")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def read(driver: dict[str, Json] | None = None) -> dict[str, Json]:
    """Readings of python, torch, arch_list, triton, fla-core, flash-linear-attention, bitsandbytes, cuda, nccl, driver.

    Args:
        driver: the reading that NVML gave, where there is one.
    """
    torch = torch_constants()
    found = {
        "python": reading(platform.python_version(), "", "probed", "the Python that plans"),
        "torch": _torch(torch),
    }
    found |= {name: _distribution(name) for name in DISTRIBUTIONS}
    found["cuda"] = _cuda(torch)
    found["arch_list"] = arches.read(torch_folder(), (torch or {}).get("cuda"))
    found["nccl"] = _nccl(torch)
    found["driver"] = driver or unknown("", "no NVIDIA driver was asked")
    return found


def for_cuda() -> bool:
    """Whether the installed torch is built for CUDA."""
    return bool((torch_constants() or {}).get("cuda"))


def torch_folder() -> Path | None:
    """Where torch is installed; None where it is not."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a half-imported torch
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def torch_constants() -> dict[str, str | None] | None:
    """The constants of torch/version.py (``__version__``, ``cuda``, ...), read as text; None without torch."""
    folder = torch_folder()
    if folder is None:
        return None
    try:
        tree = ast.parse((folder / "version.py").read_text("utf-8"))
    except (OSError, SyntaxError):
        return {}
    found: dict[str, str | None] = {}
    for line in tree.body:
        target = (
            line.targets[0]
            if isinstance(line, ast.Assign)
            else line.target
            if isinstance(line, ast.AnnAssign)
            else None
        )
        value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str | None):
            found[target.id] = value.value
    return found


def _torch(constants: dict[str, str | None] | None) -> dict[str, Json]:
    if constants is None:
        return unknown("", "torch is not installed")
    version = constants.get("__version__")
    if version is None:
        return _distribution("torch")
    return reading(version, "", "probed", "torch/version.py")


def _cuda(constants: dict[str, str | None] | None) -> dict[str, Json]:
    if not constants or "cuda" not in constants:
        return unknown("", "torch/version.py does not say which CUDA it is built for")
    version = constants["cuda"]
    if version is None:
        return unknown("", "this torch is a CPU build")
    return reading(version, "", "probed", "torch/version.py: what torch is built for")


def _nccl(constants: dict[str, str | None] | None) -> dict[str, Json]:
    if constants and constants.get("cuda") is None:
        return unknown("", "this torch is a CPU build, without NCCL")
    for name in _NCCL:
        found = _distribution(name)
        if found["value"] is not None:
            return found
    return unknown("", f"none of {', '.join(_NCCL)} is installed; torch may hold its own")


def _distribution(name: str) -> dict[str, Json]:
    try:
        return reading(metadata.version(name), "", "probed", f"the installed distribution {name}")
    except metadata.PackageNotFoundError:
        return unknown("", f"{name} is not installed")
