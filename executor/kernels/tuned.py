"""The tuned configurations that are kept of FLA's kernels: found by card, toolchain and head size.

Tuning takes minutes for each number of heads and dtype. What came of it is a folder of small JSON files that FLA reads
itself (FLA_CONFIG_DIR), with an ``index.json`` that says what it was tuned for; ``python -m executor.tune`` makes one.
Folders of the user come before those kept with Dormouse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypedDict

from platformdirs import user_data_path

HERE = Path(__file__).parent / "tuned_configs"
Match = Literal["exact", "near", "none"]


class Index(TypedDict):
    """What a folder was tuned for: one card, one toolchain, one head size in channels."""

    card: str
    triton: str
    fla: str
    head: int
    heads: list[int]
    dtypes: list[str]


def user_folder() -> Path:
    """Where ``executor.tune`` puts what it finds unless told otherwise."""
    return Path(user_data_path("dormouse")) / "tuned"


def folder_name(index: Index) -> str:
    """CARD/triton-V-fla-V/head-K."""
    card = re.sub(r"[^0-9A-Za-z]+", "_", index["card"]).strip("_")
    return f"{card}/triton-{index['triton']}-fla-{index['fla']}/head-{index['head']}"


def kept() -> Iterator[tuple[Path, Index]]:
    """Every folder kept, the user's first."""
    for root in (user_folder(), HERE):
        for path in sorted(root.glob("*/*/head-*/index.json")):
            yield path.parent, json.loads(path.read_text())


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


def settings(heads: int, channels: int) -> dict[str, str]:
    """FLA's environment for this process's card, to be set before fla is imported; empty where nothing is kept."""
    import torch

    _, folder = find(torch.cuda.get_device_name(0), heads, channels) if torch.cuda.is_available() else ("none", None)
    # "fuzzy": an exact key, else one that differs in numbers only; some keys hold the batch.
    return {} if folder is None else {"FLA_CACHE_MODE": "fuzzy", "FLA_CONFIG_DIR": str(folder)}
