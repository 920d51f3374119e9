"""Forward and backward as functions of batch and length: a few shallow models measured at a few shapes, for each kind
of device, set of kernels, dtype and variant that a plan may choose.

Counts are affine in depth and bilinear in batch and length, so two depths and four points give them for every size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product, takewhile
from typing import Any

from torch import nn

from executor.count import Counts, bilinear
from executor.envelope import Course, envelope
from executor.kernels import registry
from executor.measure import COUNTS, SAVED, Measured, measure
from executor.mechanisms import recompute
from executor.mechanisms.table import ORDERED
from executor.phantom import phantoms
from executor.workloads import build
from planner.door import KernelRow, MechanismRow, Value, Workload, counted_as, kernel_set, reachable

LENGTHS = (64, 128)  # whole chunks of every kernel
# Not fewer sequences: with one, or with one or two chunks, some copies fall away. From here on the forms are exact;
# below they err by a few per cent.
LEAST_BATCH = 4
KINDS = ("cpu", "cuda")
DTYPES = ("fp32", "bf16")  # fp16 is as wide as bf16 and launches the same
_APPLY = {mechanism.NAME: mechanism.apply for mechanism in ORDERED}
Points = tuple[tuple[int, int], ...]
Kernels = Mapping[str, Sequence[KernelRow]]


def points(workload: Workload, lengths: tuple[int, int] = LENGTHS) -> Points:
    """Two batches times two lengths (batch, length). The tokens are about those of the workload's own sizes: at fewer,
    a large model's peak lies where the weights' temporaries are."""
    batch = max(LEAST_BATCH, -(-workload.sizes["batch"] * workload.sizes["seq"] // lengths[0]))
    return tuple((b, length) for b in (batch // 2, batch) for length in lengths)


def planned_kernels(workload: Workload, chosen: Mapping[str, Value]) -> dict[str, str]:
    """The row that each kernel is built with here: the one asked for, else the first that a CPU runs."""
    named = {}
    for kernel, rows in workload.kernels.items():
        asked = chosen.get(kernel, "auto")
        runs_here = next((row["name"] for row in rows if "cpu" in row["devices"]), rows[0]["name"])
        named[kernel] = runs_here if asked == "auto" else str(asked)
    return named


def called_kernels(
    workload: Workload, chosen: Mapping[str, Value], label: str, at: Points
) -> dict[str, Sequence[KernelRow]]:
    """The rows of the kernels that a forward calls under this configuration: others have no choice to be made."""
    with phantoms():
        model = build(workload, _shallow(workload, chosen, 1), planned_kernels(workload, chosen), label)
        registry.calls.clear()
        measure(model, *at[0], "fp32")
    ran = {kernel for kernel, _ in registry.calls}
    return {kernel: rows for kernel, rows in workload.kernels.items() if kernel in ran}


def kernel_sets(
    kernels: Kernels, chosen: Mapping[str, Value], kind: str
) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """(a choice of each kernel, the dtypes it is counted in), one for each set that a plan may choose on a device of
    ``kind`` and that counts otherwise than those before it."""
    choices = [list(_countable(kernels, kernel, str(chosen.get(kernel, "auto")), kind)) for kernel in kernels]
    found: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {}
    for rows in product(*choices):
        named = {kernel: name for kernel, (name, _) in zip(kernels, rows, strict=True)}
        dtypes = tuple(dtype for dtype in DTYPES if all(dtype in of for _, of in rows))
        if dtypes:
            known = found.setdefault(kernel_set(named, kernels), (named, dtypes))
            found[kernel_set(named, kernels)] = (named, tuple(d for d in DTYPES if d in {*known[1], *dtypes}))
    return list(found.values())


def _countable(kernels: Kernels, kernel: str, asked: str, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows of ``kernel`` that auto may choose, under the names they are counted by; or the one row asked for, in
    every dtype: a refusal of it comes later."""
    if asked != "auto":
        yield asked, DTYPES
        return
    for row in reachable(kernels[kernel]):
        if kind in row["devices"]:
            yield counted_as(kernel, row["name"], kernels), tuple(_served(row))


def _served(row: Mapping[str, Any]) -> Iterator[str]:
    if "fp32" in row["dtypes"]:
        yield "fp32"
    if {"bf16", "fp16"} & set(row["dtypes"]):
        yield "bf16"


def variants(rows: Mapping[str, MechanismRow], kind: str) -> list[tuple[str, ...]]:
    """The sets of mechanisms that make a forward and backward of their own on a device of ``kind``, each in the order
    of ``rows``."""
    names = [name for name, row in rows.items() if "variant" in row and kind in row["devices"]]
    sets = [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]
    return [chosen for chosen in sets if not any(set(rows[name].get("excludes", ())) & set(chosen) for name in chosen)]


AtPoints = dict[tuple[int, int], Measured]
Case = tuple[str, str]  # kind of device, dtype
Forms = dict[str, Any]  # of a count its form; of "saved" a form for each part; of "beyond" and "first" lines
Compute = dict[str, dict[str, dict[str, dict[str, Forms]]]]


class Counting:
    """Forward and backward of a micro-batch at the configured depth, by kind, set of kernels, compute dtype and
    variant. One model serves all kinds and dtypes of a set of kernels."""

    def __init__(
        self,
        workload: Workload,
        chosen: Mapping[str, Value],
        called: Kernels,
        mechanisms: Mapping[str, MechanismRow],
        label: str,
        at: Points,
    ) -> None:
        self.workload, self.chosen, self.called = workload, chosen, called
        self.mechanisms, self.label, self.at = mechanisms, label, at
        self._terms: dict[tuple[str, Case], dict[str, str] | None] = {}  # what `_terms_of` the plain variant are

    def all(self, kinds: Sequence[str]) -> Compute:
        found: Compute = {kind: {} for kind in kinds}
        for name, kernels, dtypes in self._sets(kinds):
            for kind, of in dtypes.items():
                found[kind][name] = {dtype: {} for dtype in of}
            for engaged in variants(self.mechanisms, "cuda"):
                cases = [
                    (kind, dtype)
                    for kind, of in dtypes.items()
                    for dtype in of
                    if engaged in variants(self.mechanisms, kind)
                ]
                variant = "+".join(self.mechanisms[item]["variant"] for item in engaged) or "plain"
                for (kind, dtype), forms in self._counted(name, kernels, engaged, cases).items():
                    found[kind][name][dtype][variant] = forms
        return found

    def _sets(self, kinds: Sequence[str]) -> list[tuple[str, dict[str, str], dict[str, tuple[str, ...]]]]:
        """(name, choice of each kernel, dtypes by kind) of each set of kernels."""
        found: dict[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]] = {}
        for kind in kinds:
            for kernels, dtypes in kernel_sets(self.called, self.chosen, kind):
                found.setdefault(kernel_set(kernels, self.called), (kernels, {}))[1][kind] = dtypes
        return [(name, kernels, dtypes) for name, (kernels, dtypes) in found.items()]

    def _counted(
        self, name: str, kernels: Mapping[str, str], engaged: tuple[str, ...], cases: Sequence[Case]
    ) -> dict[Case, Forms]:
        """Of a model of one layer and of one of two (or of the very depth), the forms of each case."""
        depth = int(self.chosen[self.workload.depth]) if self.workload.depth else 1
        counted: dict[Case, dict[int, AtPoints]] = {case: {} for case in cases}
        for layers in (1, 2) if depth > 2 else (depth,):
            with phantoms():
                shallow = _shallow(self.workload, self.chosen, layers)
                model = build(self.workload, shallow, kernels, self.label)
                for mechanism in engaged:
                    _APPLY[mechanism](model)
            hooked = recompute.HOOKED if recompute.NAME in engaged else 0
            for case in cases:
                counted[case][layers] = self._at_points(model, case, self._terms.get((name, case)), hooked)
        if not engaged:
            self._terms |= {(name, case): _terms_of(by_depth, self.at) for case, by_depth in counted.items()}
        return {case: _forms(self.workload, self.chosen, by_depth, self.at) for case, by_depth in counted.items()}

    def _at_points(self, model: nn.Module, case: Case, terms: Mapping[str, str] | None, hooked: int) -> AtPoints:
        """What is measured at each point. With ``terms``, three of them tell the fourth."""
        kind, dtype = case
        at = self.at
        with phantoms(kind):
            found = {
                point: measure(model, *point, dtype, hooked) for point in (at if terms is None else (*at[:2], at[3]))
            }
        if terms is not None:
            found[at[2]] = Measured(_fourth(found, at, terms), [], 0, 0)
        return found


def _fourth(found: Mapping[tuple[int, int], Measured], at: Points, terms: Mapping[str, str]) -> Counts:
    """The counts at (b1, t0) from those at (b0, t0), (b0, t1) and (b1, t1), of forms that lack one of ``terms``."""
    ratio = at[2][0] // at[0][0]
    first, second, last = (found[at[place]].counts for place in (0, 1, 3))
    counts = {}
    for name in {*first, *second, *last}:
        a, b, c = (measured.get(name, 0) for measured in (first, second, last))
        counts[name] = a + c - b if terms.get(name) == "bt" else c - ratio * (b - a)
    return counts


def _terms_of(by_depth: Mapping[int, AtPoints], at: Points) -> dict[str, str] | None:
    """Of each count the term that it lacks: "t", as sums over tokens and sequences do, or "bt", as operators do that
    run once a chunk of the length. None where a count has both: then no three points tell the fourth."""
    found: dict[str, str] = {}
    for measured in by_depth.values():
        for name, count in measured[at[2]].counts.items():
            lacking = [term for term in ("t", "bt") if _fourth(measured, at, {name: term})[name] == count]
            if name != "beyond" and found.get(name) not in lacking:
                if not lacking or name in found:
                    return None
                found[name] = lacking[0]
    return found


def _shallow(workload: Workload, chosen: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """The configuration at another depth: what is the index of a layer stays within it."""
    if workload.depth is None:
        return dict(chosen)
    indices = [key.name for key in workload.keys if key.below == workload.depth]
    return {**chosen, workload.depth: layers, **{name: min(int(chosen[name]), layers - 1) for name in indices}}


def _forms(
    workload: Workload, chosen: Mapping[str, Value], by_depth: Mapping[int, AtPoints], counted_at: Points
) -> Forms:
    """Bilinear forms at the configured depth from the counts at two depths (or at that very one)."""
    depth = int(chosen[workload.depth]) if workload.depth else 1
    (first, at_first), (last, at_last) = min(by_depth.items()), max(by_depth.items())
    found: Forms = {"saved": {}}
    for name in sorted({name for measured in (*at_first.values(), *at_last.values()) for name in measured.counts}):
        at = {point: measured.counts.get(name, 0) for point, measured in at_first.items()}
        if last > first:
            # Beside a table's gradient the layers above it hold nothing any more.
            more = _below(workload, chosen, depth) - first if name == "tables_peak" else depth - first
            at = {point: n + more * (at_last[point].counts.get(name, 0) - n) for point, n in at.items()}
        if name.startswith(SAVED):
            found["saved"][name.removeprefix(SAVED)] = bilinear(at)
        elif name in COUNTS or any(at.values()):
            found[name] = bilinear(at)
    ends = counted_at[1::2]
    tokens = [b * t for b, t in ends]
    shallow, deep = ([at[point] for point in ends] for at in (at_first, at_last))
    grown = (depth - last) * (deep[1].cast - shallow[1].cast)
    left_out = _shared(shallow[1], deep[1]) if last > first else 0
    found["beyond"] = envelope(*zip(tokens, (_beyond(item, left_out, grown) for item in deep), strict=True))
    if last > first:
        found["first"] = envelope(*zip(tokens, (item.course for item in shallow), strict=True))
    return found


def _shared(one: Measured, more: Measured) -> int:
    """How many operators at their end two depths have in common: the first layer's backward. However many layers there
    are above it, they hold nothing any more by then."""
    pairs = zip(reversed(one.course[one.turn :]), reversed(more.course[more.turn :]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _beyond(item: Measured, left_out: int, grown: int) -> Course:
    """A course beyond what is saved, without so many operators at its end. In forward weights that autocast casts once
    are held to the end, those of further layers too: ``grown``."""
    saved, course = item.saved(), item.course[: len(item.course) - left_out]
    return [
        (alive - saved + (grown if place < item.turn else 0), inside) for place, (alive, inside) in enumerate(course)
    ]


def _below(workload: Workload, chosen: Mapping[str, Value], depth: int) -> int:
    """How many layers there are up to the last that a key names the index of; ``depth`` where none does."""
    named = [int(chosen[key.name]) + 1 for key in workload.keys if workload.depth and key.below == workload.depth]
    return max(named, default=depth)
