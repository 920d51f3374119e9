"""Whether models learn, and what each part of one brings: ``python tests/benchmarks/learns.py --minutes 9``.

Plans and runs a preset and the same without one of its parts, by the commands that a user has, with the same steps,
batch, seeds and data, several at a time on one card (one layer leaves it idle most of the time). What is reported is
what the runs recorded, at the last step that all of them evaluated. Beside it stands what counting reaches on the very
same held-out windows: modified Kneser-Ney, once with contexts that begin where the window does, as a model's do, and
once with the bytes before the window in sight. Everything goes to DIR/learns.json, the table to DIR/learns.md.

On a CPU, to see that it works: ``--model tiny --steps 30 --windows 32 --jobs 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from kneser_ney import KneserNey

from executor.data import Corpus, Reader, open_corpus, stdlib_corpus
from executor.workloads import configure, resolve, values
from planner.data import first_held_out
from processes import ROOT, environment
from schemas.store import load

Settings = dict[str, str]
GRACE_SECONDS = 60.0  # a stopped run records itself, and may be in the middle of an evaluation


@dataclass
class Run:
    """One variant with one seed, and what became of it. ``outcome`` is the record's, or why there is none."""

    variant: str
    seed: int
    settings: Settings
    folder: Path
    outcome: str = "not started"
    process: subprocess.Popen[bytes] | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def evaluations(self) -> dict[int, float]:
        return {row["step"]: row["bits_per_byte"] for row in self.record.get("run", {}).get("evaluations", ())}


def variants(model: str, asked: Settings) -> dict[str, Settings]:
    """Settings by name: the whole model, then the same without one part. A part that the model has no keys for has no
    variant; one that the preset leaves out is put into the whole."""
    config = values(configure(resolve(model), asked))
    whole = dict(asked)
    if config.get("experts") == 0:  # as many parameters in use for a byte as the dense feed-forward has
        whole |= {"experts": "8", "topk": "2", "expert_ffn": str(int(config["ffn"]) // 2)}
    if config.get("engram_rows") == 0:
        whole |= {"engram_rows": "8192", "engram_heads": "2", "engram_dim": "32"}
    config = values(configure(resolve(model), whole))
    found = {"whole": whole}
    if "mixer" in config:
        found["without KDA (convolution alone)"] = whole | {"mixer": "conv"}
    if config.get("engram_rows"):
        found["without Engram"] = _without(whole, "engram_") | {"engram_rows": "0"}
    if config.get("experts"):
        dense = _without(whole, "moe_", "topk", "expert_ffn") | {"experts": "0"}
        wide, each = int(config["expert_ffn"]), {"active": "topk", "total": "experts"}
        for what, key in each.items():
            found[f"dense, equal {what} parameters"] = dense | {"ffn": str(wide * int(config[key]))}
    return found


def _without(settings: Settings, *begins: str) -> Settings:
    """``settings`` but for the keys of a part that is left out: beside its absence they would be refused."""
    return {key: text for key, text in settings.items() if not key.startswith(begins)}


def planned(run: Run, words: Sequence[str]) -> bool:
    """Whether ``run`` has a plan now; where it was refused, the message is its outcome."""
    run.folder.mkdir(parents=True, exist_ok=True)
    settings = [word for key, text in run.settings.items() for word in ("--set", f"{key}={text}")]
    command = [sys.executable, "-m", "planner", *words, "--seed", str(run.seed), *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False)
    run.record["command"] = command[1:]
    if done.returncode:
        run.outcome = f"no plan: {done.stderr.decode().strip()}"
        return False
    run.plan.write_bytes(done.stdout)
    return True


def carry_out(runs: Sequence[Run], jobs: int, deadline: float, data: Sequence[str]) -> None:
    """Run ``runs``, at most ``jobs`` at a time, until the ``deadline`` of `time.monotonic`: then all are stopped."""
    waiting, going = list(runs), list[Run]()
    with_log: list[IO[bytes]] = []
    while waiting or going:
        late = time.monotonic() > deadline
        while waiting and len(going) < jobs and not late:
            run = waiting.pop(0)
            log = (run.folder / "run.log").open("wb")
            with_log.append(log)
            command = [sys.executable, "-m", "executor", str(run.plan), "--run-dir", str(run.folder), *data]
            run.process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            going.append(run)
        if late:
            _stop(going)
            break
        going = [run for run in going if run.process is not None and run.process.poll() is None]
        time.sleep(0.2)
    for each in with_log:
        each.close()


def _stop(going: Sequence[Run]) -> None:
    """SIGTERM, which a run records as its end; SIGKILL where it does not in time."""
    for run in going:
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
    last = time.monotonic() + GRACE_SECONDS
    for run in going:
        assert run.process is not None
        try:
            run.process.wait(max(0.1, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def read(run: Run) -> None:
    """What the plan of ``run`` says, and what its run recorded."""
    if not run.plan.exists():
        return
    plan = load(run.plan)
    parameters = {route: item["value"] for route, item in plan["workload"]["parameters"].items()}
    config = {key: item["chosen"] for key, item in plan["workload"]["config"].items()}
    run.record |= {
        "seal": plan["seal"]["digest"],
        "config": config,
        "parameters": parameters,
        "active": _active(config, parameters),
        "ranks": [{key: entry[key]["chosen"] for key in ("dtype", "batch", "seq")} for entry in plan["ranks"]],
        "kernels": [{name: item["chosen"] for name, item in entry["kernels"].items()} for entry in plan["ranks"]],
    }
    if plan["runs"]:
        run.record["run"] = plan["runs"][-1]
        run.outcome = run.record["run"]["outcome"]
    elif run.process is not None:
        run.outcome = (run.folder / "run.log").read_text(errors="replace").strip().rpartition("\n")[2]
    metrics = run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    run.record["losses"] = [[line["step"], line["loss"]] for line in lines if "loss" in line]
    run.record["seconds"] = sum(line["seconds"] for line in lines if "seconds" in line)


def _active(config: Mapping[str, Any], parameters: Mapping[str, int]) -> int:
    """Parameters that one byte's products use: without tables, of which it reads a few rows, and idle experts."""
    idle = max(0, int(config.get("experts", 0) - config.get("topk", 0)))
    expert = int(3 * config.get("width", 0) * config.get("expert_ffn", 0) * config.get("layers", 0))
    return parameters["total"] - parameters.get("tables", 0) - idle * expert


def counted(corpus: Corpus, windows: int, seq: int, orders: Sequence[int]) -> list[dict[str, Any]]:
    """Bits per byte of Kneser-Ney on the held-out windows of the runs' evaluations."""
    reader = Reader([(corpus, 1)], 0, seq)
    inputs, targets = reader.held_out(windows, seq)
    alone = torch.cat((inputs[:, :1], targets), 1).to(torch.uint8).numpy()
    places = [start for _, start in reader.held_out_places(windows, seq)]
    rows = []
    for order in orders:
        begun = time.perf_counter()
        model = KneserNey(corpus.data[: corpus.split], order)
        before = max(1, order - 1)
        ahead = torch.stack(
            [torch.from_numpy(corpus.data[at + 1 - before : at + seq + 1].copy()) for at in places]
        ).numpy()
        assert (ahead[:, before - 1 :] == alone).all()
        own, running = model.bits(alone, 1), model.bits(ahead, before)
        rows.append(
            {
                "order": order,
                "context_of_the_window": float(own.mean()),
                "running_context": float(running.mean()),
                "standard_error": float(own.mean(1).std(ddof=1) / windows**0.5) if windows > 1 else None,
                "seconds": time.perf_counter() - begun,
            }
        )
    return rows


def table(runs: Sequence[Run], counts: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> str:
    """The whole in Markdown."""
    evaluated = [run for run in runs if run.evaluations]
    step = max(set.intersection(*(set(run.evaluations) for run in evaluated)), default=0) if evaluated else 0
    whole = _mean([run for run in runs if run.variant == runs[0].variant], step)
    lines = [_caption(evaluated, step, data), ""]
    lines += ["| | parameters | active | bits per byte | against the first | lowest | tokens/s | outcome |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|---|"]
    for variant in dict.fromkeys(run.variant for run in runs):
        own = [run for run in runs if run.variant == variant]
        sizes = next((run.record for run in own if "active" in run.record), None)
        total, active = ("", "") if sizes is None else (f"{sizes['parameters']['total']:,}", f"{sizes['active']:,}")
        ended = "; ".join(dict.fromkeys(map(_ended, own)))
        columns = (variant, total, active, _shown(own, step), _against(_mean(own, step), whole), _lowest(own))
        lines.append(f"| {' | '.join(columns)} | {_pace(own)} | {ended} |")
    for row in counts:
        for key, more in (("context_of_the_window", ""), ("running_context", ", seeing before the window too")):
            name = f"Kneser-Ney of order {row['order']}{more}"
            lines.append(f"| {name} | | | {row[key]:.4f} | {_against(row[key], whole)} | | | |")
    return "\n".join(lines) + "\n"


def _caption(evaluated: Sequence[Run], step: int, data: Mapping[str, Any]) -> str:
    corpus = f"{data['name']}, {data['length']:,} bytes, SHA-256 {data['sha256']}, the last twentieth held out"
    if not evaluated:
        return f"No run was evaluated. Data: {corpus}."
    record = evaluated[0].record
    ranks, windows = record["ranks"], record["config"]["eval_windows"]
    tokens = sum(rank["batch"] * rank["seq"] for rank in ranks) * step
    share = tokens / first_held_out(data["length"])
    seeds = sorted({run.seed for run in evaluated})
    return (
        f"Held-out bits per byte after {step} steps ({tokens:,} bytes, {share:.3g} of the training part) in "
        f"{ranks[0]['dtype']}, over {windows} windows of {ranks[0]['seq']} bytes; seed {', '.join(map(str, seeds))}. "
        f"Data: {corpus}. Active: without tables and idle experts."
    )


def _mean(own: Sequence[Run], step: int) -> float | None:
    found = [run.evaluations[step] for run in own if step in run.evaluations]
    return fmean(found) if found else None


def _shown(own: Sequence[Run], step: int) -> str:
    found = [run.evaluations[step] for run in own if step in run.evaluations]
    spread = f" ({min(found):.4f} to {max(found):.4f})" if len(found) > 1 else ""
    return f"{fmean(found):.4f}{spread}" if found else ""


def _lowest(own: Sequence[Run]) -> str:
    """The lowest mean of all seeds' evaluations, and after which step."""
    steps = set.intersection(*(set(run.evaluations) for run in own))
    if not steps:
        return ""
    step = min(steps, key=lambda at: fmean(run.evaluations[at] for run in own))
    return f"{fmean(run.evaluations[step] for run in own):.4f} (step {step})"


def _against(value: float | None, whole: float | None) -> str:
    return "" if value is None or whole is None or value == whole else f"{value - whole:+.4f}"


def _pace(own: Sequence[Run]) -> str:
    measured = [run.record["run"]["measured"] for run in own if "run" in run.record]
    found = [row["/step/tokens_per_second"]["value"] for row in measured if "/step/tokens_per_second" in row]
    return f"{fmean(found):,.0f}" if found else ""


def _ended(run: Run) -> str:
    last = max(run.evaluations.items(), default=None)
    said = "" if last is None else f" ({last[1]:.4f} after {last[0]})"
    return run.outcome.replace("|", "/").replace("\n", " ") + said


def rendered(document: Mapping[str, Any]) -> str:
    """The table of a kept learns.json."""
    runs = [
        Run(row["variant"], row["seed"], row["settings"], Path(), row["outcome"], None, row) for row in document["runs"]
    ]
    return table(runs, document["counted"], document["data"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="small")
    add("--data", metavar="PATH", help="default: the running Python's standard library")
    add("--devices", default="auto")
    add("--steps", type=int, default=1000)
    add("--batch", type=int)
    add("--seq", type=int)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of every variant")
    add("--variant", action="append", default=[], metavar="NAME:KEY=VALUE[,...]", help="one more: the whole, but for")
    add("--only", nargs="+", metavar="WORD", help="only the variants whose names hold one of these")
    add("--windows", type=int, default=512, help="held-out windows of an evaluation")
    add("--evaluations", type=int, default=10, help="how many, evenly over the steps")
    add("--orders", type=int, nargs="*", default=[5, 8], help="of Kneser-Ney")
    add("--jobs", type=int, default=5, help="runs at a time")
    add("--minutes", type=float, default=60.0, help="after which what still runs is stopped")
    add("--render", type=Path, metavar="learns.json", help="run nothing: print the table of what is kept there")
    add("--out", type=Path, default=Path("runs", time.strftime("learns-%Y%m%dT%H%M%S")))
    return parser.parse_args()


def main() -> None:
    asked, begun = _options(), time.monotonic()
    if asked.render is not None:
        sys.stdout.write(rendered(json.loads(asked.render.read_text())))
        return
    common = dict(text.split("=", 1) for text in asked.set)
    found = variants(asked.model, common)
    whole = next(iter(found.values()))
    for text in asked.variant:
        name, _, changes = text.partition(":")
        found[name] = whole | dict(change.split("=", 1) for change in changes.split(","))
    kept = {n: s for n, s in found.items() if not asked.only or any(word in n for word in asked.only)}
    shown = {"eval_windows": str(asked.windows), "eval_every": str(max(1, asked.steps // asked.evaluations))}
    out = asked.out.absolute()
    runs = [
        Run(name, seed, {**settings, **shown}, out / f"{place}-seed-{seed}")
        for seed in asked.seeds
        for place, (name, settings) in enumerate(kept.items())
    ]
    words = ["--model", asked.model, "--devices", asked.devices, "--steps", str(asked.steps)]
    for option in ("batch", "seq", "data"):
        value = getattr(asked, option)
        words += [] if value is None else [f"--{option}", os.path.abspath(value) if option == "data" else str(value)]
    ready = [run for run in runs if planned(run, words)]
    data = ["--data", os.path.abspath(asked.data)] if asked.data else []
    corpus = open_corpus(asked.data) if asked.data else stdlib_corpus()
    described = corpus.digest._asdict()
    seq = load(ready[0].plan)["ranks"][0]["seq"]["chosen"] if ready else asked.seq or 512
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # counting needs a core and no card
        counting = pool.submit(counted, corpus, asked.windows, seq, asked.orders)
        carry_out(ready, asked.jobs, begun + 60 * asked.minutes, data)
        counts = counting.result()
    for run in runs:
        read(run)
    assert all(run.record["run"]["data"][0]["sha256"] == described["sha256"] for run in runs if "run" in run.record)
    text = table(runs, counts, described)
    document = {
        "asked": {key: str(value) for key, value in vars(asked).items()},
        "data": described,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "counted": counts,
        "runs": [
            {"variant": run.variant, "seed": run.seed, "settings": run.settings, "outcome": run.outcome, **run.record}
            for run in runs
        ],
        "minutes": (time.monotonic() - begun) / 60,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "learns.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "learns.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
