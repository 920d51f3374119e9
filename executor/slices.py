"""What each part of a run needs of the plan, and no more: plain rows cut out of the document before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.form import Json


@dataclass(frozen=True)
class RankSlice:
    """One rank: where it runs and what it computes with. ``entry`` is its place in the plan's ``ranks``;
    ``loss_scaling`` says whether any rank of the fleet computes in fp16, for then the loss of every rank is scaled;
    ``allocator`` is how its card's memory grows ("none" on a CPU)."""

    rank: int
    size: int
    entry: int
    device: str
    kind: str
    threads: int | None
    dtype: str
    kernels: Mapping[str, str]
    mechanisms: tuple[str, ...]
    loss_scaling: bool
    allocator: str


@dataclass(frozen=True)
class WorkSlice:
    """The work that is the same on every rank: the model, its whole configuration, the optimizer, steps and seed."""

    model: str
    opt: str
    steps: int
    seed: int
    config: Mapping[str, Any]


class Source(NamedTuple):
    """One source of data; ``length`` in bytes and ``sha256`` are None where they are bound at the start (stdlib)."""

    name: str
    weight: int
    length: int | None
    sha256: str | None


@dataclass(frozen=True)
class DataSlice:
    """Which windows this rank reads: ``offset`` is its first slot in each step's ``global_batch`` of slots.

    ``stride`` is the longest sequence of the fleet, ``least_batch`` the fewest sequences of a rank, ``first_seq`` the
    length of rank 0's: what ranks that evaluate together read at a time.
    """

    sources: tuple[Source, ...]
    seed: int
    stride: int
    global_batch: int
    global_tokens: int
    offset: int
    batch: int
    seq: int
    least_batch: int = 1
    first_seq: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that this rank reads a step."""
        return self.batch * self.seq

    @property
    def token_weight(self) -> float:
        """This rank's share of a step's tokens, exactly; the plan's reading of it has six digits."""
        return self.tokens / self.global_tokens


@dataclass(frozen=True)
class ExchangeSlice:
    """How gradients and updates travel. ``owners`` holds one rank a Muon matrix, in the model's order; ``payload`` is
    the bytes that a step must reduce, in so many ``buckets``; ``step_seconds`` is the most that a step should take, and
    ``alone_high`` that a bucket's all-reduce should with nothing beside it (None: not planned, or unknown). ``shard``:
    none, or fsdp where each rank holds a part of the model; then ``gathered`` are the bytes of parameters that a step
    must make whole."""

    backend: str
    reduce_dtype: str
    bucket_bytes: int
    owners: tuple[int, ...]
    payload: int | None
    step_seconds: float | None
    buckets: int = 1
    alone_high: float | None = None
    shard: str = "none"
    gathered: int | None = None


def world_size(plan: Mapping[str, Json]) -> int:
    return sum(len(entry["members"]) for entry in plan["ranks"])


def rank_slice(plan: Mapping[str, Json], rank: int) -> RankSlice:
    """The slice of ``rank``, with its own mechanisms and the fleet's."""
    place, entry = _entry(plan, rank)
    device = entry["devices"][entry["members"].index(rank)]
    kinds = {identity: item["kind"] for item in plan["fleet"]["devices"].values() for identity in item["ids"]}
    return RankSlice(
        rank=rank,
        size=world_size(plan),
        entry=place,
        device=device,
        kind=kinds[device],
        threads=entry["threads"]["chosen"] if "threads" in entry else None,
        dtype=entry["dtype"]["chosen"],
        kernels={name: item["chosen"] for name, item in entry["kernels"].items()},
        mechanisms=(*entry["mechanisms"]["chosen"], *plan["fit"]["mechanisms"]["chosen"]),
        loss_scaling=any(other["dtype"]["chosen"] == "fp16" for other in plan["ranks"]),
        allocator=_allocator(plan, kinds[device]),
    )


def _allocator(plan: Mapping[str, Json], kind: str) -> str:
    """How the memory of a device of ``kind`` grows. A plan from before there was a choice has torch's default."""
    row = plan["workload"]["config"].get("allocator")
    return "none" if kind != "cuda" else "segments" if row is None else str(row["chosen"])


def work_slice(plan: Mapping[str, Json]) -> WorkSlice:
    work = plan["workload"]
    return WorkSlice(
        model=work["model"],
        opt=work["opt"]["chosen"],
        steps=work["steps"]["chosen"],
        seed=work["seed"]["chosen"],
        config={key: item["chosen"] for key, item in work["config"].items()},
    )


def data_slice(plan: Mapping[str, Json], rank: int) -> DataSlice:
    sizes = [_sizes(plan, other) for other in range(world_size(plan))]
    batch, seq = sizes[rank]
    return DataSlice(
        sources=tuple(
            Source(row["name"], row["weight"], row["length"]["value"], row["sha256"]["value"])
            for row in plan["workload"]["data"]["sources"]
        ),
        seed=plan["workload"]["seed"]["chosen"],
        stride=max(length for _, length in sizes),
        global_batch=sum(count for count, _ in sizes),
        global_tokens=sum(count * length for count, length in sizes),
        offset=sum(count for count, _ in sizes[:rank]),
        batch=batch,
        seq=seq,
        least_batch=min(count for count, _ in sizes),
        first_seq=sizes[0][1],
    )


def exchange_slice(plan: Mapping[str, Json]) -> ExchangeSlice:
    """The exchange; what a one-rank plan leaves out has no use there."""
    part = plan["exchange"]
    return ExchangeSlice(
        backend=part["backend"]["chosen"],
        reduce_dtype=part["reduce_dtype"]["chosen"] if "reduce_dtype" in part else "fp32",
        bucket_bytes=part["bucket_bytes"]["chosen"] if "bucket_bytes" in part else 0,
        owners=tuple(part["owners"]["chosen"]) if "owners" in part else (),
        payload=part["payload"]["value"] if "payload" in part else None,
        step_seconds=plan["step"]["seconds"].get("high", plan["step"]["seconds"]["value"]),
        buckets=part["buckets"]["value"] if "buckets" in part else 1,
        alone_high=part["alone_seconds"].get("high") if "alone_seconds" in part else None,
        shard=part["shard"]["chosen"] if "shard" in part else "none",
        gathered=part["gathered"]["value"] if "gathered" in part else None,
    )


def _entry(plan: Mapping[str, Json], rank: int) -> tuple[int, Mapping[str, Json]]:
    for place, entry in enumerate(plan["ranks"]):
        if rank in entry["members"]:
            return place, entry
    raise KeyError(f"rank {rank}")


def _sizes(plan: Mapping[str, Json], rank: int) -> tuple[int, int]:
    _, entry = _entry(plan, rank)
    return entry["batch"]["chosen"], entry["seq"]["chosen"]
