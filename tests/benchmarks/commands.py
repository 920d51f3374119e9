"""How long commands take: ``python tests/benchmarks/commands.py [REPEATS]``. Medians of whole processes, in seconds.

What binds: importing torch and counting the model (plan, account made anew); importing Python's own and the schema
validation (everything else).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(arguments: list[str], cache: str, stdout: Path | None = None) -> float:
    """Wall-clock seconds of one ``dormouse-plan`` with its caches under ``cache``."""
    environ = {**os.environ, "XDG_CACHE_HOME": cache}
    start = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dormouse-plan")), *arguments], env=environ, capture_output=True, check=True
    )
    spent = time.perf_counter() - start
    if stdout is not None:
        stdout.write_bytes(done.stdout)
    return spent


def main(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan, warm = Path(folder, "plan.json"), str(Path(folder, "warm"))
        ask = ["--devices", "cpu:2", "--fit", "16"]
        rows = {"plan, account made anew": [seconds(ask, str(Path(folder, str(i)))) for i in range(repeats)]}
        seconds(ask, warm, plan)
        rows["plan, account cached"] = [seconds(ask, warm) for _ in range(repeats)]
        for command in ("show", "verify", "diff"):
            rows[command] = [seconds([command, str(plan)], warm) for _ in range(repeats)]
    print(f"{os.cpu_count()} cores, {repeats} repeats: median (least to most), seconds")
    for name, spent in rows.items():
        print(f"{name:26} {statistics.median(spent):6.3f} ({min(spent):.3f} to {max(spent):.3f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
