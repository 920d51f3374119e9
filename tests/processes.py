"""What the processes that tests start need: where this Dormouse lies, an environment that finds it, a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(*folders: Path, **given: str) -> dict[str, str]:
    """Our environment, with this Dormouse and ``folders`` before all else that modules are looked for in; what lies
    there already (a machine may have every package from PYTHONPATH) stays. ``given`` is set besides."""
    path = os.pathsep.join(filter(None, (*map(str, (ROOT, *folders)), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **given}


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
