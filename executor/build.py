"""From slices of the plan to what trains: the model on the rank's device, its mechanisms, its optimizers, its data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor import voice
from executor.data import Corpus, Reader, open_corpus, stdlib_corpus
from executor.guest import guarded
from executor.mechanisms.table import ORDERED
from executor.models.engram import Engram
from executor.optim.adamw_8bit import AdamW8bit
from executor.optim.muon import Muon
from executor.optim.routing import Routed, split
from executor.optim.scaler import Scaler
from executor.optim.tables import HostTables, Tables
from executor.optim.variants import ADAMW, AnyAdamW
from executor.precision import DTYPES
from executor.slices import DataSlice, RankSlice, Source, WorkSlice
from executor.workloads import build, is_ours, require_settled, resolve
from planner.data import least_length
from planner.door import BadWorkload, Workload
from schemas.store import unwritable_reason

MECHANISMS = {mechanism.NAME: mechanism for mechanism in ORDERED}


class BadPlace(Exception):
    """A place that was given cannot serve (too few files of data, a run's folder): exit code 2, one message."""


@dataclass
class Optimizers:
    """The routed parameters and what updates them: None where nothing is routed to it, and the scaler where no rank
    computes in fp16."""

    routed: Routed
    muon: Muon | None
    adamw: AnyAdamW
    tables: Tables | HostTables | None = None
    scaler: Scaler | None = None

    def settle(self, kept: bool) -> None:
        """Told after each step, once it is known whether it was kept, for what counts steps on the host."""
        if isinstance(self.adamw, AdamW8bit):
            self.adamw.settle(kept)

    def state(self) -> dict[str, list[Tensor]]:
        """The tensors on the device that live from step to step, by component of memory."""
        muon, tables = self.muon, self.tables
        return {
            "muon_momentum": [] if muon is None else list(muon.state_dict().values()),
            "adamw_state": [*self.adamw.first, *self.adamw.second],
            "tables_state": [*tables.first, *tables.second] if isinstance(tables, Tables) else [],
        }


def device_of(kind: str) -> torch.device:
    """A rank on a card sees that card alone, so it is the first."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def open_corpora(sources: Sequence[Source], places: Sequence[Path]) -> list[Corpus]:
    """The corpora of the plan's ``sources``; ``places`` says, in their order, where those other than stdlib lie.

    Without places, files of the planned names are taken from the working folder. Which bytes they must be is sealed.

    Raises:
        BadPlace: too few or too many places.
        BadData: a place that cannot be read.
    """
    files = [source for source in sources if source.name != "stdlib"]
    lies = dict(zip((source.name for source in files), places or _found_here(files), strict=False))
    if len(places) > len(files) or len(lies) < len(files):
        raise BadPlace(_where_data_lies(files, places))
    return [stdlib_corpus() if name == "stdlib" else open_corpus(lies[name], name) for name, *_ in sources]


def _found_here(files: Sequence[Source]) -> list[Path]:
    """The files of the planned names and lengths in the working folder; none where one of them is missing."""
    here = [Path(source.name) for source in files if Path(source.name).name == source.name]
    if not files or len(here) < len(files):
        return []
    if not all(path.is_file() and path.stat().st_size == file.length for path, file in zip(here, files, strict=True)):
        return []
    _say(f"no --data is given: reading {', '.join(map(str, here))} of the working folder")
    return here


def _where_data_lies(files: Sequence[Source], places: Sequence[Path]) -> str:
    given = f"--data {','.join(map(str, places))}: "
    if not files:
        return f"{given}the plan trains on the running Python's standard library and takes no --data"
    wanted = ", ".join(map(_shown, files))
    where = "where it lies" if len(files) == 1 else "where they lie, in this order"
    how = f"say {where}: --data {','.join(['PATH'] * len(files))}"
    if not places:
        missing = "which is not" if len(files) == 1 else "which are not all"
        others = [f"{file.name} there has {length} bytes" for file in files if (length := _length_here(file))]
        found = f" ({', '.join(others)})" if others else ""
        return f"the plan trains on {wanted}, {missing} in the working folder{found}: {how}"
    return f"{given}{len(places)} place{'s' * (len(places) != 1)}; the plan trains on {wanted}: {how}"


def _length_here(source: Source) -> int | None:
    """The length of a file of the planned name in the working folder, where it is another than planned."""
    path = Path(source.name)
    length = path.stat().st_size if path.name == source.name and path.is_file() else None
    return None if length == source.length else length


def _shown(source: Source) -> str:
    return f"{source.name} ({source.length} bytes, SHA-256 {str(source.sha256)[:12]})"


def _say(message: str) -> None:
    """Once for all ranks, on stderr."""
    if os.environ.get("RANK", "0") == "0":
        voice.say(message)


def require_folder(folder: Path) -> None:
    """Raise BadPlace where ``folder`` could not be made or takes no file. Nothing is made yet."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    reason = unwritable_reason(nearest / "metrics.jsonl") if nearest.is_dir() else f"{nearest} is not a folder"
    if reason is not None:
        raise BadPlace(f"--run-dir {folder}: {reason}")


def reader(corpora: Sequence[Corpus], data: DataSlice) -> Reader:
    """Windows by slot. Raises BadData where a corpus is too short, BadPlace where that is not the planned file."""
    for corpus, source in zip(corpora, data.sources, strict=True):
        if source.length is not None and len(corpus.data) < least_length(data.stride):  # the plan's own is long enough
            raise BadPlace(f"--data: the plan trains on {_shown(source)}; the file given has {len(corpus.data)} bytes")
    weights = [source.weight for source in data.sources]
    return Reader(list(zip(corpora, weights, strict=True)), data.seed, data.stride)


def model(work: WorkSlice, kernels: dict[str, str]) -> tuple[Workload, nn.Module]:
    """The workload and its model in fp32 on the CPU, the same on every rank of a seed. Raises BadWorkload."""
    asked = "the plan's model"
    workload = resolve(work.model, asked, _say)
    label = f"{asked} {work.model}"
    with guarded(label, is_ours(workload)):
        require_settled(workload, work.config, label)
    torch.manual_seed(work.seed)
    return workload, build(workload, work.config, kernels, label).float()


def settle(built: nn.Module, rank: RankSlice, sharded: bool = False) -> nn.Module:
    """``built`` on the rank's device with the rank's mechanisms applied. One that is to be ``sharded`` stays where it
    is: it goes to the device unit by unit.

    Raises:
        BadWorkload: a mechanism that this executor does not know, or that this model cannot take.
    """
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)
    placed = built if sharded else built.to(device_of(rank.kind))
    for name in rank.mechanisms:
        if name not in MECHANISMS:
            raise BadWorkload(f"the plan engages {name!r}, which this executor does not know")
        if not _is_of_state(name):
            try:
                MECHANISMS[name].apply(placed)
            except ValueError as error:
                raise BadWorkload(str(error)) from None
    return placed


def _is_of_state(name: str) -> bool:
    """Whether a mechanism changes the options of the optimizers, and not the model."""
    return "component" in MECHANISMS[name].ROW


def optimizers(
    placed: nn.Module, work: WorkSlice, rank: RankSlice, owners: Sequence[int], routed: Routed | None = None
) -> Optimizers:
    """Muon for the matrices that ``owners`` names a rank each for, AdamW for the rest.

    A one-rank plan without owners owns all. ``routed``: what they update, where that is not all of ``placed``. Raises
    BadWorkload where owners and matrices do not match.
    """
    routed, config = routed or split(placed, work.opt), work.config
    options: dict[str, Any] = {
        "momentum": config["muon_momentum"],
        "weight_decay": config["weight_decay"],
        "ns_steps": config["ns_steps"],
        "ns_dtype": DTYPES[config["ns_dtype"]],
        "adamw": config["adamw"],
    }
    for name in filter(_is_of_state, rank.mechanisms):
        MECHANISMS[name].apply(options)
    adamw = ADAMW[options.pop("adamw")](routed.adamw, weight_decay=config["weight_decay"])
    owned_by = owners_of(routed, owners, rank)
    return Optimizers(
        routed,
        Muon(routed.muon, owned_by, rank.rank, **options) if routed.muon else None,
        adamw,
        tables_of(placed, routed),
        _scaler(config, rank),
    )


def tables_of(placed: nn.Module, routed: Routed) -> Tables | HostTables | None:
    """What updates the tables, where they lie: on the device, in host memory, or nowhere."""
    engrams = [(name, module) for name, module in placed.named_modules() if isinstance(module, Engram)]
    hosted = [(f"{name}.table", engram.host) for name, engram in engrams if engram.host is not None]
    if hosted:
        return HostTables(hosted)
    return Tables(routed.tables) if routed.tables else None


def _scaler(config: Mapping[str, Any], rank: RankSlice) -> Scaler | None:
    if not rank.loss_scaling:
        return None
    return Scaler(config["loss_scale"], config["loss_scale_growth"], device_of(rank.kind))


def owners_of(routed: Routed, owners: Sequence[int], rank: RankSlice) -> list[int]:
    """One owner a Muon matrix. Raises BadWorkload where the plan's list is of another length."""
    if rank.size == 1 and not owners:
        return [0] * len(routed.muon)
    if len(owners) != len(routed.muon):
        raise BadWorkload(f"the plan names {len(owners)} owners; the model has {len(routed.muon)} Muon matrices")
    return list(owners)
