"""How long large fleets take to plan: ``python tests/benchmarks/fleets.py``. Medians of three, in seconds.

What binds: reading every device's likeness once, and the 2^k corners of ranges; both grow with the ranks, not faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from planner.passes.compile import compile_plan
from schemas.form import render
from worlds import account, cluster, request


def main() -> None:
    before = None
    for nodes in (128, 256, 512, 1024):
        found, spent = cluster(nodes), []
        for _ in range(3):
            start = time.perf_counter()
            plan = compile_plan(request(batch=4), found, account())
            spent.append(time.perf_counter() - start)
        median = statistics.median(spent)
        growth = "" if before is None else f", {median / before:.2f} x half as many"
        print(f"{8 * nodes:6} ranks in {nodes:5} nodes: {median:.3f} s, {len(render(plan)) / 1e6:.2f} MB{growth}")
        before = median


if __name__ == "__main__":
    main()
