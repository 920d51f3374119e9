"""What launching Triton's kernels costs the host: ``python tests/benchmarks/launches.py [--model medium]``.

One plan is run by turns in processes of their own: with each kernel launched by Triton itself, as it would be called,
and launched again as it was first (``executor.kernels.relaunch``). Told are medians over the steps of a run, by the
host's clock, without waiting for the card: forward and backward, the optimizer, and within the first the launches. Both
must end with the same loss. On a CPU, where there are no such kernels, ``--device cpu`` shows that it works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor import launch
from executor.slices import rank_slice
from processes import environment
from schemas.store import load

WARM = 3  # first steps that are not counted
WAYS = ("by Triton", "again")


def one(plan: str, way: str) -> int:
    """Run ``plan`` in this process and print what its steps took the host, as JSON; gives the run's exit code."""
    own = rank_slice(load(plan), 0)
    launch.confine(own.device, own.kind, own.allocator)  # as the command itself does, before torch looks

    from executor import __main__ as command
    from executor import loop
    from executor.kernels.relaunch import Relaunched
    from executor.meter import Meter

    launched: list[float] = []
    marks: list[tuple[float, int, float]] = []  # at the end of backward: when, launches until then, their seconds
    rows: list[dict[str, float]] = []
    inner: Callable[..., Any] = Relaunched.__getitem__
    step, backward_done = loop.launch, Meter.backward_done

    def timed(kernel: Relaunched, grid: Any) -> Callable[..., Any]:
        call = inner(kernel, grid) if way == "again" else kernel.by_name(grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = call(*args, **kwargs)
            launched.append(time.perf_counter() - start)
            return found

        return run

    def done(meter: Meter) -> None:
        marks.append((time.perf_counter(), len(launched), sum(launched)))
        backward_done(meter)

    def whole(*args: Any, **kwargs: Any) -> Any:
        launched.clear()
        start = time.perf_counter()
        found = step(*args, **kwargs)
        turn, launches, seconds = marks[-1]
        rows.append({"compute": turn - start, "optimizer": time.perf_counter() - turn,
                     "launches": launches, "launching": seconds})  # fmt: skip
        return found

    Relaunched.__getitem__ = timed  # type: ignore[method-assign]
    Meter.backward_done = done  # type: ignore[method-assign, assignment]
    loop.launch = whole
    code = command.main([plan, "--run-dir", f"{plan}.{time.time_ns()}"])
    found = {name: median(row[name] for row in rows[WARM:]) for name in rows[0]}
    print(json.dumps(found | {"loss": load(plan)["runs"][-1]["final_loss"]}), flush=True)
    return code


def _asked(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="medium")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("PLAN", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        launch.vanish(one(*options.one))
    devices = "auto" if options.device == "cuda" else "cpu:1"
    words = ["--devices", devices, "--model", options.model, "--steps", str(options.steps)]
    words += ["--set", "keep_model=none", "--set", "eval_windows=8"]
    print("| launched | forward and backward, ms | optimizer, ms | launches | in all, ms | each, us | loss |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "plan.json").write_text(_asked([sys.executable, "-m", "planner", *words], folder), encoding="utf-8")
        for way in WAYS * options.turns:
            told = _asked([sys.executable, str(Path(__file__).resolve()), "--one", "plan.json", way], folder)
            row = json.loads(told.splitlines()[-1])
            each = f"{1e6 * row['launching'] / row['launches']:.0f}" if row["launches"] else "-"
            cells = [way, *(f"{1e3 * row[name]:.2f}" for name in ("compute", "optimizer")), f"{row['launches']:.0f}"]
            cells += [f"{1e3 * row['launching']:.2f}", each, str(row["loss"])]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
