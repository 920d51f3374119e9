"""Which size of bucket is best: ``python tests/benchmarks/buckets.py --out DIR``; again with NCCL_P2P_DISABLE=1 set.

A plan of each model is made by the command line and changed in one decision, the bytes of a bucket. Each is run by the
executor's own ``execute`` on two ranks, one after the other in one process a rank, so that nothing else differs: what
is compiled is compiled once. The first size is run twice, and its first run is left out.

The path is the one that the plan finds: NCCL's settings are this process's own. `buckets-PATH.md` holds the table, and
`buckets-PATH.json` the rows that the planner's rule is made of; ``--keep`` puts them into planner/passes/buckets.json.
The best is the middle one, in the logarithm, of the sizes whose step is within 1 % of the fastest.

On a CPU, to see that it works: ``--cpu``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pair import CARDS, CPUS, MOST_RANKS, STAGED, Pair, done, planner

from executor import launch
from processes import ROOT, environment

MEGABYTES = (1, 4, 12, 25, 50, 100, 200)
CPU_MEGABYTES = (0.02, 0.1, 0.4)
KEPT = ROOT / "planner" / "passes" / "buckets.json"
NEAR = 0.01
_SECONDS = 540
_COLUMNS = ("buckets", "seconds", "hidden")
_SWEEP, _SEEN = "sweep.json", "seen.json"


def planned(pair: Pair, model: str, sizes: Sequence[int], text: Path) -> list[dict[str, Any]]:
    """The plan of ``model``, once a size of bucket."""
    from executor.gates.plans import altered

    staged = os.environ.get("NCCL_P2P_DISABLE") == "1"
    record = pair.record("staged", STAGED) if staged else pair.record("pair")
    words = ["--devices", record, *pair.setting.models[model], "--data", str(text)]
    keys = {"keep_model": "none", "fingerprint_every": "0", "eval_windows": "1", "log_every": "1000"}
    for key, value in keys.items():
        if f"{key}=" not in " ".join(words):
            words += ["--set", f"{key}={value}"]
    plan = json.loads(done(planner(words), pair.folder, {}).stdout)
    elements = plan["workload"]["parameters"]["total"]["value"]
    return [
        altered(plan, {"/exchange/bucket_bytes": size, "/exchange/buckets": -(-4 * elements // size)}) for size in sizes
    ]


def swept(folder: Path, plans: Sequence[dict[str, Any]], text: Path) -> list[dict[str, Any]]:
    """What the first rank measured of each of ``plans``, in order, by two ranks started by torch's launcher."""
    (folder / _SWEEP).write_text(json.dumps({"plans": plans, "text": str(text)}))
    command = [*launch.command(MOST_RANKS, [], "executor")[:-2], str(Path(__file__).resolve()), "--sweep", str(folder)]
    environ = launch.environment(os.environ, 1, ROOT)
    environ["PYTHONPATH"] = environment(Path(__file__).parent)["PYTHONPATH"]
    subprocess.run(command, cwd=folder, env=environ, check=True, timeout=_SECONDS)
    rows: list[dict[str, Any]] = json.loads((folder / _SEEN).read_text())
    return rows


def run(folder: Path) -> None:
    """One rank's part: every plan of ``folder``, one after the other."""
    job = json.loads((folder / _SWEEP).read_text())
    from executor.slices import rank_slice

    rank = int(os.environ["RANK"])
    own = rank_slice(job["plans"][0], rank)
    launch.confine(own.device, own.kind, own.allocator)
    from torch.distributed.distributed_c10d import PrefixStore

    from executor.gates.bench import Bench
    from executor.gates.compare import Watch
    from executor.meeting import Meeting, meet

    class Blind(Watch):
        """Keeps nothing: at a billion parameters, weights in float64 would be all that the host does."""

        def __call__(self, step: int, loss: float, model: Any) -> None:
            return

    _, store = meet(rank, MOST_RANKS)
    meeting = Meeting(rank, MOST_RANKS, PrefixStore("buckets", store))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    bench, rows = Bench(meeting, folder, Path(job["text"])), []
    for plan in job["plans"]:
        found = bench.together(plan, Blind())
        if found.ended is not None:
            raise SystemExit(f"rank {rank}: {found.ended}")
        rows.append(None if found.entry is None else found.entry["measured"])
        gc.collect()
        if found.entry is not None:
            print(_told(plan, found.entry["measured"]), flush=True)
    if rank == 0:
        (folder / _SEEN).write_text(json.dumps(rows))
    meeting.gather(None)
    meeting.leave()


def _told(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    size = plan["exchange"]["bucket_bytes"]["chosen"]
    return f"{plan['workload']['model']} {size / 1e6:g} MB: step {1e3 * measured['/step/seconds']['value']:.4g} ms"


def best(times: Mapping[int, float]) -> int:
    """The middle one of the sizes that are about as fast as the fastest."""
    near = sorted(size for size, seconds in times.items() if seconds <= (1 + NEAR) * min(times.values()))
    return near[len(near) // 2]


def table(model: str, plans: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"## {model}", "", "| bucket, MB | step, ms | 10 to 90 % | buckets | all-reduce, ms | hidden |"]
    lines.append("|---:|---:|---|---:|---:|---:|")
    for plan, row in zip(plans, rows, strict=True):
        step = row["/step/seconds"]
        count, seconds, hidden = (row[f"/exchange/{column}"]["value"] for column in _COLUMNS)
        ends = " to ".join(f"{1e3 * end:.4g}" for end in step.get("spread", ()))
        size = plan["exchange"]["bucket_bytes"]["chosen"] / 1e6
        cells = f"{1e3 * step['value']:.4g} | {ends} | {count} | {1e3 * seconds:.4g} | {hidden:.0%}"
        lines.append(f"| {size:g} | {cells} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="takes records, tables and rows")
    parser.add_argument("--models", default="medium,b1", metavar="MODEL[,...]")
    parser.add_argument("--megabytes", metavar="N[,...]", help="sizes of a bucket, in 10^6 bytes of fp32 gradients")
    parser.add_argument("--keep", action="store_true", help="put the rows into planner/passes/buckets.json")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks and a tiny model, to see that it works")
    parser.add_argument("--sweep", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sweep is not None:
        run(options.sweep)
        return
    from executor.gates.plans import corpus

    pair = Pair(options.out.resolve(), CPUS if options.cpu else CARDS)
    text = corpus(pair.folder)
    text.write_bytes(text.read_bytes() * 20)
    wanted = [float(size) for size in options.megabytes.split(",")] if options.megabytes else None
    sizes = [round(1e6 * size) for size in wanted or (CPU_MEGABYTES if options.cpu else MEGABYTES)]
    kept, lines, path = [], [], ""
    for model in options.models.split(","):
        plans = planned(pair, model, [sizes[0], *sizes], text)
        rows = swept(pair.folder, plans, text)
        exchange = plans[0]["exchange"]
        path = exchange["path"]["value"]
        lines += table(model, plans[1:], rows[1:])
        times = {size: row["/step/seconds"]["value"] for size, row in zip(sizes, rows[1:], strict=True)}
        device = next(iter(plans[0]["fleet"]["devices"].values()))["name"]["value"]
        origin = f"{model} on {MOST_RANKS} x {device}, {plans[0]['step']['global_batch']['value']} sequences a step"
        swept_row = {"path": path, "payload": exchange["payload"]["value"], "bucket_bytes": best(times)}
        kept.append({**swept_row, "seconds": [list(item) for item in times.items()], "origin": origin})
        (pair.folder / f"buckets-{path}.json").write_text(_rows(kept))
        (pair.folder / f"buckets-{path}.md").write_text("\n".join(lines))
    if options.keep:
        others = [row for row in json.loads(KEPT.read_text()) if row["path"] != path]
        KEPT.write_text(_rows([*others, *kept]))
    print("\n".join(lines))


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row a line."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return f"[\n{lines}\n]\n" if rows else "[]\n"


if __name__ == "__main__":
    main()
