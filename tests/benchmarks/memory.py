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
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_one import PROCESS_SLACK

from planner.passes.budget import needed

HOME = Path(__file__).resolve().parents[2]
ONE = Path(__file__).with_name("memory_one.py")
STEPS = 10  # one is the profiler's on a CPU, two are outside the measuring window
RUN_SECONDS, PLAN_SECONDS = 400, 200
PEAK, STEP = "/ranks/0/memory/peak @0", "/ranks/0/step/total @0"
MARKS = ("backward_peak", "optimizer_peak", "peak")
ESTIMATORS = ("MemTracker", "accelerate", "DeepSpeed")
WORTH_TELLING = 0.001  # of a component, the least error that the page tells
NOTCH = 1.1  # of a budget, the load that must fail
_SHORT = re.compile("out of memory|does not hold the run|can.t allocate|cannot allocate|MemoryError", re.I)


class Case(NamedTuple):
    """A model at a batch and a length, with keys to set and further words of the command line; ``name`` stays what it
    is when sizes are made smaller."""

    name: str
    model: str
    batch: int
    seq: int
    keys: Mapping[str, str]
    more: tuple[str, ...] = ()


def case(line: str) -> Case:
    """``MODEL BxT [words]``; a word KEY=VALUE is a key to set."""
    model, shape, *words = line.split()
    batch, _, seq = shape.partition("x")
    keys = dict(word.split("=") for word in words if "=" in word)
    return Case(line.replace("--", ""), model, int(batch), int(seq), keys, tuple(w for w in words if "=" not in w))


# The most telling come first. FLA's kernels are tuned for heads of 64 channels, so tiny has two of them here.
CASES = tuple(map(case, (
    "medium 8x512",
    "b1 8x512",
    "small 8x512",
    "b1 8x512 --mechanisms moe_offload,engram_ram",
    "medium 8x512 --mechanisms act_ckpt",
    "medium 8x512 --mechanisms recompute",
    "medium 8x512 --mechanisms moe_offload",
    "medium 8x512 --dtype fp32",
    "medium 8x512 --dtype fp16",
    "medium 16x512",
    "medium 4x1024",
    "tiny 16x512 heads=2",
    "medium 8x512 --opt adamw",
    "medium 8x512 --mechanisms muon_state_bf16,optim_8bit",
    "medium 8x512 --mechanisms muon_state_bf16",
    "medium 8x512 --opt adamw --mechanisms optim_8bit",
    "medium 8x512 --mechanisms engram_ram",
    "small 8x512 --dtype fp32",
    "small 8x512 --mechanisms recompute",
    "b1 8x512 --mechanisms act_ckpt",
    "b1 8x512 --mechanisms recompute",
    "b1 4x1024",
    "small 32x512",
    "small 8x2048",
    "small 8x512 --dtype fp16 --mechanisms act_ckpt",
    "small 8x512 --opt adamw --mechanisms optim_8bit",
    "small 8x512 --mechanisms engram_ram",
    "medium 8x512 kda=chunk_torch",
    "medium 16x512 --mechanisms moe_offload,engram_ram,muon_state_bf16,optim_8bit,act_ckpt",
    "b1 16x512 --mechanisms moe_offload,act_ckpt",
    "b1 8x512 --opt adamw",
    "tiny 4x128 heads=2 --dtype fp32",
    "tiny 16x512 heads=2 --opt adamw",
    "tiny 16x512 heads=2 --dtype fp16 --mechanisms recompute",
)))  # fmt: skip

PRESETS = (
    ("medium 8x512", 4, "in-order"),
    ("b1 8x512", 16, "in-order"),
    ("b1 8x512", 16, "cheapest"),
)
"""What must run in a budget of so many GB."""

_DENSE = {"layers": "2", "width": "64", "heads": "2", "ffn": "128"}
_TABLE = {"engram_rows": "500", "engram_heads": "1", "engram_dim": "16"}
_ROUTED = {"layers": "2", "width": "64", "heads": "2", **_TABLE, "experts": "4", "expert_ffn": "32"}
SMALL = {"tiny": _DENSE, "small": {**_DENSE, **_TABLE}, "medium": _ROUTED, "b1": {**_ROUTED, "layers": "3"}}
_KEPT = ("layers", "experts", "engram_rows")  # what a smaller case keeps of the sizes that it was given


def smaller(found: Case) -> Case:
    """The same case at a size that a CPU runs in seconds."""
    kept = {key: found.keys[key] for key in _KEPT if key in found.keys}
    keys = read({**found.keys, **SMALL[found.model], **kept})
    # Not smaller, or the account's forms are not exact.
    return found._replace(batch=max(4, found.batch // 4), seq=max(64, found.seq // 8), keys=keys)


def read(keys: Mapping[str, str]) -> dict[str, str]:
    """``keys`` without those that others leave unread: a plan refuses them."""
    unread = {"topk", "expert_ffn"} if keys.get("experts") == "0" else {"ffn"} if "experts" in keys else set()
    unread |= {"engram_heads", "engram_dim"} if keys.get("engram_rows") == "0" else set()
    return {key: value for key, value in keys.items() if key not in unread}


def drawn(dice: random.Random, mechanisms: bool = True) -> Case:
    """A case with sizes drawn at random, and mechanisms that go together."""
    heads, layers, experts = dice.choice((8, 12, 16, 24)), dice.randint(1, 6), dice.choice((0, 8, 16))
    dtype, opt = dice.choice(("bf16", "bf16", "bf16", "fp16", "fp32")), dice.choice(("muon", "muon", "adamw"))
    table = dice.choice((0, 0, 20011, 50021))
    keys = {
        "layers": layers, "heads": heads, "width": 64 * heads, "experts": experts, "topk": dice.choice((1, 2)),
        "ffn": 64 * dice.randint(8, 40), "expert_ffn": 16 * dice.randint(10, 50), "engram_rows": table,
    }  # fmt: skip
    words = [f"medium {dice.choice((2, 4, 8, 12, 16))}x{dice.choice((256, 512, 1024))}"]
    words += [f"{key}={value}" for key, value in read({key: str(value) for key, value in keys.items()}).items()]
    words += [f"--dtype {dtype} --opt {opt}"]
    offered = {"act_ckpt": True, "recompute": True, "moe_offload": experts and layers > 1, "engram_ram": table}
    offered |= {"muon_state_bf16": opt == "muon", "optim_8bit": True}
    engaged = {name for name, there in offered.items() if there and dice.random() < 0.3}
    if "recompute" in engaged:
        engaged -= {"act_ckpt", "moe_offload"}
    words += [f"--mechanisms {','.join(sorted(engaged))}"] if engaged and mechanisms else []
    return case(" ".join(words))


# Planning and running.


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
    asked = None if row["predicted"]["mechanisms"] else others.submit(estimates, path)
    row |= shop.run(path)
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
    return {"batch": batch, "refused": f"no batch comes to {NOTCH:g} of the budget: {steps}"}


# What is told.


def off(row: Mapping[str, Any], place: str) -> float | None:
    """Predicted over measured, less one; None where either is not there."""
    line = row.get("measured", {}).get(f"/ranks/0/{place} @0")
    if line is None or not line["value"] or line["predicted"] is None:
        return None
    return float(line["predicted"] / line["value"] - 1)


def errors(rows: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any] | None:
    """Of all rows that have both: the median and the worst by size, and the worst of those promised too little."""
    found = [(error, row["name"]) for row in rows if (error := off(row, place)) is not None]
    if not found:
        return None
    lines = (row["measured"][f"/ranks/0/{place} @0"] for row in rows if off(row, place) is not None)
    inside = sum(line.get("low", line["predicted"]) <= line["value"] <= line.get("high", line["predicted"])
                 for line in lines)  # fmt: skip
    return {"cases": len(found), "median": median(abs(error) for error, _ in found), "inside": inside,
            "worst": max(found, key=lambda pair: abs(pair[0])), "under": min(found)}  # fmt: skip


def render(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    _, *reading = (__doc__ or "").split("\n\n")
    rows, budgets = list(record["cases"].values()), list(record["budgets"].values())
    done = [row for row in rows if row.get("measured") and row["ended"] == 0]
    lines = ["# Memory, predicted and measured", "", *"\n\n".join(reading[:3]).splitlines(), "", record["machine"], ""]
    lines += [f"{len(done)} of {len(rows)} cases ran.", "", *_summary(done), "", *_grid(rows)]
    lines += ["", "## What mechanisms save", "", *_savings(done)]
    if budgets:
        lines += ["", "## Budgets", "", *_of_budgets(budgets)]
    refused = [row for row in (*rows, *budgets) if "refused" in row or row.get("ended")]
    if refused:
        lines += ["", "## Not run, or not to the end", ""]
        lines += [f"- {row['name']}: {_last(row.get('refused') or row.get('said', ''))}" for row in refused]
    return "\n".join(lines) + "\n"


def _last(text: str) -> str:
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "no word")


def _summary(done: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| | cases | median | worst | lowest | within the plan's range |", "|---|--:|--:|---|---|--:|"]
    for place in (
        *(f"memory/{mark}" for mark in MARKS),
        "memory/reserved",
        "memory/hosted",
        "memory/pinned",
        "memory/host",
    ):
        found = errors(done, place)
        if found is not None:
            worst, under = (f"{error:+.2%} {name}" for error, name in (found["worst"], found["under"]))
            lines.append(
                f"| {place} | {found['cases']} | {found['median']:.2%} | {worst} | {under} | {found['inside']} |"
            )
    for name in ESTIMATORS:
        found_by = [(row["estimates"][name] / _peak(row) - 1, row["name"]) for row in done
                    if isinstance(row["estimates"].get(name), int) and _peak(row)]  # fmt: skip
        if found_by:
            worst, under = (f"{error:+.2%} {case}" for error, case in
                            (max(found_by, key=lambda pair: abs(pair[0])), min(found_by)))  # fmt: skip
            middle = median(abs(error) for error, _ in found_by)
            lines.append(f"| {name}: peak | {len(found_by)} | {middle:.2%} | {worst} | {under} | |")
        else:
            words = {str(row["estimates"][name]) for row in done if name in row["estimates"]}
            lines.append(f"| {name}: peak | 0 | | {'; '.join(sorted(words))} | | |")
    return lines


def _peak(row: Mapping[str, Any]) -> float:
    line = row["measured"].get(PEAK)
    return float(line["value"]) if line else 0.0


def _grid(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "MiB, as predicted / measured. Reserved is the allocator's highest in backward or the optimizer; what is "
        "beside it (CUDA's context) is no part of it.", "",
        "| case | backward peak | off | optimizer peak | off | other components off | reserved | off | retries "
        "| MemTracker |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    return [*lines, *(_row(row) for row in rows if row.get("measured"))]


def _row(row: Mapping[str, Any]) -> str:
    cells = [row["name"]]
    for mark in MARKS[:2]:
        cells += [_pair(row, f"memory/{mark}"), _percent(off(row, f"memory/{mark}"))]
    others = [label.split(" @")[0].removeprefix("/ranks/0/memory/") for label in row["measured"] if "/memory/" in label]
    wrong = {name: off(row, f"memory/{name}") for name in others if name not in (*MARKS, "reserved")}
    cells.append(", ".join(f"{name} {_percent(error)}" for name, error in wrong.items()
                           if error and abs(error) >= WORTH_TELLING))  # fmt: skip
    cells += [_pair(row, "memory/reserved"), _percent(off(row, "memory/reserved"))]
    cells.append(str(row["seen"].get("retries", "")))
    told = row["estimates"].get("MemTracker")
    cells.append(_percent(told / _peak(row) - 1) if isinstance(told, int) and _peak(row) else "")
    return f"| {' | '.join(cells)} |"


def _savings(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each case with mechanisms that has its like without: the peak without less the peak with, and where both ran
    alone how much longer a step is."""
    alone = {row["name"]: row for row in done if not row["predicted"]["mechanisms"]}
    lines = ["The peak without less the peak with them, of the same work; and what they add to a step, of those that "
             "ran alone.", "", "| case | MiB, predicted | measured | off | ms a step, predicted | measured | of |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for row in done:
        base = alone.get(row["name"].partition(" mechanisms ")[0])
        if base is None or not row["predicted"]["mechanisms"]:
            continue
        told, seen = (base["measured"][PEAK][key] - row["measured"][PEAK][key] for key in ("predicted", "value"))
        error = f"{told / seen - 1:+.2%}" if seen else ""
        saves = f"{told / 2**20:,.1f} | {seen / 2**20:,.1f} | {error}"
        lines.append(f"| {row['name']} | {saves} | {' | '.join(_added(base, row))} |")
    return lines


def _added(base: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Milliseconds that ``row``'s step has beyond ``base``'s, predicted and measured, and ``base``'s."""
    if not (base.get("alone") and row.get("alone")):
        return "", "", ""
    told, seen = (row["measured"][STEP][key] - base["measured"][STEP][key] for key in ("predicted", "value"))
    return f"{1e3 * told:+.1f}", f"{1e3 * seen:+.1f}", f"{1e3 * base['measured'][STEP]['value']:.1f}"


def _pair(row: Mapping[str, Any], place: str) -> str:
    line = row["measured"].get(f"/ranks/0/{place} @0")
    return "" if line is None else f"{line['predicted'] / 2**20:,.1f} / {line['value'] / 2**20:,.1f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _of_budgets(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    run = [row for row in rows if "held" in row]
    tried = [row["notch"] for row in run if "failed" in row["notch"]]
    lines = [
        f"{sum(row['held'] for row in run)} of {len(run)} plans held in their budget, of {len(rows)} drawn; "
        f"{sum(notch['failed'] for notch in tried)} of {len(tried)} ran out of memory a notch above it.", "",
        "| case | budget MiB | mechanisms | peak predicted / measured | reserved of the budget | retries | held "
        "| notch: batch, peak of the budget | failed |",
        "|---|--:|---|--:|--:|--:|---|--:|---|",
    ]  # fmt: skip
    for row in run:
        marks = [sizes["reserved_bytes"] for sizes in row["seen"].get("marks", {}).values()]
        notch, budget = row["notch"], row["budget"]
        above = f"{notch['batch']}, {notch['peak'] / budget:.2f}" if "peak" in notch else notch["refused"][-80:]
        cells = (
            row["name"], f"{budget / 2**20:,.1f}", ", ".join(row["predicted"]["mechanisms"]),
            _pair(row, "memory/peak"), f"{max(marks) / budget:.2f}" if marks else "",
            str(row["seen"].get("retries", "")), "yes" if row["held"] else "NO", above,
            {True: "yes", False: "NO"}.get(notch.get("failed"), ""),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# All of it.


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="each case at a size for a CPU")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the list, from its beginning")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the list, the cases whose names hold this")
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
    wanted = [found for found in CASES[: options.cases] if options.only in found.name]
    wanted += [] if options.drawn is None else [drawn(dice) for _ in range(8)]
    wanted = [smaller(found) for found in wanted] if options.small else wanted
    for place, found in enumerate(wanted):
        if found.name not in record["cases"]:
            planned = planners.submit(shop.plan, f"case-{place}", found)

            def grid(found: Case = found, planned: Future[Any] = planned) -> dict[str, Any]:
                return measured_case(shop, found, planned, others)

            yield "cases", found.name, grid
    dice = random.Random(options.seed)
    for place in range(options.budgets):
        found, share, policy = drawn(dice, False), dice.uniform(0.55, 1.0), dice.choice(("cheapest", "in-order"))
        found = smaller(found) if options.small else found
        name = f"{found.name} within {share:.3f}"
        if name not in record["budgets"]:

            def within(
                place: int = place, found: Case = found, share: float = share, policy: str = policy
            ) -> dict[str, Any]:
                return budget_case(shop, f"budget-{place}", found, share, policy)

            yield "budgets", name, within
    for place, (line, size, policy) in enumerate(PRESETS if options.presets else ()):
        name = f"{line} within {size} GB {policy}"
        if name not in record["budgets"]:
            yield "budgets", name, lambda place=place: preset_case(shop, place)


def main() -> None:
    options = _options()
    if options.render is not None:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))), end="")
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
        planners, others, runners = ThreadPoolExecutor(2), ThreadPoolExecutor(2), ThreadPoolExecutor(options.jobs)

        late: list[str] = []

        def done(kind: str, name: str, work: Work) -> None:
            if time.perf_counter() - start > 60 * options.minutes:
                late.append(name)
                return
            row = work()
            record[kind][name] = row
            print(f"{time.perf_counter() - start:5.0f} s  {name}: {_told(row)}", file=sys.stderr, flush=True)
            _keep(record, options.out)

        waiting = [runners.submit(done, *work) for work in _work(options, shop, record, (planners, others))]
        for each in waiting:
            each.result()
        planners.shutdown(cancel_futures=True)
    if late:
        print(f"out of time: {len(late)} are left, from {late[0]} on", file=sys.stderr)
    print(render(record), end="")


def _devices(options: argparse.Namespace) -> str:
    return "auto" if options.device == "cuda" else "cpu:1"


def _machine(path: Path, options: argparse.Namespace) -> str:
    """One line: the device, its toolchain, how many ran at a time."""
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {str(device["name"]["value"]) for device in found["devices"].values()}
    tools = {name: found["toolchain"].get(name, {}).get("value") for name in ("torch", "triton", "fla-core")}
    versions = ", ".join(f"{name} {version}" for name, version in tools.items() if version)
    return f"{', '.join(sorted(names))}; {versions}; {options.jobs} at a time."


def _told(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return f"refused: {_last(row['refused'])}"
    if "held" in row:
        return f"held {row['held']}, a notch above failed {row['notch'].get('failed')}"
    return f"ended {row['ended']}, peak off {_percent(off(row, 'memory/peak'))}, {row['seconds']:.0f} s"


def _keep(record: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
