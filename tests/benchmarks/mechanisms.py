"""What each memory mechanism saves and costs, predicted and measured: ``python tests/benchmarks/mechanisms.py``.

One process runs the same work without any mechanism, under each one alone, and without any again: the last tells how
far the machine drifts meanwhile. What one saves is the peak without it less the peak with it, what it costs the same of
a step's seconds; both as the plan foretold and as the runtime's own readings have them. Plans are made by the command
line, on a record that is timed now (``--record`` gives another). Times are medians of the steps after warm-up.

On a CPU, to see that it works: ``--device cpu --set layers=2 --set width=64 --set heads=2 --set expert_ffn=32``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor import launch
from executor.slices import rank_slice
from schemas.store import load

HOME = Path(__file__).resolve().parents[2]
NONE, AGAIN = "none", "none again"
NAMES = ("moe_offload", "engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt", "recompute")


def planned(folder: Path, record: Path, name: str, options: argparse.Namespace) -> Path | str:
    """The plan under ``name``'s mechanism, or why there is none."""
    words = ["--devices", str(record), "--model", options.model, "--steps", str(options.steps)]
    words += ["--set", "keep_model=none", *(part for text in options.set for part in ("--set", text))]
    words += ["--batch", str(options.batch), "--seq", str(options.seq), "--set", f"eval_windows={options.batch}"]
    words += [] if name in (NONE, AGAIN) else ["--mechanisms", name]
    done = _planner(words)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    path = folder / f"{name.replace(' ', '-')}.json"
    path.write_text(done.stdout, encoding="utf-8")
    return path


def _planner(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *words], cwd=HOME, capture_output=True, text=True, check=False
    )


def measured(path: Path) -> dict[str, Any]:
    """Predicted and measured peak, step and parts of it, of one run of the plan in this process."""
    from executor.run import Places, execute

    plan = load(path)
    done = execute(plan, Places(None, path.with_suffix("")))
    lines = {} if done.entry is None else done.entry["measured"]
    keys = ("memory/peak", "memory/reserved", "step/total", "step/compute", "step/optimizer")
    found = {key: lines.get(f"/ranks/0/{key} @0") for key in keys}
    return {"outcome": done.outcome, "reason": done.reason, "worth": plan["ranks"][0].get("worth", {}), **found}


def render(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    rows = record["rows"]
    base, again = rows.get(NONE), rows.get(AGAIN)
    lines = ["# What mechanisms save and cost", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [f"{record['machine']}; {record['what']}.", ""]
    lines += ["| mechanism | saves MiB, predicted | measured | off | costs ms a step, predicted | measured |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        if "refused" in row:
            lines.append(f"| {name} | {row['refused'][:80]} | | | | |")
        elif row is base or base is None:
            step, peak = row["step/total"], row["memory/peak"]
            lines.append(f"| {name} | peak {_mib(peak, 'predicted')} | {_mib(peak, 'value')} | | "
                         f"step {_ms(step, 'predicted')} | {_ms(step, 'value')} |")  # fmt: skip
        else:
            saves, costs = (_less(base, row, key) for key in ("memory/peak", "step/total"))
            off = "" if not saves[1] else f"{saves[0] / saves[1] - 1:+.2%}"
            lines.append(f"| {name} | {saves[0] / 2**20:,.1f} | {saves[1] / 2**20:,.1f} | {off} | "
                         f"{-1e3 * costs[0]:+.1f} | {-1e3 * costs[1]:+.1f} |")  # fmt: skip
    if base is not None and again is not None and "step/total" in again:
        drift = again["step/total"]["value"] / base["step/total"]["value"] - 1
        lines += ["", f"Without any, the step took {drift:+.1%} when it was run again."]
    return "\n".join(lines) + "\n"


def _less(base: Mapping[str, Any], row: Mapping[str, Any], key: str) -> tuple[float, float]:
    """(predicted, measured) of ``base`` less that of ``row``."""
    return base[key]["predicted"] - row[key]["predicted"], base[key]["value"] - row[key]["value"]


def _mib(line: Mapping[str, Any] | None, key: str) -> str:
    return "" if line is None else f"{line[key] / 2**20:,.1f}"


def _ms(line: Mapping[str, Any] | None, key: str) -> str:
    return "" if line is None or line[key] is None else f"{1e3 * line[key]:.1f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="medium")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--record", type=Path, help="a record of this machine, to plan by (default: time it now)")
    parser.add_argument("--out", type=Path, help="where all of it goes as JSON; the page goes beside it")
    return parser.parse_args()


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="dormouse-mechanisms-") as text:
        folder = Path(text)
        record = options.record or folder / "record.json"
        if options.record is None:
            devices = "auto" if options.device == "cuda" else "cpu:1"
            record.write_text(_planner(["probe", "--benchmark", "--devices", devices]).stdout, encoding="utf-8")
        with ThreadPoolExecutor(4) as pool:
            names = (NONE, *NAMES, AGAIN)
            plans = dict(zip(names, pool.map(lambda name: planned(folder, record, name, options), names), strict=True))
        first = next(path for path in plans.values() if isinstance(path, Path))
        own = rank_slice(load(first), 0)
        launch.confine(own.device, own.kind, own.allocator)
        found: dict[str, Any] = {
            "machine": ", ".join(sorted({item["name"]["value"] for item in load(first)["fleet"]["devices"].values()})),
            "what": f"{options.model}, {options.batch} x {options.seq}, {own.dtype}", "rows": {},
        }  # fmt: skip
        for name, path in plans.items():
            found["rows"][name] = {"refused": path} if isinstance(path, str) else measured(path)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                options.out.with_suffix(".md").write_text(render(found), encoding="utf-8")
    print(render(found), end="")


if __name__ == "__main__":
    main()
