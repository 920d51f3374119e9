"""What is kept of real cards: tuned configurations of FLA's kernels, and timings of the grouped product's choices.

Tuning FLA takes minutes for each number of heads and dtype. What came of it is a folder of small JSON files that FLA
reads itself (FLA_CONFIG_DIR), with an ``index.json`` that says what it was tuned for. ``python -m executor.tune`` makes
one, and times the grouped product beside it. Folders of the user come before those kept with Dormouse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from platformdirs import user_data_path

from planner.door import Timed, Tuned

HERE = Path(__file__).parent / "tuned_configs"
Match = Literal["exact", "near", "none"]


def user_folder() -> Path:
    """Where ``executor.tune`` puts what it finds unless told otherwise."""
    return Path(user_data_path("dormouse")) / "tuned"


def folder_name(card: str) -> str:
    """CARD/triton-V-fla-V, of this process's toolchain. In it, head-K folders and grouped.json."""
    triton, fla = toolchain()
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', card).strip('_')}/triton-{triton}-fla-{fla}"


def kept() -> Iterator[tuple[Path, Tuned]]:
    """Every folder of tuned configurations, the user's first."""
    for root in (user_folder(), HERE):
        for path in sorted(root.glob("*/*/head-*/index.json")):
            yield path.parent, json.loads(path.read_text())


def timings(choice: str) -> list[Timed]:
    """What is kept of one choice of the grouped product, the user's first."""
    paths = [path for root in (user_folder(), HERE) for path in sorted(root.glob("*/*/grouped.json"))]
    return [row for path in paths for row in json.loads(path.read_text()).get(choice, [])]


def toolchain() -> tuple[str, str]:
    """Versions of (triton, fla); "none" where one is not installed."""
    found = []
    for package in ("triton", "fla-core"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("none")
    return found[0], found[1]


@cache
def find(card: str, heads: int, channels: int) -> tuple[Match, Path | None]:
    """The folder that serves ``card`` here: "exact" where it was tuned for this number of heads, "near" where FLA takes
    the configuration of another number of them."""
    best: tuple[Match, Path | None] = ("none", None)
    for folder, index in kept():
        if (index["card"], (index["triton"], index["fla"]), index["head"]) != (card, toolchain(), channels):
            continue
        if heads in index["heads"]:
            return "exact", folder
        if best[1] is None:
            best = "near", folder
    return best


used: dict[str, Match] = {}
"""By kernel, which configurations this process runs with, once it has begun to."""


def settings(heads: int, channels: int) -> dict[str, str]:
    """FLA's environment for this process's card, to be set before fla is imported; empty where nothing is kept."""
    import torch

    match, folder = (
        find(torch.cuda.get_device_name(0), heads, channels) if torch.cuda.is_available() else ("none", None)
    )
    used["kda"] = match
    # "fuzzy": an exact key, else one that differs in numbers only; some keys hold the batch.
    return {} if folder is None else {"FLA_CACHE_MODE": "fuzzy", "FLA_CONFIG_DIR": str(folder)}
