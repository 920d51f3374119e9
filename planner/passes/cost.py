"""Time and memory of one rank as plain formulas, shared by every pass that weighs alternatives.

b is the rank's batch in sequences, t its length in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from schemas.form import Json

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENTUM_BYTES = 4
ADAMW_BYTES = 8
PACKING_LAUNCHES = 2  # operators to pack one owned update: a slice taken, a copy into it
UNIT_RATES = (1.0, float("inf"), 0.0)  # where rates are unknown and a measured ratio is seconds a FLOP
BACKWARD_SHARE = 2 / 3  # of forward and backward: two of a layer's three products


def polynomial(form: Mapping[str, float], b: int, t: int, granule: int) -> float:
    """one + b*B + t*T + bt*B*T of an account, with t rounded up to ``granule``."""
    padded = -(-t // granule) * granule
    return form["one"] + form["b"] * b + form["t"] * padded + form["bt"] * b * padded


def seconds(kind: str, flops: float, moved: float, launches: float, rates: Sequence[float]) -> float:
    """Time of ``flops`` of products, ``moved`` bytes and ``launches`` operators at rates (FLOP/s, B/s, s a launch).

    A CPU runs its operators one after the other, dispatch included; a GPU computes while its host launches, so the
    longer of the two binds.
    """
    products, bandwidth, launch = rates
    work = flops / products + moved / bandwidth
    return launches * launch + work if kind == "cpu" else max(launches * launch, work)


def exposed_seconds(own: float, slowest: float, all_reduce: float, buckets: float) -> float:
    """The part of the all-reduce that a rank of compute time ``own`` waits for: the slowest rank's lag, and what is not
    hidden. All buckets but the last may hide behind backward, which is 2/3 of compute."""
    hidden = (buckets - 1) / buckets * min(all_reduce, BACKWARD_SHARE * own)
    return slowest - own + all_reduce - hidden


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
    rates: tuple[float, float, float] | None
    account: Mapping[str, Json]
    owned: tuple[int, ...]  # indices of the matrices whose momentum this rank holds
    updated: tuple[int, ...]  # of those whose update it computes: of alike ranks, the slowest one's
    most_owned: int  # elements of the matrices of the rank that owns most
    world: int
    newton_schulz: str  # the dtype of the matrices' updates
    reduce_bytes: int
    workspace: int  # bytes that the device's libraries hold throughout
    overhead: float  # what the allocator takes for a byte asked of it
    compute_ratios: Sequence[Sequence[float]] = ()  # (batch, measured / modelled, low, high), by rising batch
    optimizer_ratios: Sequence[Sequence[float]] = ()

    def variant(self, mechanisms: Collection[str]) -> Mapping[str, Mapping[str, float]]:
        """The account's forward and backward under ``mechanisms``."""
        rows = self.account["mechanisms"]
        name = next((rows[item]["variant"] for item in mechanisms if "variant" in rows.get(item, {})), "plain")
        dtype = "bf16" if self.dtype == "fp16" else self.dtype  # the two are equally wide
        found: Mapping[str, Mapping[str, float]] = self.account["compute"][dtype][name]
        return found

    def work(self, b: int, t: int, mechanisms: Collection[str] = ()) -> dict[str, float]:
        """FLOPs of products, bytes moved and operators launched by forward and backward."""
        forms = self.variant(mechanisms)
        granule = self.account["granule"]
        return {key: polynomial(forms[key], b, t, granule) for key in ("flops", "bytes", "launches")}

    def update_work(self) -> dict[str, float]:
        """The same of the optimizer: Newton-Schulz of the owned matrices by stacked shape, all matrices' updates
        applied, and AdamW."""
        shapes = self.account["shapes"][self.newton_schulz]
        names = [shape_name(self.account["matrices"][place]) for place in self.updated]
        everywhere = (self.account["adamw"], self.account["apply"][self.newton_schulz])
        total = {key: float(sum(counts[key] for counts in everywhere)) for key in ("flops", "bytes", "launches")}
        for key in ("flops", "bytes"):
            total[key] += sum(shapes[name][key] for name in names)
        total["launches"] += sum(shapes[name]["launches"] for name in set(names))
        return total

    def update_seconds(self) -> float:
        """The optimizer's step, without sending updates. The rank's rates must be known."""
        assert self.rates is not None
        work = self.update_work()
        modelled = seconds(self.kind, work["flops"], work["bytes"], work["launches"], self.rates)
        return modelled * ratio_at(self.optimizer_ratios, 0)

    def packing_seconds(self, launch: float) -> float:
        """Time to pack the owned updates for sending: two operators a matrix, which even on a CPU are mostly launch."""
        return PACKING_LAUNCHES * len(self.updated) * launch

    def compute_seconds(self, b: int, t: int, mechanisms: Collection[str] = ()) -> float:
        """t_r(b): forward and backward without exchange. The rank's rates must be known."""
        assert self.rates is not None
        work = self.work(b, t, mechanisms)
        modelled = seconds(self.kind, work["flops"], work["bytes"], work["launches"], self.rates)
        return modelled * ratio_at(self.compute_ratios, b)

    def sample_seconds(self, b: int, t: int) -> float:
        """The part of `compute_seconds` that samples cause: products and bytes, without launches."""
        assert self.rates is not None
        products, bandwidth, _ = self.rates
        work = self.work(b, t)
        return work["flops"] / products + work["bytes"] / bandwidth

    def memory(self, b: int, t: int, mechanisms: Collection[str] = ()) -> dict[str, int]:
        """Bytes by component; every state that the optimizer will ever make is counted from the start."""
        counts = self.account["parameters"]
        elements = counts["muon"] + counts["adamw"]
        momentum = MOMENTUM_BYTES * sum(self._elements(place) for place in self.owned)
        for name in mechanisms:
            row = self.account["mechanisms"].get(name, {})
            if row.get("component") == "muon_momentum":
                momentum = int(momentum * row["factor"])
        form = self.variant(mechanisms)["peak"]
        return {
            "masters": MASTER_BYTES * elements,
            "gradients": GRADIENT_BYTES * elements,
            "muon_momentum": momentum,
            "adamw_state": ADAMW_BYTES * counts["adamw"],
            "activations": round(polynomial(form, b, t, self.account["granule"])),
            "buckets": self.reduce_bytes * elements if self.world > 1 and self.reduce_bytes < GRADIENT_BYTES else 0,
            "update": self._update_bytes(),
            "workspace": self.workspace,
        }

    def peak(self, b: int, t: int, mechanisms: Collection[str] = ()) -> float:
        """The higher of the two peaks, with the allocator's overhead."""
        return max(peaks(self.memory(b, t, mechanisms))) * self.overhead

    def _elements(self, place: int) -> int:
        rows, columns = self.account["matrices"][place]["shape"][-2:]
        return int(rows * columns)

    def _update_bytes(self) -> int:
        """Temporaries at the optimizer's peak. Owned shapes are updated stack by stack, each beside the updates before
        it; then, on a fleet, all are packed into one buffer as wide as the largest owner; then applied; then AdamW."""
        shapes, width = self.account["shapes"][self.newton_schulz], DTYPE_BYTES[self.newton_schulz]
        stacks: dict[str, list[int]] = {}
        for place in self.owned:
            stacks.setdefault(shape_name(self.account["matrices"][place]), []).append(place)
        done = highest = 0
        for name, places in stacks.items():
            highest = max(highest, done + len(places) * int(shapes[name]["temporary"]))
            done += width * sum(self._elements(place) for place in places)
        received = self.world * self.most_owned * width if self.world > 1 else done
        packing = done + received if self.world > 1 else done
        if self.world > 1 and self.kind == "cpu":
            packing = max(packing, 2 * received)  # gloo gathers into a buffer of its own
        applying = received + int(self.account["apply"][self.newton_schulz]["temporary"])
        return max(highest, packing, applying, int(self.account["adamw"]["temporary"]))


def peaks(components: Mapping[str, float]) -> tuple[float, float]:
    """(backward's peak, the optimizer's peak) of the bytes by component."""
    state = sum(components[name] for name in ("masters", "gradients", "muon_momentum", "adamw_state", "workspace"))
    # DDP holds a bucket's narrower copy until the next backward, so the optimizer runs beside it.
    return state + components["activations"] + components["buckets"], state + components["update"] + components[
        "buckets"
    ]


def shape_name(matrix: Mapping[str, Json]) -> str:
    rows, columns = matrix["shape"][-2:]
    return f"{rows}x{columns}"
