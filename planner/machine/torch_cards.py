"""The cards as torch alone tells them, where NVML cannot be asked: in a process of its own, which ends at once.

torch starts CUDA to answer, so this is the fallback only, and every reading says so. Free memory would need a context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.machine import visible
from schemas.document import reading, unknown
from schemas.form import Json

DEADLINE_SECONDS = 120.0
_WHY = "torch in a process of its own, since NVML cannot be asked"
_DRIVERS = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvhost-gpu", "dev/nvmap")  # Linux, WSL, Tegra
_UNTOLD = {
    "memory_free": "B",
    "pcie_generation_max": "",
    "pcie_generation_card": "",
    "pcie_width_max": "",
    "pcie_generation_current": "",
    "pcie_width_current": "",
    "compute_mode": "",
    "clock_sm_max": "Hz",
    "clock_memory_max": "Hz",
    "ecc": "",
}


def driver_present(root: Path = Path("/")) -> bool:
    """Whether this machine can have a card that CUDA shows: without a driver's files, torch need not be imported."""
    return sys.platform == "win32" or any((root / name).exists() for name in _DRIVERS)


def ask(environ: Mapping[str, str]) -> list[dict[str, Json]] | None:
    """One row a visible card, of name, sm, memory, multiprocessors and uuid; None where torch cannot tell."""
    command = [sys.executable, "-P", "-m", "planner.machine.torch_cards"]
    settings = {**os.environ, **environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    rows: list[dict[str, Json]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def entries(rows: list[dict[str, Json]], node: str, environ: Mapping[str, str]) -> dict[str, dict[str, Json]]:
    """The device entries of what `ask` gave for ``environ``, in its order. torch counts what it sees from 0; where it
    tells no UUID, a card is known by the place that CUDA_VISIBLE_DEVICES gave it, which counts all cards."""
    found = {}
    shown = [part.strip() for part in environ.get(visible.NAME, "").split(",") if part.strip().isdecimal()]
    for place, row in enumerate(rows):
        is_slice = " MIG " in row["name"]
        unnamed = f"{visible.UNNAMED}{shown[place] if place < len(shown) else place}"
        identity = f"{'MIG' if is_slice else 'GPU'}-{row['uuid']}" if row["uuid"] else unnamed
        found[identity] = {
            "ids": [identity],
            "node": node,
            "kind": "cuda",
            "name": reading(row["name"], "", "probed", _WHY),
            "sm": reading(row["sm"], "", "probed", _WHY),
            "multiprocessors": reading(row["multiprocessors"], "", "probed", _WHY),
            "memory_total": reading(row["memory_total"], "B", "probed", _WHY),
            "mig": reading("slice", "", "probed", _WHY) if is_slice else unknown("", f"not told by {_WHY}"),
            **{key: unknown(unit, f"not told by {_WHY}") for key, unit in _UNTOLD.items()},
        }
    return found


def _rows() -> list[dict[str, Any]]:
    import torch

    rows = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "name": seen.name,
                "sm": f"{seen.major}.{seen.minor}",
                "memory_total": seen.total_memory,
                "multiprocessors": seen.multi_processor_count,
                "uuid": str(getattr(seen, "uuid", "")),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(_rows()))
