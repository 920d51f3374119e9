"""The gates: each runs what it needs on the `Bench`, and gives rows of a table. Every rank calls them in one order;
what is compared with one process is known to the first rank alone, and is told to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from executor.gates import compare
from executor.gates.bench import Bench, Poison, Run
from executor.gates.plans import POISONED_STEPS, altered
from schemas.form import Json

Plans = Mapping[str, dict[str, Json]]
Apart = Callable[[Run, Run], tuple[float, str]]

# What right runs may differ by. Of CPU ranks over 20 steps, fp32 was seen to differ by 8e-7 in losses, 7e-8 in weights
# and 3e-6 in a gradient; bf16 by 2e-3, 8e-4, 2e-2, since one process rounds other products than its ranks do. A rank's
# weight in the loss forgotten gives 9e-3, 2e-2, 3e-1.
BOUNDS = {
    "fp32": {"losses": 1e-3, "weights": 1e-6, "gradient": 2e-5},
    "bf16": {"losses": 5e-3, "weights": 3e-3, "gradient": 6e-2},
    "fp16": {"losses": 5e-3, "weights": 1e-3, "gradient": 1e-2},
}


@dataclass(frozen=True)
class Check:
    """A line of the table: what was held to be so, whether it is, the number that says it, and its bound. ``passed`` is
    None of what could not be tried here."""

    mode: str
    name: str
    passed: bool | None
    found: str
    value: float | None = None
    bound: float | None = None


class Gates:
    """The gates over one set of plans, each of which is run once however many gates look at it."""

    def __init__(
        self, bench: Bench, plans: Plans, refused: Sequence[Mapping[str, Json]], dtype: str, kind: str
    ) -> None:
        """``refused`` is what planning the fleet refused, as `executor.gates.plans.Maker.refusals` gives it."""
        self._bench, self._plans, self._refused = bench, plans, refused
        self._kind, self._bounds = kind, BOUNDS[dtype]
        self._runs: dict[str, Run] = {}
        self._alone: dict[str, Run | None] = {}

    @property
    def runs(self) -> Mapping[str, Run]:
        """What ran so far on the whole fleet, by the plan's name."""
        return self._runs

    @cached_property
    def _modes(self) -> dict[str, Callable[[], Iterator[Check]]]:
        return {
            "losses": self.losses,
            "identity": self.identity,
            "gradref": self.gradref,
            "nan": self.nan,
            "refusals": self.refusals,
        }

    def of(self, mode: str) -> Iterator[Check]:
        """The checks of one mode, or of "all"."""
        for name in self._modes if mode == "all" else (mode,):
            yield from self._modes[name]()

    def losses(self) -> Iterator[Check]:
        """The trajectory of the fleet is that of one process at the summed batch."""
        for name in ("equal", "unequal", "mixture"):
            run, one = self._pair(name)
            steps = self._plans[name]["workload"]["steps"]["chosen"]
            yield self._bounded("losses", f"{name}: losses of one process", "losses", run, one, _losses_apart)
            yield self._bounded("losses", f"{name}: weights of one process after a step", "weights", run, one, _weights)
            if name != "mixture" and steps > 1:
                first, last = (run.watch.losses[place] if run.watch.losses else math.nan for place in (0, -1))
                words = f"from {first:.4f} to {last:.4f} in {len(run.watch.losses)} steps"
                yield Check("losses", f"{name}: losses descend", last < first, _with_end(words, run), last - first, 0.0)

    def identity(self) -> Iterator[Check]:
        """Every rank holds the same bits after every step."""
        for name in ("equal", "unequal", "mixture", "unlike"):
            if name == "unlike" and self._kind != "cpu":
                yield Check("identity", "unlike: the same weights", None, "cards compute as they do: CPU ranks only")
                continue
            run, steps = self._run(name), self._plans[name]["workload"]["steps"]["chosen"]
            yield _identical(name, run, steps)
        run, one = self._pair("mixture")
        apart = self._told(lambda: compare.balances_apart(run.watch.buffers, one.watch.buffers) if one else 1)
        words = _with_end(f"{apart} of the experts' balances differ from one process's", run)
        yield Check("identity", "mixture: balances of one process", apart == 0, words, float(apart), 0.0)

    def gradref(self) -> Iterator[Check]:
        """A reduced gradient is the mean over all tokens, whatever the ranks' shapes."""
        for name in ("unequal", "lengths"):
            run, plan = self._run(name), self._plans[name]
            right = compare.gradient_by_hand(plan, [self._bench.text], self._kind)
            apart = self._bench.meeting.gather(compare.furthest(run.watch.gradients, right))
            rank = int(np.argmax([value for value, _ in apart]))  # of NaN too
            worst, where = apart[rank]
            words = f"rank {rank}: {worst:.1e} from the sum by hand, in {where}"
            bound = self._bounds["gradient"]
            title = f"{name}: gradient of {_shapes(plan)} is the mean over tokens"
            yield Check("gradref", title, worst <= bound, _with_end(words, run), worst, bound)

    def nan(self) -> Iterator[Check]:
        """A rank whose loss is not finite is answered by all ranks at the same step."""
        culprit, step = self._bench.size - 1, POISONED_STEPS // 2
        wanted = f"rank {culprit}: loss is not finite at step {step + 1}"
        run = self._poisoned("stop", culprit, step)
        odd = [rank for rank, row in enumerate(run.rows) if row["reason"] != wanted or len(row["losses"]) != step]
        words = f"every rank stopped before step {step + 1}" if not odd else _told_by(run, odd)
        yield Check("nan", "stop: all ranks stop at once, naming the rank", not odd, words)
        run = self._poisoned("skip", culprit, step)
        odd = [rank for rank, row in enumerate(run.rows) if not _skipped(row, step)]
        words = f"every rank left out step {step + 1} alone" if not odd else _told_by(run, odd)
        yield Check("nan", "skip: all ranks leave out that step", not odd, words)
        yield replace(_identical("skip", run, POISONED_STEPS), mode="nan")

    def refusals(self) -> Iterator[Check]:
        """What a fleet cannot have is refused by every rank, before anything is built."""
        for row in self._refused:
            found = ", ".join(row["found"]) or "nothing"
            passed = row["wanted"] in row["found"]
            words = f"refused ({row['wanted']})" if passed else f"not refused ({row['wanted']}), but {found}"
            yield Check("refusals", f"planning: {row['what']}", passed, words)
        first, last = self._plans["equal"], self._bench.rank == self._bench.size - 1
        another = altered(first, {"/workload/seed": 2}) if last else first
        cases = [
            ("ranks that read different plans", another, "digest-disagrees"),
            ("a plan of one rank on a fleet", self._plans["equal alone"], "world-mismatch"),
            ("a capacity of experts", _with(self._plans["mixture"], "moe_capacity", 1.0), "moe-capacity-fleet"),
        ]
        if self._kind == "cpu":
            cases.append(("a card's AdamW on CPU ranks", _with(first, "adamw", "fused"), "adamw-fused"))
        for what, plan, code in cases:
            run = self._bench.together(plan)
            odd = [rank for rank, row in enumerate(run.rows) if code not in row["refusals"]]
            words = f"refused by every rank ({code})" if not odd else f"not refused ({code}): {_told_by(run, odd)}"
            yield Check("refusals", f"at the start: {what}", not odd, words)

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            plain = name == "unlike" and self._bench.rank == self._bench.size - 1
            self._runs[name] = self._bench.together(self._plans[name], plain_products=plain)
        return self._runs[name]

    def _pair(self, name: str) -> tuple[Run, Run | None]:
        run = self._run(name)
        if name not in self._alone:
            self._alone[name] = self._bench.alone(self._plans[f"{name} alone"])
        return run, self._alone[name]

    def _poisoned(self, answer: str, culprit: int, step: int) -> Run:
        watch = Poison(step) if self._bench.rank == culprit else None
        self._runs[answer] = self._bench.together(self._plans[answer], watch)
        return self._runs[answer]

    def _told(self, compute: Callable[[], Any]) -> Any:
        """What the first rank computes, on every rank."""
        return self._bench.meeting.gather(compute() if self._bench.rank == 0 else None)[0]

    def _bounded(
        self,
        mode: str,
        title: str,
        what: str,
        run: Run,
        one: Run | None,
        apart: Callable[[Run, Run], tuple[float, str]],
    ) -> Check:
        value, where = self._told(lambda: apart(run, one) if one else None)
        bound = self._bounds[what]
        return Check(mode, title, value <= bound, _with_end(f"{value:.1e} apart, at {where}", run), value, bound)


def _losses_apart(run: Run, one: Run) -> tuple[float, str]:
    return compare.losses_apart(run.watch.losses, one.watch.losses)


def _weights(run: Run, one: Run) -> tuple[float, str]:
    return compare.weights_apart(run.watch.weights, one.watch.weights, one.watch.gradients)


def _identical(name: str, run: Run, steps: int) -> Check:
    """Equal fingerprints after each of ``steps`` steps, as seen from outside, whatever the ranks themselves found."""
    prints = [row["fingerprints"] for row in run.rows]
    apart = compare.steps_apart(prints)
    whole = not apart and all(len(mine) == steps for mine in prints) and run.ended is None
    words = f"{min(map(len, prints)) - len(apart)} of {steps} steps" if not apart else _first_apart(prints, apart[0])
    return Check("identity", f"{name}: the same weights on every rank", whole, _with_end(words, run))


def _first_apart(prints: list[list[str]], step: int) -> str:
    at = [mine[step - 1] if len(mine) >= step else "" for mine in prints]
    odd = [str(rank) for rank, digest in enumerate(at) if digest != at[0]]
    return f"rank {', '.join(odd)} differs from rank 0 after step {step}"


def _skipped(row: Mapping[str, Json], step: int) -> bool:
    prints = row["fingerprints"]
    if row["outcome"] != "finished" or len(prints) != POISONED_STEPS:
        return False
    moved = [mine != other for mine, other in pairwise(prints)]
    return moved == [place != step - 1 for place in range(POISONED_STEPS - 1)]


def _told_by(run: Run, ranks: list[int]) -> str:
    rank = ranks[0]
    row = run.rows[rank]
    return f"rank {rank} {row['outcome']} after {len(row['losses'])} steps: {row['reason'] or 'no reason'}"


def _with_end(words: str, run: Run) -> str:
    return words if run.ended is None else f"{words}; the run ended: {run.ended}"


def _with(plan: Mapping[str, Json], key: str, value: Any) -> dict[str, Json]:
    """``plan`` as other hands could have sealed it, with one key of the configuration changed."""
    return altered(plan, {f"/workload/config/{key}": value})


def _shapes(plan: Mapping[str, Json]) -> str:
    ranks = sum(len(entry["members"]) for entry in plan["ranks"])
    entries = [next(item for item in plan["ranks"] if rank in item["members"]) for rank in range(ranks)]
    return ", ".join(f"{item['batch']['chosen']}x{item['seq']['chosen']}" for item in entries)
