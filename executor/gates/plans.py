"""The small plans that the gate runs, made by the planner's own compile for the devices that are here.

This is a user of the planner, as a person at its command line is: what runs a plan never imports a pass.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import accounts, data
from planner.machine import probe, visible
from planner.passes.compile import compile_plan
from planner.passes.likeness import in_order
from planner.refusals.rules import Refused
from planner.request import Usage, compose
from schemas.document import is_reading, resolve
from schemas.form import Json
from schemas.seal import seal

SEQ = 64
TEXT = "gate.txt"
BUCKET_BYTES = 64 * 1024
"""Several buckets even in so small a model."""
POISONED_STEPS = 6

_MODEL = {
    "layers": "2", "width": "128", "heads": "2", "eval_windows": "2", "warmup_steps_unmeasured": "2",
    "keep_model": "none", "ns_dtype": "fp32",
}  # fmt: skip
_DENSE = {"ffn": "256"}
_MIXTURE = {
    "experts": "6", "topk": "2", "expert_ffn": "32", "moe_lb_coef": "0.01", "engram_rows": "60", "engram_heads": "1",
    "engram_dim": "4",
}  # fmt: skip


NEEDED = {
    "losses": ("equal", "equal alone", "unequal", "unequal alone", "mixture", "mixture alone"),
    "identity": ("equal", "unequal", "mixture", "mixture alone", "unlike"),
    "gradref": ("unequal", "lengths"),
    "nan": ("stop", "skip"),
    "refusals": ("equal", "equal alone", "mixture"),
}
"""The plans that each mode runs."""


@dataclass(frozen=True)
class Asked:
    """What the command was asked for. ``capacity`` holds one [sequences, length or None] a rank."""

    steps: int
    batch: int
    capacity: Sequence[Sequence[int | None]] | None
    opt: str
    dtype: str
    device: str
    shard: str


@dataclass(frozen=True)
class Machine:
    """The devices of the gate: "cuda" or "cpu", the record of them all, and that of the first rank's alone."""

    kind: str
    cards: tuple[str, ...]
    record: dict[str, Json]
    first: dict[str, Json]


def machine(device: str, ranks: int) -> Machine:
    """As many devices as there are ``ranks``: the first cards that are visible, or CPU ranks.

    Raises:
        Usage: too few cards.
    """
    here = {} if device == "cpu" else probe.fleet("auto")["devices"]
    cards = [identity for key, identity in in_order(here) if here[key]["kind"] == "cuda"]
    if device == "cpu" or (device == "auto" and not cards):
        return Machine("cpu", (), seal(probe.fleet(f"cpu:{ranks}")), seal(probe.fleet("cpu:1")))
    if len(cards) < ranks:
        many = f"{len(cards)} card{'s' * (len(cards) != 1)} visible"
        raise Usage(f"--device {device}: {ranks} ranks and {many}: one card a rank, or --device cpu")
    record = _of_cards(cards[:ranks])
    first = next(identity for _, identity in in_order(record["devices"]))
    return Machine("cuda", tuple(cards[:ranks]), record, _of_cards([first]))


def visible_cards(device: str) -> int:
    """How many cards the gate would find."""
    if device == "cpu":
        return 0
    found = probe.fleet("auto")["devices"].values()
    return sum(len(item["ids"]) for item in found if item["kind"] == "cuda")


def _of_cards(cards: Sequence[str]) -> dict[str, Json]:
    shown = ",".join(map(visible.named, cards))
    return seal(probe.fleet("auto", environ={**os.environ, "CUDA_VISIBLE_DEVICES": shown}))


def corpus(folder: Path) -> Path:
    """A file of 100,000 bytes of words in ``folder``, the same every time."""
    path = folder / TEXT
    source = random.Random(7)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 8))) for _ in range(200)]
    path.write_bytes(" ".join(source.choices(words, k=40000)).encode()[:100000])
    return path


class Maker:
    """Plans of one machine and one file of text. Each raises Refused where the fleet cannot have what is asked."""

    def __init__(self, asked: Asked, here: Machine, text: Path, say: Callable[[str], None]) -> None:
        self._asked, self._here, self._say = asked, here, say
        self._data = data.describe([[str(text), 1]])
        self._ranks = sum(len(item["ids"]) for item in here.record["devices"].values())

    @property
    def shapes(self) -> list[list[int | None]]:
        """What each rank reads a step in the unequal runs: as asked, else one sequence moved from the last rank to the
        first."""
        if self._asked.capacity is not None:
            return [list(shape) for shape in self._asked.capacity]
        batch = self._asked.batch
        return [[batch + (rank == 0) - (rank == self._ranks - 1), None] for rank in range(self._ranks)]

    def equal(self, **config: Any) -> dict[str, Json]:
        """The same batch on every rank; ``config`` are keys of the runtime to be other than by default."""
        return self._fleet(self.account(), self._even(), config)

    def unequal(self) -> dict[str, Json]:
        """Unlike batches, and no clipping, so that a gradient is seen as it was reduced."""
        return self._fleet(self.account(), {"capacity": self.shapes}, {"clip": 0.0})

    def lengths(self) -> dict[str, Json]:
        """Sequences of unlike lengths on ranks beside each other."""
        shapes = [[3, SEQ // 2] if rank % 2 else [2, SEQ + SEQ // 2] for rank in range(self._ranks)]
        return self._fleet(self.account(), {"capacity": shapes, "seq": None, "steps": 2}, {"clip": 0.0})

    def mixture(self) -> dict[str, Json]:
        """Experts that are balanced, and a table."""
        return self._fleet(self.account(_MIXTURE), self._even(), {})

    def poisoned(self, answer: str) -> dict[str, Json]:
        """The run in which a rank's loss becomes NaN; ``answer`` is what the plan says of that: stop or skip."""
        sizes = {**self._even(), "steps": POISONED_STEPS}
        return self._fleet(self.account(), sizes, {"nonfinite": answer})

    def alone(self, together: Mapping[str, Json]) -> dict[str, Json]:
        """The work of the plan ``together`` in one process: the summed batch on the first rank's device."""
        config = {key: row["chosen"] for key, row in together["workload"]["config"].items()}
        account = self.account(_MIXTURE if config["experts"] else _DENSE)
        total = together["step"]["global_batch"]["value"]
        changed = {key: config[key] for key in ("clip", "adamw")}
        return altered(self.compiled(self._here.first, account, {"batch": total, "shard": None}), _pointers(changed))

    def named(self, mode: str) -> dict[str, dict[str, Json]]:
        """The plans of one mode, or of "all", by name; "NAME alone" is the work of NAME in one process."""
        makers: dict[str, Callable[[], dict[str, Json]]] = {
            "equal": self.equal,
            "unequal": self.unequal,
            "lengths": self.lengths,
            "mixture": self.mixture,
            "unlike": lambda: self.equal(ns_dtype="bf16"),
            "stop": lambda: self.poisoned("stop"),
            "skip": lambda: self.poisoned("skip"),
        }
        names = {name for some in (NEEDED if mode == "all" else (mode,)) for name in NEEDED[some]}
        made = {name: make() for name, make in makers.items() if name in names | {"equal"}}
        return made | {name: self.alone(made[name.split()[0]]) for name in sorted(names - made.keys())}

    def refusals(self) -> list[dict[str, Json]]:
        """What the planner must refuse of a fleet: what is asked, the code that must come, and those that came."""
        dense, mixture = self.account(), self.account(_MIXTURE)
        many = [[self._asked.batch, None]] * (self._ranks + 1)
        cases: tuple[tuple[str, str, Mapping[str, Json], dict[str, Any]], ...] = (
            ("--shard fsdp --opt muon", "fsdp-muon", _under(dense, "muon"), {"shard": "fsdp"}),
            ("--mechanisms engram_ram", "mechanism-fleet", mixture, {"mechanisms": ["engram_ram"]}),
            ("--capacity with a rank too many", "per-rank-count", dense, {"capacity": many}),
            ("--batch beside another --capacity", "capacity-batch", dense, {"capacity": many[1:], "batch": 10**6}),
        )
        return [
            {"what": what, "wanted": code, "found": self._refused(account, {"batch": None, **more})}
            for what, code, account, more in cases
        ]

    def _refused(self, account: Mapping[str, Json], asked: Mapping[str, Any]) -> list[str]:
        try:
            self.compiled(self._here.record, account, asked)
        except Refused as error:
            return [refusal.code for refusal in error.refusals]
        return []

    def account(self, more: Mapping[str, str] = _DENSE) -> dict[str, Json]:
        """The account of the gate's model with keys ``more``."""
        scale = {"loss_scale": "1024"} if self._asked.dtype == "fp16" else {}  # else the first steps only lower it
        return accounts.account("tiny", {**_MODEL, **scale, **more}, self._asked.opt, say=self._say)

    def compiled(
        self, record: Mapping[str, Json], account: Mapping[str, Json], asked: Mapping[str, Any]
    ) -> dict[str, Json]:
        """The plan of keys ``asked`` of the request. Raises Refused."""
        sizes = {"seq": SEQ, "steps": self._asked.steps, "seed": 1, "dtype": [self._asked.dtype]}
        wanted = {**sizes, "opt": self._asked.opt, "shard": self._asked.shard, **asked}
        settings = list(account["made_from"]["set"].items())
        request = compose({**wanted, "set": settings}, self._data, "auto", [])
        made = compile_plan(request, record, account)
        # One thread a CPU rank: so small a model gains nothing by more, and ranks that wait for each other lose much.
        places = range(len(made["ranks"])) if self._here.kind == "cpu" else ()
        return altered(made, {f"/ranks/{place}/threads": 1 for place in places})

    def _even(self) -> dict[str, Json]:
        return {"batch": self._asked.batch, "capacity": "equal"}

    def _fleet(
        self, account: Mapping[str, Json], sizes: Mapping[str, Any], config: Mapping[str, Any]
    ) -> dict[str, Json]:
        made = self.compiled(self._here.record, account, sizes)
        buckets = {"/exchange/bucket_bytes": BUCKET_BYTES} if "bucket_bytes" in made["exchange"] else {}
        return altered(made, {**buckets, **_pointers(config)})


def altered(made: Mapping[str, Json], values: Mapping[str, Any]) -> dict[str, Json]:
    """``made`` with other values at some pointers (of readings, of decisions), sealed anew: another faithful plan."""
    body = copy.deepcopy(dict(made))
    for pointer, value in values.items():
        item = resolve(body, pointer)
        item["value" if is_reading(item) else "chosen"] = value
    return seal(body)


def _under(account: Mapping[str, Json], opt: str) -> dict[str, Json]:
    """``account`` as one that was made for optimizer ``opt``, for what is refused before any count of it is read."""
    return {**account, "made_from": {**account["made_from"], "opt": opt}}


def _pointers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {f"/workload/config/{key}": value for key, value in config.items()}
