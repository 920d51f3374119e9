"""From slices of the plan to what trains: the model on the rank's device, its mechanisms, its optimizers, its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.data import Corpus, Reader, open_corpus, stdlib_corpus
from executor.mechanisms import muon_state_bf16, recompute
from executor.optim.adamw import AdamW
from executor.optim.muon import Muon
from executor.optim.routing import Routed, split
from executor.precision import DTYPES
from executor.slices import DataSlice, RankSlice, WorkSlice
from executor.workloads import resolve
from planner.door import BadWorkload, Workload
from schemas.store import unwritable_reason

# What a mechanism changes: the model before it trains, or the options that Muon is made with.
MODEL_MECHANISMS: dict[str, Callable[[nn.Module], None]] = {recompute.NAME: recompute.apply}
MUON_MECHANISMS: dict[str, Callable[[dict[str, Any]], None]] = {muon_state_bf16.NAME: muon_state_bf16.apply}


class BadPlace(Exception):
    """A place that was given cannot serve (too few files of data, a run's folder): exit code 2, one message."""


@dataclass
class Optimizers:
    """The routed parameters and what updates them; ``muon`` is None where no matrix is routed to it."""

    routed: Routed
    muon: Muon | None
    adamw: AdamW


def device_of(kind: str) -> torch.device:
    """A rank on a card sees that card alone, so it is the first."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def open_corpora(sources: Sequence[tuple[str, int]], places: Sequence[Path]) -> list[Corpus]:
    """The corpora of the plan's ``sources``; ``places`` says, in their order, where those other than stdlib lie.

    Raises:
        BadPlace: too few or too many places.
        BadData: a place that cannot be read.
    """
    files = [name for name, _ in sources if name != "stdlib"]
    if len(places) != len(files):
        wanted = ", ".join(files) or "none: it trains on the standard library"
        raise BadPlace(f"--data names {len(places)} file(s); the plan's sources are {len(files)} ({wanted})")
    lies = dict(zip(files, places, strict=True))
    return [stdlib_corpus() if name == "stdlib" else open_corpus(lies[name], name) for name, _ in sources]


def require_folder(folder: Path) -> None:
    """Raise BadPlace where ``folder`` could not be made or takes no file. Nothing is made yet."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    reason = unwritable_reason(nearest / "metrics.jsonl") if nearest.is_dir() else f"{nearest} is not a folder"
    if reason is not None:
        raise BadPlace(f"--run-dir {folder}: {reason}")


def reader(corpora: Sequence[Corpus], data: DataSlice) -> Reader:
    """Windows by slot. Raises BadData where a corpus is too short."""
    weights = [weight for _, weight in data.sources]
    return Reader(list(zip(corpora, weights, strict=True)), data.seed, data.stride)


def model(work: WorkSlice, kernels: dict[str, str]) -> tuple[Workload, nn.Module]:
    """The workload and its model in fp32 on the CPU, the same on every rank of a seed. Raises BadWorkload."""
    workload = resolve(work.model)
    torch.manual_seed(work.seed)
    try:
        built: nn.Module = workload.build(dict(work.config), kernels)
    except KeyError as error:
        raise BadWorkload(f"{work.model} asks for the key {error} that the plan does not hold") from None
    return workload, built.float()


def settle(built: nn.Module, rank: RankSlice) -> nn.Module:
    """``built`` on the rank's device with the rank's mechanisms applied.

    Raises:
        BadWorkload: a mechanism that this executor does not know, or that this model cannot take.
    """
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)
    placed = built.to(device_of(rank.kind))
    for name in rank.mechanisms:
        if name not in MODEL_MECHANISMS and name not in MUON_MECHANISMS:
            raise BadWorkload(f"the plan engages {name!r}, which this executor does not know")
        if name in MODEL_MECHANISMS:
            try:
                MODEL_MECHANISMS[name](placed)
            except ValueError as error:
                raise BadWorkload(str(error)) from None
    return placed


def optimizers(placed: nn.Module, work: WorkSlice, rank: RankSlice, owners: Sequence[int]) -> Optimizers:
    """Muon for the matrices that ``owners`` names a rank each for, AdamW for the rest.

    A one-rank plan without owners owns all. Raises BadWorkload where owners and matrices do not match.
    """
    routed, config = split(placed, work.opt), work.config
    options: dict[str, Any] = {
        "momentum": config["muon_momentum"],
        "weight_decay": config["weight_decay"],
        "ns_steps": config["ns_steps"],
        "ns_dtype": DTYPES[config["ns_dtype"]],
    }
    for name in rank.mechanisms:
        if name in MUON_MECHANISMS:
            MUON_MECHANISMS[name](options)
    owned_by = owners_of(routed, owners, rank)
    muon = Muon(routed.muon, owned_by, rank.rank, **options) if routed.muon else None
    return Optimizers(routed, muon, AdamW(routed.adamw, weight_decay=config["weight_decay"]))


def owners_of(routed: Routed, owners: Sequence[int], rank: RankSlice) -> list[int]:
    """One owner a Muon matrix. Raises BadWorkload where the plan's list is of another length."""
    if rank.size == 1 and not owners:
        return [0] * len(routed.muon)
    if len(owners) != len(routed.muon):
        raise BadWorkload(f"the plan names {len(owners)} owners; the model has {len(routed.muon)} Muon matrices")
    return list(owners)
