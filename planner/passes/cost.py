"""Time and memory of one rank as plain formulas, shared by every pass that weighs alternatives.

b is the rank's batch in sequences, t its length in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.door import REDUCES_IN_FLIGHT, STACK_BYTES, kernel_set, staged_elements
from planner.passes.sharding import EVERY, TRAINED, Shards
from schemas.form import Json

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENTUM_BYTES = 4
ADAMW_BYTES = 8
TABLES_BYTES = 8
STATE = (
    "masters",
    "gradients",
    "muon_momentum",
    "adamw_state",
    "tables_state",
    "model_buffers",
    "rounding",
    "staging",
    "workspace",
)
"""Components of memory that are held from step to step."""
COMPONENTS = (*STATE, "activations", "gathered", "buckets", "update")
WEIGHTS, KERNELS, BACKWARD = "weights_cast", "kernels_inside", "backward_beyond"
"""Of the bytes alive: weights in the compute dtype, what a kernel takes within itself, and what backward takes beyond
those and all that is saved."""
RECURRENT = "recurrent_kernels"
"""Likewise: what recurrent layers' fused kernels keep for backward."""
PACKING_LAUNCHES = 2  # operators to pack one owned update: a slice taken, a copy into it
UNIT_RATES = (1.0, float("inf"), 0.0)  # where rates are unknown and a measured ratio is seconds a FLOP
BACKWARD_SHARE = 2 / 3  # of forward and backward: two of a layer's three products


def polynomial(form: Mapping[str, float], b: int, t: int, granule: int) -> float:
    """one + b*B + t*T + bt*B*T of an account, with t rounded up to ``granule``."""
    padded = -(-t // granule) * granule
    return form["one"] + form["b"] * b + form["t"] * padded + form["bt"] * b * padded


def seconds(
    kind: str,
    flops: float,
    moved: float,
    launches: float,
    rates: Sequence[float],
    carried: float = 0.0,
    looked_up: float = 0.0,
    gain: float = 1.0,
) -> float:
    """Time of ``flops`` of products, ``moved`` bytes and ``launches`` operators at rates (FLOP/s, B/s, s a launch), of
    ``carried`` bytes to host memory and back at a fourth rate (B/s; without it they take no time), and of ``looked_up``
    rows of tables in host memory at a fifth (s a row). ``gain``: how many times the first two rates this work reaches.

    A CPU runs its operators one after the other, dispatch included; a GPU computes and copies while its host launches,
    so the longest of the three binds. The next forward waits for the host's rows, and they for this step's backward.
    """
    products, bandwidth, launch, *link = rates
    work = (flops / products + moved / bandwidth) / gain
    copies = carried / link[0] if link else 0.0
    rows = looked_up * link[1] if len(link) > 1 else 0.0
    return rows + (launches * launch + work + copies if kind == "cpu" else max(launches * launch, work, copies))


def waited_seconds(slowest: float, all_reduce: float, last: float) -> float:
    """The part of the all-reduce that is not hidden: all buckets but the last, which is a share ``last`` of the bytes,
    may lie behind the backward of the rank that computes ``slowest``, which is 2/3 of its compute. A bucket is reduced
    once every rank has it."""
    return all_reduce - min(max(0.0, 1 - last) * all_reduce, BACKWARD_SHARE * slowest)


def ratio_at(points: Sequence[Sequence[float]], batch: float, at: int = 1) -> float:
    """The ratio at ``batch`` from points (batch, ratio, low, high) of rising batch, ``at`` 1, 2 or 3: between two, a
    straight line; outside of them, the nearest; 1 where there is none."""
    below = [point for point in points if point[0] <= batch]
    above = [point for point in points if point[0] >= batch]
    if not below or not above:
        nearest = below[-1:] or above[:1]
        return nearest[0][at] if nearest else 1.0
    (b0, b1), (r0, r1) = (below[-1][0], above[0][0]), (below[-1][at], above[0][at])
    return r0 if b1 == b0 else r0 + (r1 - r0) * (batch - b0) / (b1 - b0)


@dataclass(frozen=True)
class Rank:
    """What the formulas need of one rank, taken from a draft by the passes."""

    kind: str
    dtype: str
    kernels: Mapping[str, str]
    rates: tuple[float, float, float] | None
    link_rate: float  # bytes a second between the device and host memory
    row_seconds: float  # of a row of a table in host memory
    account: Mapping[str, Json]
    owned: tuple[int, ...]  # indices of the matrices whose momentum this rank holds
    updated: tuple[int, ...]  # of those whose update it computes: of alike ranks, the slowest one's
    most_owned: int  # elements of the matrices of the rank that owns most
    world: int
    newton_schulz: str  # the dtype of the matrices' updates
    adamw: str  # the variant of AdamW, where no mechanism puts another in its place
    reduce_bytes: int
    bucket_bytes: int
    workspace: int  # bytes that the device's libraries hold throughout
    overhead: float  # what the allocator takes for a byte asked of it
    allocator: str  # "expandable", whose blocks are as large as what they hold, "segments", or "none" on a CPU
    update_gain: float = 1.0  # of the optimizer's rates over those of forward and backward
    compute_ratios: Sequence[Sequence[float]] = ()  # (batch, measured / modelled, low, high), by rising batch
    optimizer_ratios: Sequence[Sequence[float]] = ()
    shards: Shards | None = None  # where the rank holds a part of the model
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what was worked out before

    def _rows(self, mechanisms: Collection[str]) -> list[Mapping[str, Json]]:
        """The account's rows of ``mechanisms``, in their order."""
        rows = [row for name, row in self.account["mechanisms"].items() if name in mechanisms]
        return sorted(rows, key=lambda row: int(row["order"]))

    def variant(self, mechanisms: Collection[str]) -> Mapping[str, Json]:
        """The account's forward and backward under ``mechanisms``."""
        name = "+".join(row["variant"] for row in self._rows(mechanisms) if "variant" in row) or "plain"
        dtype = "bf16" if self.dtype == "fp16" else self.dtype  # the two are equally wide
        found: Any = self.account["compute"][self.kind]
        # What the device, the kernel or the dtype does not allow is refused, but not before the draft is whole.
        for key in (kernel_set(self.kernels, self.account["kernels"]), dtype, name):
            found = found.get(key, next(iter(found.values())))
        return found  # type: ignore[no-any-return]

    def _tables(self, mechanisms: Collection[str]) -> int:
        """Elements of the tables that lie on the device."""
        moved = any(row.get("moves") == "tables" for row in self._rows(mechanisms))
        return 0 if moved else int(self.account["parameters"]["tables"])

    def elements(self, mechanisms: Collection[str]) -> int:
        """Elements of the parameters that lie on the device."""
        counts = self.account["parameters"]
        return int(counts["muon"] + counts["adamw"]) + self._tables(mechanisms)

    def work(self, b: int, t: int, mechanisms: Collection[str] = ()) -> dict[str, float]:
        """FLOPs of products, bytes moved, operators launched by forward and backward, bytes to the host and back
        (``link``), and rows of tables that the host looks up and updates."""
        forms, granule = self.variant(mechanisms), self.account["granule"]
        total = {key: polynomial(forms[key], b, t, granule) for key in ("flops", "bytes", "launches", "link")}
        if self._tables(mechanisms) and "tables_bytes" in forms:
            total["bytes"] += polynomial(forms["tables_bytes"], b, t, granule)
        total["link"] += self._of_rows("link", b, t, mechanisms)
        if self.shards:
            total["bytes"] += self._shuffled(self.shards)
        return total | {"host_rows": self._of_rows("lookups", b, t, mechanisms)}

    def _shuffled(self, shards: Shards) -> int:
        """Bytes that FSDP2 reads and writes besides: shards into a buffer and out of it as parameters, at each gather;
        gradients into a buffer as they are sent, and sums added to those that are kept."""
        ahead, again = shards.gathers()
        held, sent = sum(ahead) + sum(again), sum(shards.scatters(self.reduce_bytes))
        whole = sent * GRADIENT_BYTES // self.reduce_bytes
        return 2 * held + 2 * held // shards.world + whole + sent + 3 * whole // shards.world

    def _of_rows(self, key: str, b: int, t: int, mechanisms: Collection[str]) -> float:
        rows = (row for row in self._rows(mechanisms) if key in row)
        return sum(polynomial(row[key], b, t, self.account["granule"]) for row in rows)

    def update_work(self, mechanisms: Collection[str] = ()) -> dict[str, float]:
        """The same of the optimizer: Newton-Schulz of the owned matrices by stacked shape, all matrices' updates
        applied, AdamW, and the tables' rows."""
        key = self.updated, self.shards is None, frozenset(mechanisms)
        if key not in self._known:
            self._known[key] = self._update_work(mechanisms)
        return dict(self._known[key])

    def _update_work(self, mechanisms: Collection[str]) -> dict[str, float]:
        shapes, matrices = self.account["shapes"][self.newton_schulz], self.account["matrices"]
        everywhere = [self._adamw(mechanisms), self.account["apply"][self.newton_schulz]]
        everywhere += [self.account["tables"]] if self._tables(mechanisms) else []
        total = {key: float(sum(counts[key] for counts in everywhere)) for key in ("flops", "bytes", "launches")}
        if self.shards:
            total["bytes"] *= self.shards.scale()
        for key in ("flops", "bytes"):
            total[key] += sum(many(matrices[i]) * shapes[shape_name(matrices[i])][key] for i in self.updated)
        total["launches"] += sum(shapes[name]["launches"] for name, _ in stacks(matrices, self.updated))
        return total

    def _adamw(self, mechanisms: Collection[str]) -> Mapping[str, Json]:
        """The counts of the AdamW that runs: a mechanism that fixes its state's bytes is an AdamW of its own."""
        replaced = any(row.get("component") == "adamw_state" and "bytes" in row for row in self._rows(mechanisms))
        found: Mapping[str, Json] = self.account["adamw"]["8bit" if replaced else self.adamw]
        return found

    def update_seconds(self, mechanisms: Collection[str] = ()) -> float:
        """The optimizer's step, without sending updates. The rank's rates must be known."""
        assert self.rates is not None
        work = self.update_work(mechanisms)
        modelled = seconds(self.kind, work["flops"], work["bytes"], work["launches"], self.rates, gain=self.update_gain)
        return modelled * ratio_at(self.optimizer_ratios, 0)

    def packing_seconds(self, launch: float) -> float:
        """Time to pack the owned updates for sending: two operators a matrix, which even on a CPU are mostly launch."""
        return PACKING_LAUNCHES * len(self.updated) * launch

    def compute_seconds(self, b: int, t: int, mechanisms: Collection[str] = ()) -> float:
        """t_r(b): forward and backward without exchange. The rank's rates must be known."""
        assert self.rates is not None
        work = self.work(b, t, mechanisms)
        rates = (*self.rates, self.link_rate, self.row_seconds)
        modelled = seconds(
            self.kind, work["flops"], work["bytes"], work["launches"], rates, work["link"], work["host_rows"]
        )
        return modelled * ratio_at(self.compute_ratios, b)

    def sample_seconds(self, b: int, t: int) -> float:
        """The part of `compute_seconds` that samples cause: products and bytes, without launches."""
        assert self.rates is not None
        products, bandwidth, _ = self.rates
        work = self.work(b, t)
        return work["flops"] / products + work["bytes"] / bandwidth

    def memory(self, b: int, t: int, mechanisms: Collection[str] = ()) -> dict[str, int]:
        """Bytes by component; every state that the optimizer will ever make is counted from the start."""
        tables, elements = self._tables(mechanisms), self.elements(mechanisms)
        found = {
            "masters": MASTER_BYTES * (elements + int(self.account["frozen"])),
            "gradients": GRADIENT_BYTES * elements,
            "muon_momentum": MOMENTUM_BYTES * sum(self._elements(place) for place in self.owned),
            "adamw_state": ADAMW_BYTES * int(self.account["parameters"]["adamw"]),
            "tables_state": TABLES_BYTES * tables,
            "model_buffers": int(self.account["buffers"]),
            "rounding": self._rounding(mechanisms),
            "staging": round(self._of_rows("staging", b, t, mechanisms)),
            "activations": sum(self.alive(b, t, mechanisms).values()),
            "buckets": 0 if self.shards else self._staged_bytes(elements),
            "update": self._update_bytes(mechanisms),
            "workspace": self.workspace,
        }
        if self.shards:
            found |= self._sharded(self.shards, self._kept(b, t, mechanisms), mechanisms)
        for row in self._rows(mechanisms):
            if "component" in row:
                name = row["component"]
                found[name] = row["bytes"] if "bytes" in row else int(found[name] * row["factor"])
        return found

    def _kept(self, b: int, t: int, mechanisms: Collection[str]) -> float:
        """Bytes kept for backward by all parts of the model."""
        forms = self.variant(mechanisms)["saved"]
        return sum(polynomial(form, b, t, self.account["granule"]) for form in forms.values())

    def _sharded(self, shards: Shards, saved: float, mechanisms: Collection[str]) -> dict[str, int]:
        """The components that are otherwise where the rank holds a part of the model; ``saved``: bytes for backward."""
        return {
            "masters": MASTER_BYTES * shards.held(EVERY),
            "gradients": GRADIENT_BYTES * shards.held(TRAINED),
            "adamw_state": ADAMW_BYTES * shards.held(("adamw",)),
            "tables_state": TABLES_BYTES * shards.held(("tables",)),
            "rounding": shards.rounding() if self.allocator == "segments" else 0,
            "gathered": shards.gathered(),
            "buckets": shards.sums(self.reduce_bytes, saved),
            "update": round(self._update_bytes(mechanisms) * shards.chunk()),
        }

    def _staged_bytes(self, elements: int) -> int:
        """Buffers that gradients go through where they are reduced in a narrower dtype than their own."""
        if self.world == 1 or self.reduce_bytes >= GRADIENT_BYTES or not elements:
            return 0
        each = staged_elements(self.bucket_bytes, elements)
        return self.reduce_bytes * each * min(REDUCES_IN_FLIGHT, -(-elements // each))

    def hosted(self, b: int, t: int, mechanisms: Collection[str] = ()) -> tuple[int, int]:
        """(bytes that mechanisms hold in host memory, how many of them are pinned). For a CPU nothing is pinned."""
        offloaded = polynomial(self.variant(mechanisms)["host"], b, t, self.account["granule"])
        held, pinned = (offloaded + self._of_rows(key, b, t, mechanisms) for key in ("host", "pinned"))
        return (round(held - pinned), 0) if self.kind == "cpu" else (round(held), round(pinned))

    def peak(self, b: int, t: int, mechanisms: Collection[str] = ()) -> float:
        """The higher of the two peaks, with the allocator's overhead. A CPU's own memory is the host's."""
        beside = self.hosted(b, t, mechanisms)[0] if self.kind == "cpu" else 0
        return (max(peaks(self.memory(b, t, mechanisms))) + beside) * self.overhead

    def alive(self, b: int, t: int, mechanisms: Collection[str] = ()) -> dict[str, int]:
        """The most bytes alive in forward and backward, by what they are: those that each part of the model keeps for
        backward, those that a kernel takes within itself, and those that backward takes beyond; or, where that is more,
        a table's gradient and those beside it."""
        forms, granule, tables = self.variant(mechanisms), self.account["granule"], self._tables(mechanisms)
        found = {part: polynomial(form, b, t, granule) for part, form in forms["saved"].items()}
        tokens, saved = b * -(-t // granule) * granule, sum(found.values())
        beyond, inside = max(_highest(forms["beyond"], tokens), _highest(forms.get("first", ()), tokens, saved))
        found |= {KERNELS: inside, BACKWARD: beyond - inside}
        if tables and "tables_peak" in forms:
            beside = {"beside_a_table": polynomial(forms["tables_peak"], b, t, granule)}
            beside["table_gradient"] = GRADIENT_BYTES * tables
            found = max(found, beside, key=lambda parts: sum(parts.values()))
        return {name: round(value) for name, value in found.items() if round(value)}

    def _rounding(self, mechanisms: Collection[str]) -> int:
        """Bytes by which a card's blocks are larger than the state in them: weights, gradients, what the optimizers
        keep of each tensor in fp32."""
        if self.kind == "cpu" or self.allocator == "expandable":
            return 0
        changed = {row.get("component") for row in self._rows(mechanisms)}
        blocks, elements = self.account["blocks"], self.account["parameters"]["muon"]
        muon = 2.0 if "muon_momentum" in changed else 2 + sum(self._elements(i) for i in self.owned) / max(1, elements)
        adamw = 2 if "adamw_state" in changed else 4
        tables = 4 if self._tables(mechanisms) else 0
        return int(muon * blocks["muon"] + adamw * blocks["adamw"] + tables * blocks["tables"])

    def _elements(self, place: int) -> int:
        return int(math.prod(self.account["matrices"][place]["shape"]))

    def _update_bytes(self, mechanisms: Collection[str]) -> int:
        """Temporaries at the optimizer's peak. Owned shapes are updated stack by stack, each beside the updates before
        it; then, on a fleet, all are packed into one buffer as wide as the largest owner; then applied; then AdamW."""
        shapes, width = self.account["shapes"][self.newton_schulz], DTYPE_BYTES[self.newton_schulz]
        done = highest = 0
        for name, places in stacks(self.account["matrices"], self.owned):
            count = sum(many(self.account["matrices"][place]) for place in places)
            highest = max(highest, done + count * int(shapes[name]["temporary"]))
            done += width * sum(self._elements(place) for place in places)
        received = self.world * self.most_owned * width if self.world > 1 else done
        packing = done + received if self.world > 1 else done
        if self.world > 1 and self.kind == "cpu":
            packing = max(packing, 2 * received)  # gloo gathers into a buffer of its own
        applying = received + int(self.account["apply"][self.newton_schulz]["temporary"])
        rows = int(self.account["tables"]["temporary"]) if self._tables(mechanisms) else 0
        return max(highest, packing, applying, int(self._adamw(mechanisms)["temporary"]), rows)


def peaks(components: Mapping[str, float]) -> tuple[float, float]:
    """(backward's peak, the optimizer's peak) of the bytes by component."""
    state, buckets = sum(components[name] for name in STATE), components["buckets"]
    if "gathered" in components:  # FSDP2 lets all of these go at the end of backward
        return state + components["activations"] + components["gathered"] + buckets, state + components["update"]
    # The buffers that gradients are reduced through are held throughout.
    return state + components["activations"] + buckets, state + components["update"] + buckets


def _highest(lines: Sequence[Mapping[str, float]], tokens: int, less: float = 0.0) -> tuple[float, float]:
    """(bytes, of them those within a kernel) of the highest of an account's lines, less so many bytes."""
    found = ((line["one"] + line["bt"] * tokens - less, line["inside"] * tokens) for line in lines)
    return max(found, default=(0.0, 0.0))


def shape_name(matrix: Mapping[str, Json]) -> str:
    rows, columns = matrix["shape"][-2:]
    return f"{rows}x{columns}"


def many(matrix: Mapping[str, Json]) -> int:
    """How many matrices one row of the account stands for: the experts of a stack."""
    return math.prod(matrix["shape"][:-2])


def stacks(matrices: Sequence[Mapping[str, Json]], places: Sequence[int]) -> list[tuple[str, list[int]]]:
    """(shape, places) of each stack that Muon iterates, in its order: of one shape, up to STACK_BYTES."""
    found: list[tuple[str, list[int]]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for place in places:
        name, nbytes = shape_name(matrices[place]), 4 * math.prod(matrices[place]["shape"])
        stack, size = filling.get(name, ([], 0))
        if not stack or size + nbytes > STACK_BYTES:
            stack, size = [], 0
            found.append((name, stack))
        stack.append(place)
        filling[name] = (stack, size + nbytes)
    return found
