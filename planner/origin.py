"""Whether the packages were imported from where Dormouse is installed: `schemas` and `planner` are common names, and
``python -m`` looks into the working folder first. Imports nothing of Dormouse, so that it can run before anything else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path


class Shadowed(Exception):
    """Another package stands where Dormouse's own should be found. The message names its file; the exit code is 2."""


def check(names: Iterable[str], home: Path) -> None:
    """Refuse unless each package of ``names`` that can be found lies in the folder ``home``. Nothing is executed.

    Raises:
        Shadowed: naming the file that would be imported instead.
    """
    for name in names:
        found = _place(name)
        if found is not None and os.path.realpath(found) != os.path.realpath(home / name / "__init__.py"):
            raise Shadowed(
                f"{found} shadows Dormouse's own {name} (in {home}): start from another folder, or rename it"
            )


def _place(name: str) -> str | None:
    """The file that ``import name`` would run; None when there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: in sys.modules without a spec
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)
