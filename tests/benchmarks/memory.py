"""How true the prediction of memory is: ``python tests/benchmarks/memory.py --out memory.json``.

Each case is planned by the command line and run by the executor, in processes of their own. The runtime's own readings
stand beside what the plan foretold; what the allocator reserved is noted at the same two marks. A case with mechanisms
asks for them by name. "off" is predicted over measured, less one: below 0 the plan promised too little.

Beside them are other estimators, each by its own code, where that is installed and no mechanism is engaged: torch's
MemTracker on fake tensors, ``accelerate estimate-memory``, DeepSpeed's estimate for ZeRO 2 on one card.

``--drawn SEED`` adds eight models drawn at random. ``--budgets N`` draws N more and plans each with the least
``--fit`` that takes it. That many bytes are then all that the run gets, as if the card had no more: it must not run out
of them. With a load foretold to take a tenth more than all of it, it must. ``--presets`` does so with the presets in
the budgets of a small card; what lies outside of torch's allocator, CUDA's context above all, is no part of either.

``--resume`` takes the cases of an earlier record as done. ``--jobs`` runs several at a time on one card: their bytes
are their own, their step times are not. Of those that ran alone, what mechanisms cost in time is told too. ``--render
memory.json`` prints the page of a record. On a CPU, to see that it works: ``--device cpu --small``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_cases import CASES, PRESETS, Case, case, drawn, smaller
from memory_one import PROCESS_SLACK
from memory_page import ESTIMATORS, render, told

from planner.passes.budget import needed

HOME = Path(__file__).resolve().parents[2]
ONE = Path(__file__).with_name("memory_one.py")
STEPS = 10  # one is the profiler's on a CPU, two are outside the measuring window
RUN_SECONDS, PLAN_SECONDS = 400, 200
NOTCH = 1.1  # of a budget, the load that must fail
_ABOUT = __doc__ or ""
_SHORT = re.compile("out of memory|does not hold the run|can.t allocate|cannot allocate|MemoryError", re.I)


class Workshop(NamedTuple):
    """Where plans are made and run: a folder, and the record of this machine. ``slack``: bytes that a run may take
    beyond its cap; ``allocator``: how the device's memory grows;
    ``alone``: nothing else runs meanwhile, so that a step's time is its own."""

    folder: Path
    record: Path
    slack: int
    allocator: str
    alone: bool

    def plan(self, name: str, wanted: Case, *more: str) -> tuple[Path | None, str]:
        """(the plan's file, None where it was refused; what the command said)."""
        path = self.folder / f"{name}.json"
        # As many windows as a batch has, so that the evaluation compiles no kernel anew.
        keys = {**wanted.keys, "eval_windows": wanted.batch, "keep_model": "none"}
        words = ["--devices", str(self.record), "--model", wanted.model, "--batch", str(wanted.batch)]
        words += ["--seq", str(wanted.seq), "--steps", str(STEPS)]
        words += [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        done = _called([sys.executable, "-m", "planner", *words, *wanted.more, *more], PLAN_SECONDS)
        if done.returncode:
            return None, done.stderr
        path.write_text(done.stdout, encoding="utf-8")
        return path, done.stderr

    def run(self, path: Path, cap: int | None = None) -> dict[str, Any]:
        """The row of one run of the plan at ``path``: how it ended, what it measured, what the allocator told."""
        folder, seen = path.with_suffix(f".{cap or 'run'}"), path.with_suffix(".seen")
        words = [sys.executable, str(ONE), "run", str(path), str(folder), str(seen), *([str(cap)] if cap else [])]
        start = time.perf_counter()
        done = _called(words, RUN_SECONDS)
        row: dict[str, Any] = {"ended": done.returncode, "seconds": time.perf_counter() - start, "alone": self.alone}
        if done.returncode:
            row["said"] = done.stderr[-2000:]
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        row["measured"] = runs[-1]["measured"] if runs else {}
        row["seen"] = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {}
        seen.unlink(missing_ok=True)
        return row


def _called(words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, cwd=HOME, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(words, 124, "", f"not done within {late.timeout:g} s")


def predicted(path: Path) -> dict[str, Any]:
    """Every reading of the rank's memory and step by its place below the rank, and what was decided for it."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    rank = plan["ranks"][0]
    found = {place: value for part in ("memory", "step") for place, value in _readings(rank[part], part)}
    chosen = [*plan["fit"]["mechanisms"]["chosen"], *rank["mechanisms"]["chosen"]]
    kernels = {name: item["chosen"] for name, item in rank["kernels"].items()}
    return {"readings": found, "mechanisms": chosen, "kernels": kernels, "dtype": rank["dtype"]["chosen"],
            "parameters": plan["workload"]["parameters"]["total"]["value"]}  # fmt: skip


def _readings(item: Any, place: str) -> Iterator[tuple[str, float | None]]:
    """(place, value) of each reading below ``item``."""
    if isinstance(item, dict) and "basis" in item:
        yield place, item["value"]
    elif isinstance(item, dict):
        for name, inner in item.items():
            yield from _readings(inner, f"{place}/{name}")


def estimates(path: Path) -> dict[str, int | str]:
    done = _called([sys.executable, str(ONE), "estimate", str(path)], PLAN_SECONDS)
    if done.returncode:
        return dict.fromkeys(ESTIMATORS, (done.stderr.strip().splitlines() or ["no word"])[-1])
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured_case(shop: Workshop, wanted: Case, planned: Future[Any], others: ThreadPoolExecutor) -> Any:
    """The row of one case of the grid."""
    path, said = planned.result()
    row: dict[str, Any] = {"name": wanted.name, "case": wanted._asdict()}
    if path is None:
        return {**row, "refused": said[-2000:]}
    row["predicted"] = predicted(path)
    asked = None if shop.alone or row["predicted"]["mechanisms"] else others.submit(estimates, path)
    row |= shop.run(path)
    if shop.alone and not row["predicted"]["mechanisms"]:
        asked = others.submit(estimates, path)
    return {**row, "estimates": {} if asked is None else asked.result()}


# Budgets.


def budget_case(shop: Workshop, name: str, wanted: Case, share: float, policy: str) -> dict[str, Any]:
    """The row of one budget: what just holds must run in it, and one notch more must not."""
    row: dict[str, Any] = {"name": wanted.name, "case": wanted._asdict(), "policy": policy}
    path, said = shop.plan(name, wanted)
    if path is None:
        return {**row, "refused": said[-2000:]}
    row["free"] = predicted(path)["readings"]["memory/peak"]
    budget, path = _just_holds(shop, name, wanted, row["free"], share, policy)
    if path is None:
        return {**row, "refused": "it fits no budget below what it takes without one"}
    return row | _within(shop, path, wanted, budget)


def preset_case(shop: Workshop, place: int) -> dict[str, Any]:
    """The row of one of PRESETS."""
    line, size, policy = PRESETS[place]
    wanted, budget = case(line), size * 10**9
    path, said = shop.plan(f"preset-{place}", wanted, *_fit(budget, policy))
    row = {"name": wanted.name, "case": wanted._asdict(), "policy": policy}
    return {**row, "refused": said[-2000:]} if path is None else row | _within(shop, path, wanted, budget)


def _within(shop: Workshop, path: Path, wanted: Case, budget: int) -> dict[str, Any]:
    """How the plan at ``path`` ran with ``budget`` bytes and no more, and with a notch more load."""
    row = {"budget": budget, "predicted": predicted(path), **shop.run(path, budget)}
    row["held"] = row["ended"] == 0
    row["notch"] = _notch(shop, f"{path.stem}-notch", wanted, row["predicted"], budget)
    return row


def _just_holds(
    shop: Workshop, name: str, wanted: Case, free: int, share: float, policy: str
) -> tuple[int, Path | None]:
    """(the budget in bytes, the plan): from ``share`` of what the case takes on, the first that holds it, filled whole
    by the plan that it makes."""
    while share < 1.02:
        made, _ = shop.plan(name, wanted, *_fit(needed(share * free, shop.allocator), policy))
        if made is not None:
            budget = needed(predicted(made)["readings"]["memory/peak"], shop.allocator) + 10
            tight, _ = shop.plan(name, wanted, *_fit(budget, policy))
            return budget, tight
        share += 0.07
    return 0, None


def _fit(budget: int, policy: str) -> tuple[str, ...]:
    return ("--fit", f"{budget / 1e9:.9f}", "--fit-policy", policy)


def _notch(shop: Workshop, name: str, wanted: Case, before: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """The same work, mechanisms included, at the least batch that is foretold to take NOTCH of the budget."""
    names = before["mechanisms"]
    engaged = ("--mechanisms", ",".join(names)) if names else ()
    batch, peak = wanted.batch, before["readings"]["memory/peak"]
    steps: list[dict[str, Any]] = []
    while len(steps) < 8:
        batch = max(batch + 1, ceil(batch * min(4.0, NOTCH * (budget + shop.slack) / peak)))
        more = wanted._replace(batch=batch)
        path, said = shop.plan(name, more, *engaged)
        if path is None:
            return {"batch": batch, "refused": said[-1000:]}
        peak = predicted(path)["readings"]["memory/peak"]
        if peak >= NOTCH * (budget + shop.slack):
            done = shop.run(path, budget)
            short = bool(done["ended"]) and bool(_SHORT.search(done.get("said", "")))
            return {"batch": batch, "peak": peak, "failed": short, **done}
        steps.append({"batch": batch, "peak": peak})
    return {"batch": batch, "refused": f"no batch up to {batch} comes to {NOTCH:g} of it", "tried": steps}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=_ABOUT.partition(":")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="each case at a size for a CPU")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the list, from its beginning")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="a regular expression: of the list, the cases that have it"
    )
    parser.add_argument("--drawn", type=int, metavar="SEED", help="eight more cases, drawn with this seed")
    parser.add_argument("--budgets", type=int, default=0, metavar="N", help="how many budgets to try")
    parser.add_argument("--seed", type=int, default=0, help="of the budgets")
    parser.add_argument("--presets", action="store_true", help="the presets in budgets of small cards")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further case after so long")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--record", type=Path, help="a record of this machine, to plan by (default: probe it now)")
    parser.add_argument("--resume", type=Path, help="an earlier --out, whose cases are done")
    parser.add_argument("--out", type=Path, help="where all of it goes as JSON; the page goes beside it")
    parser.add_argument("--render", type=Path, help="print the page of this record, and run nothing")
    return parser.parse_args()


Work = Callable[[], dict[str, Any]]


def _work(
    options: argparse.Namespace, shop: Workshop, record: Mapping[str, Any], pools: Sequence[ThreadPoolExecutor]
) -> Iterator[tuple[str, str, Work]]:
    """(kind, name, what gives its row) of all that is not done yet, in order; the plans of the grid are made ahead."""
    planners, others = pools
    dice = random.Random(options.drawn)
    wanted = [found for found in CASES[: options.cases] if re.search(options.only, found.name)]
    wanted += [] if options.drawn is None else [drawn(dice) for _ in range(8)]
    wanted = [smaller(found) for found in wanted] if options.small else wanted
    for place, found in enumerate(wanted):
        if found.name not in record["cases"]:
            planned = planners.submit(shop.plan, f"case-{place}", found)
            yield "cases", found.name, partial(measured_case, shop, found, planned, others)
    dice = random.Random(options.seed)
    for place in range(options.budgets):
        found, share, policy = drawn(dice, False), dice.uniform(0.55, 1.0), dice.choice(("cheapest", "in-order"))
        found = smaller(found) if options.small else found
        name = f"{found.name} within {share:.3f}"
        if name not in record["budgets"]:
            yield "budgets", name, partial(budget_case, shop, f"budget-{place}", found, share, policy)
    for place, (line, size, policy) in enumerate(PRESETS if options.presets else ()):
        name = f"{line} within {size} GB {policy}"
        if name not in record["budgets"]:
            yield "budgets", name, partial(preset_case, shop, place)


def main() -> None:
    options = _options()
    if options.render is not None:
        print(render(json.loads(options.render.read_text(encoding="utf-8")), _ABOUT), end="")
        return
    start = time.perf_counter()
    record: dict[str, Any] = {"cases": {}, "budgets": {}}
    if options.resume is not None and options.resume.exists():
        record = json.loads(options.resume.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="dormouse-memory-") as folder:
        slack = PROCESS_SLACK if options.device == "cpu" else 0
        allocator = "none" if options.device == "cpu" else "expandable"
        alone = options.jobs == 1
        shop = Workshop(Path(folder), options.record or Path(folder, "record.json"), slack, allocator, alone)
        if options.record is None:
            words = ["probe", "--devices", _devices(options), *(("--benchmark",) if alone else ())]
            probed = _called([sys.executable, "-m", "planner", *words], PLAN_SECONDS)
            if probed.returncode:
                raise SystemExit(probed.stderr)
            shop.record.write_text(probed.stdout, encoding="utf-8")
        record["machine"] = _machine(shop.record, options)
        planners, others, runners = ThreadPoolExecutor(4), ThreadPoolExecutor(2), ThreadPoolExecutor(options.jobs)

        late: list[str] = []

        def done(kind: str, name: str, work: Work) -> None:
            if time.perf_counter() - start > 60 * options.minutes:
                late.append(name)
                return
            row = work()
            record[kind][name] = row
            print(f"{time.perf_counter() - start:5.0f} s  {name}: {told(row)}", file=sys.stderr, flush=True)
            _keep(record, options.out)

        work = list(_work(options, shop, record, (planners, others)))
        if alone:
            planners.shutdown()  # all is planned before: nothing runs beside what is timed
        for each in [runners.submit(done, *row) for row in work]:
            each.result()
        planners.shutdown(cancel_futures=True)
    if late:
        print(f"out of time: {len(late)} are left, from {late[0]} on", file=sys.stderr)
    print(render(record, _ABOUT), end="")


def _devices(options: argparse.Namespace) -> str:
    return "auto" if options.device == "cuda" else "cpu:1"


def _machine(path: Path, options: argparse.Namespace) -> str:
    """One line: the device, its toolchain, how many ran at a time."""
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {str(device["name"]["value"]) for device in found["devices"].values()}
    tools = {name: found["toolchain"].get(name, {}).get("value") for name in ("torch", "triton", "fla-core")}
    versions = ", ".join(f"{name} {version}" for name, version in tools.items() if version)
    return f"{', '.join(sorted(names))}; {versions}; {options.jobs} at a time."


def _keep(record: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(render(record, _ABOUT), encoding="utf-8")


if __name__ == "__main__":
    main()
