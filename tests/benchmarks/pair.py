"""What two cards do, as measured plans: ``python tests/benchmarks/pair.py --out pair``, or with ``--only`` some parts.

Each case is planned by the command line and run by the executor, in processes of their own. What is done already is
not done again, so a part that broke off goes on; ``--pack FILE`` puts plans, records and commands into one archive,
from which ``--unpack FILE`` goes on elsewhere. `summary.md` sets what was foretold beside what was seen.

| part | what is run |
|---|---|
| one | small, medium and b1 on the first card alone, small at twice its batch too |
| nvlink, staged | medium and b1 as the cards are joined, and through host memory (NCCL_P2P_DISABLE=1) |
| calibrated | medium over both again, by what the first runs measured |
| small | small on one card and on two, at one global batch and at twice it |
| alone | the unequal pair, each rank alone: at two batches, which teach t(b) = a + c b |
| unequal | the pair split evenly and by ``--capacity auto``, then each rank alone at the batch that auto gave it |
| capped | the same where the second rank has 16 GB |
| mixed | a rank in bf16 beside one in fp32, then one in fp16 |

The second rank of the unequal pair is made slow, and small, by CUDA's MPS, whose limits are each process's own: a
wrapper sets them for that rank alone, and its record is probed inside it. MPS changes no setting of a card. The samples
a second are by the wall, the exchange and all else included.

On a CPU, to see that it works: ``--cpu``. There the plainest kernels make the second rank slow, and a budget small.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import environment

COMMAND_SECONDS = 200
MOST_RANKS = 2
_QUIT_SECONDS = 20
_CASES, _WRAPPER, _SUMMARY = "cases.json", "second.sh", "summary.md"

Environ = Mapping[str, str]
STAGED: Environ = {"NCCL_P2P_DISABLE": "1"}


@dataclass(frozen=True)
class Setting:
    """The devices that stand for the pair, and sizes that suit them. ``slow`` and ``small`` are what the second rank's
    environment gets, ``fit`` the words that say of its memory what no environment can."""

    name: str
    models: Mapping[str, Sequence[str]]
    batch: int
    capped_batch: int
    slow: Environ
    small: Environ
    fit: Sequence[str] = ()
    alone: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Batches of the first and of the second rank that teach how their times grow."""


CARDS = Setting(
    "h200",
    {
        "medium": ("--model", "medium", "--steps", "24"),
        "b1": ("--model", "b1", "--steps", "14", "--set", "eval_windows=4"),
        "small": ("--model", "small", "--steps", "40"),
    },
    batch=128,
    capped_batch=384,  # of which a rank with a quarter of a card would take more than 16 GB
    slow={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"},
    small={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=16G"},
    alone=((128, 256), (32, 128)),
)
_TINY = ("--model", "tiny", "--steps", "8", "--seq", "64", "--set", "layers=2", "--set", "width=64", "--set", "heads=2")
CPUS = Setting(
    "cpu",
    dict.fromkeys(("medium", "b1", "small"), (*_TINY, "--set", "ffn=128", "--set", "eval_windows=2")),
    batch=8,
    capped_batch=12,
    slow={"ATEN_CPU_CAPABILITY": "default"},
    small={},
    fit=("--fit", "8,0.04"),
    alone=((8, 16), (3, 8)),
)


@dataclass
class Case:
    """A plan and its run: the words of both commands, and why there is none where there is none."""

    name: str
    planned: str
    ran: str = ""
    fault: str = ""
    rate: float | None = None  # samples a second by the wall

    def row(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Pair:
    """The folder of all cases, and how they are made."""

    folder: Path
    setting: Setting
    cards: tuple[str, str] = ("0", "1")  # which stand for the first rank's and for the second's
    more: Sequence[str] = ()  # words of every plan besides
    until: float = float("inf")  # no case is begun later
    cases: dict[str, Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / _CASES
        if kept.exists():
            self.cases = {row["name"]: Case(**row) for row in json.loads(kept.read_text())}

    @property
    def on_cards(self) -> bool:
        return self.setting is CARDS

    def plan_of(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{self.setting.name}-{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def record(self, name: str, environ: Environ | None = None, ranks: int = MOST_RANKS) -> str:
        """The name of a record of ``ranks`` devices, timed under ``environ``; made once."""
        path = self.folder / f"record-{name}.json"
        if not path.exists():
            words = ["probe", "--benchmark", "--devices", "auto" if self.on_cards else f"cpu:{ranks}"]
            path.write_bytes(done(planner(words), self.folder, environ or {}).stdout)
        return path.name

    def case(
        self, name: str, words: Sequence[str], environ: Environ | None = None, second: Environ | None = None
    ) -> Case:
        """Plan ``words`` and run what comes, under ``environ``; the second of several ranks under ``second`` besides. A
        fault is kept and told, and nothing else is held up by it."""
        environ, file = environ or {}, f"{self.setting.name}-{name}.json"
        held = self.cases.get(name)
        if held is not None and not held.fault:
            return held
        if time.monotonic() > self.until:
            raise _Over
        words = [*words, *self.more, "--set", "keep_model=none", "--set", "log_every=100"]
        found = Case(name, _told(environ, ["dormouse-plan", *words], f"> {file}"))
        start = time.monotonic()
        try:
            if self.plan_of(name) is None:
                (self.folder / file).write_bytes(done(planner(words), self.folder, environ).stdout)
            command, shown = self._runner(file, second)
            found.ran = _told(environ, shown)
            done(command, self.folder, environ)
            found.rate = self._rate(name)
        except _Failed as failure:
            found.fault = str(failure)
            if not found.ran:
                (self.folder / file).unlink(missing_ok=True)
        self.cases[name] = found
        rows = [case.row() for case in self.cases.values()]
        (self.folder / _CASES).write_text(json.dumps(rows, indent=1) + "\n")
        told = found.fault or _line(self.plan_of(name), found)
        print(f"{time.monotonic() - start:6.1f} s  {name}: {told}", flush=True)
        return found

    def _runner(self, file: str, second: Environ | None) -> tuple[list[str], list[str]]:
        """(what runs the plan, the same as a person would write it)."""
        if second is None:
            return [sys.executable, "-m", "executor", file], ["python", "-m", "executor", file]
        wrapper = self.folder / _WRAPPER
        limits = "".join(f"  export {name}={shlex.quote(value)}\n" for name, value in second.items())
        wrapper.write_text(f'#!/bin/sh\nif [ "$LOCAL_RANK" = 1 ]; then\n{limits}fi\nexec "$@"\n')
        wrapper.chmod(0o755)
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={MOST_RANKS}", "--no-python"]
        command = [sys.executable, "-m", *torchrun, str(wrapper.resolve()), sys.executable, "-m", "executor", file]
        own = " ".join(f"{name}={value}" for name, value in second.items())
        shown = ["torchrun", *torchrun[1:], f"<rank 1 with {own}>", "python", "-m", "executor", file]
        return command, shown

    def _rate(self, name: str) -> float | None:
        """Samples a second by the wall: the median over the steps of the measuring window, first and last left out."""
        plan = self.plan_of(name)
        if plan is None:
            return None
        metrics = self.folder / "runs" / plan["seal"]["digest"][:12] / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        own = [line for line in lines if line["run"] == plan["runs"][-1]["id"] and "wall_seconds" in line]
        skipped = plan["workload"]["config"]["warmup_steps_unmeasured"]["chosen"]
        walls = [line["wall_seconds"] for line in own][skipped + 1 :]
        return plan["step"]["global_batch"]["value"] / median(walls) if walls else None


class _Over(Exception):
    """The time that was given is over."""


class _Failed(Exception):
    """A command did not end well. The message is its last line."""


def planner(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "planner", *words]


def _told(environ: Environ, words: Sequence[str], then: str = "") -> str:
    return " ".join(filter(None, (*(f"{key}={value}" for key, value in environ.items()), *words, then)))


def done(command: Sequence[str], folder: Path, environ: Environ) -> subprocess.CompletedProcess[bytes]:
    """``command`` in ``folder``, ended whole where it takes too long."""
    started = subprocess.Popen(
        command, cwd=folder, env=environment(**environ), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = started.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise _Failed(f"no end within {COMMAND_SECONDS} s: {' '.join(command)}") from None
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
    if started.returncode:
        lines = err.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        ours = [line for line in lines if line.startswith(("dormouse", "refused"))]
        raise _Failed(f"ended with {started.returncode}: {(ours or lines)[-1]}")
    return subprocess.CompletedProcess(command, started.returncode, out, err)


@contextmanager
def _sharing(pair: Pair) -> Iterator[Environ]:
    """The environment under which limits of MPS hold; its daemon ends with the part."""
    if not pair.on_cards:
        yield {}
        return
    environ = {f"CUDA_MPS_{name}_DIRECTORY": f"/tmp/dormouse-mps/{name.lower()}" for name in ("PIPE", "LOG")}
    for place in environ.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    control = ["nvidia-cuda-mps-control"]
    subprocess.run([*control, "-d"], env={**os.environ, **environ}, check=True)
    try:
        yield environ
    finally:
        subprocess.run(control, input=b"quit\n", env={**os.environ, **environ}, check=False, timeout=60)
        end = time.monotonic() + _QUIT_SECONDS  # another daemon does not start beside one that is still ending
        while Path(environ["CUDA_MPS_PIPE_DIRECTORY"], "control").exists() and time.monotonic() < end:
            time.sleep(0.2)


def one(pair: Pair) -> None:
    for model in ("small", "medium", "b1"):
        words = ["--devices", pair.record("one", _card(pair, 0), ranks=1), *pair.setting.models[model]]
        pair.case(f"one-{model}", words, _card(pair, 0))
    _small_alone(pair)


def nvlink(pair: Pair) -> None:
    for model in ("medium", "b1"):
        pair.case(f"pair-{model}", ["--devices", pair.record("pair"), *pair.setting.models[model]])


def staged(pair: Pair) -> None:
    for model in ("medium", "b1"):
        words = ["--devices", pair.record("staged", STAGED), *pair.setting.models[model]]
        pair.case(f"pair-staged-{model}", words, STAGED)


def calibrated(pair: Pair) -> None:
    for name, part, environ in (("pair", nvlink, {}), ("pair-staged", staged, STAGED)):
        if f"{name}-medium" not in pair.cases:
            part(pair)
        taught = f"{pair.setting.name}-{name}-medium.json"
        words = ["--devices", pair.record(name.removeprefix("pair-"), environ), *pair.setting.models["medium"]]
        pair.case(f"{name}-medium-calibrated", [*words, "--calibrate", taught], environ)


def small(pair: Pair) -> None:
    _small_alone(pair)
    for name, batch in (("same", "8"), ("twice", "16")):
        words = ["--devices", pair.record("pair"), *pair.setting.models["small"], "--batch", batch]
        pair.case(f"small-pair-{name}", words)


def _small_alone(pair: Pair) -> None:
    words = ["--devices", pair.record("one", _card(pair, 0), ranks=1), *pair.setting.models["small"], "--batch", "16"]
    pair.case("small-one", words, _card(pair, 0))


def _card(pair: Pair, rank: int) -> Environ:
    """What shows a process the card of ``rank`` alone."""
    return {"CUDA_VISIBLE_DEVICES": pair.cards[rank]} if pair.on_cards else {}


def _second(pair: Pair, small: bool) -> Environ:
    """What the second rank's processes get beside the others'."""
    return {**pair.setting.slow, **(pair.setting.small if small else {})}


def _unlike(pair: Pair, shared: Environ, small: bool = False) -> str:
    """The two ranks' records, each probed as its rank will be started."""
    first = pair.record("fast", {**shared, **_card(pair, 0)}, ranks=1)
    name = "slow-small" if small else "slow"
    return f"{first},{pair.record(name, {**shared, **_card(pair, 1), **_second(pair, small)}, ranks=1)}"


def _alone(pair: Pair, rank: int, batch: int, shared: Environ, more: Sequence[str] = ()) -> Case:
    """One rank of the unequal pair with ``batch`` sequences and no other beside it."""
    record = _unlike(pair, shared).split(",")[rank]
    words = ["--devices", record, *pair.setting.models["medium"], "--batch", str(batch), *more]
    environ = {**shared, **_card(pair, rank), **(_second(pair, False) if rank else {})}
    return pair.case(f"alone-{rank}-{batch}", words, environ)


def _taught(pair: Pair) -> list[str]:
    if (
        not pair.on_cards
    ):  # a record of a CPU does not tell the slow rank from the other, so neither would teach rightly
        return []
    names = [f"alone-{rank}-{batch}" for rank in (0, 1) for batch in pair.setting.alone[rank]]
    ran = [name for name in names if name in pair.cases and not pair.cases[name].fault]
    return ["--calibrate", ",".join(f"{pair.setting.name}-{name}.json" for name in ran)] if ran else []


def alone(pair: Pair) -> None:
    with _sharing(pair) as shared:
        for rank in (0, 1):
            for batch in pair.setting.alone[rank]:
                _alone(pair, rank, batch, shared)


def unequal(pair: Pair) -> None:
    with _sharing(pair) as shared:
        _split(pair, shared, pair.setting.batch, small=False)


def capped(pair: Pair) -> None:
    with _sharing(pair) as shared:
        _split(pair, shared, pair.setting.capped_batch, small=True)
        _alone(pair, 0, 2 * pair.setting.capped_batch, shared)


def _split(pair: Pair, shared: Environ, batch: int, small: bool) -> None:
    name = "capped" if small else "unequal"
    fit = pair.setting.fit if small else ()
    words = ["--devices", _unlike(pair, shared, small), *pair.setting.models["medium"], "--batch", str(batch), *fit]
    for split in ("auto", "equal"):
        asked = [*words, "--capacity", split, *_taught(pair)]
        pair.case(f"{name}-{split}", asked, shared, _second(pair, small))
    for rank, share in enumerate(_shares(pair.plan_of(f"{name}-auto"))):
        _alone(pair, rank, share, shared)


def _shares(plan: Mapping[str, Any] | None) -> list[int]:
    """The batch of each rank."""
    if plan is None:
        return []
    found = {rank: entry["batch"]["chosen"] for entry in plan["ranks"] for rank in entry["members"]}
    return [found[rank] for rank in sorted(found)]


def mixed(pair: Pair) -> None:
    for rung in ("fp32", "fp16"):
        words = ["--devices", pair.record("pair"), *pair.setting.models["medium"], "--dtype", f"bf16,{rung}"]
        pair.case(f"pair-bf16-{rung}", words)


PARTS: dict[str, Callable[[Pair], None]] = {
    "one": one,
    "nvlink": nvlink,
    "staged": staged,
    "calibrated": calibrated,
    "small": small,
    "alone": alone,
    "unequal": unequal,
    "capped": capped,
    "mixed": mixed,
}


def _run_of(plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the newest finished run measured."""
    runs = [] if plan is None else [run for run in plan["runs"] if run["outcome"] == "finished"]
    return runs[-1]["measured"] if runs else {}


def _pair_of(plan: Mapping[str, Any], pointer: str) -> tuple[float | None, float | None]:
    """(foretold, measured) of a reading of the whole fleet."""
    item: Any = plan
    for key in pointer.strip("/").split("/"):
        item = item.get(key, {}) if isinstance(item, dict) else {}
    return item.get("value"), _run_of(plan).get(pointer, {}).get("value")


def _line(plan: Mapping[str, Any] | None, case: Case) -> str:
    if plan is None:
        return "no plan"
    foretold, seen = _pair_of(plan, "/step/seconds")
    return f"step {_milli(foretold)} ms foretold, {_milli(seen)} ms seen, {_number(case.rate)} samples/s"


def _milli(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _off(foretold: float | None, seen: float | None) -> str:
    return "-" if not foretold or not seen else f"{seen / foretold - 1:+.1%}"


def summary(pair: Pair) -> str:
    """The page: every case, then what the unequal splits reached."""
    lines = ["# What two cards did", "", "Times in milliseconds; off: measured over foretold, less one.", ""]
    lines.append(
        "| plan | ranks' batches | step foretold | measured | off | exchange foretold | measured | off | hidden |"
    )
    lines[-1] += " samples/s | regime foretold |"
    lines.append("|---|---|" + "---:|" * 8 + "---|")
    for name, case in pair.cases.items():
        plan = pair.plan_of(name)
        if plan is None or not _run_of(plan):
            lines.append(f"| {name} | - | {case.fault or 'not run'} |" + " |" * 8)
            continue
        keys = ("/step/seconds", "/exchange/seconds", "/exchange/hidden")
        step, exchange, hidden = (_pair_of(plan, key) for key in keys)
        shares = "+".join(map(str, _shares(plan)))
        cells = [name, shares, *map(_milli, step), _off(*step), *map(_milli, exchange), _off(*exchange)]
        cells += ["-" if hidden[1] is None else f"{hidden[1]:.0%}", _number(case.rate), plan["step"]["regime"]["value"]]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    lines += ["", "## The unequal pair", "", *_splits(pair)]
    lines += ["", "## Commands", ""]
    for case in pair.cases.values():
        lines += [f"- {case.name}: `{case.planned}`, `{case.ran or 'not run'}`"]
    return "\n".join(lines) + "\n"


def _splits(pair: Pair) -> Iterator[str]:
    """Of each split what it reached of the sum of the rates alone; and the gains, foretold and measured."""
    rates = {name: case.rate for name, case in pair.cases.items()}
    yield "| pair | split | samples/s | each alone | of their sum | over even: foretold, seen | over the best alone |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for name in ("unequal", "capped"):
        plan, even = pair.plan_of(f"{name}-auto"), rates.get(f"{name}-equal")
        if plan is None or not rates.get(f"{name}-auto"):
            continue
        reached, shares = rates[f"{name}-auto"], _shares(plan)
        own = [rates.get(f"alone-{rank}-{share}") for rank, share in enumerate(shares)]
        known = [rate for rate in own if rate is not None]
        share = f"{reached / sum(known):.3f}" if reached and len(known) == len(own) else "-"
        best = rates.get(f"alone-0-{sum(shares)}")
        gains = []
        for key, other in (("even", even), ("best", best)):
            foretold = plan["step"].get(f"gain_over_{key}", {}).get("value")
            gains.append(f"{_number(foretold)}, {_number(reached / other if reached and other else None)}")
        cells = [name, "+".join(map(str, shares)), _number(reached), " + ".join(map(_number, own)), share, *gains]
        yield f"| {' | '.join(cells)} |"


def _pack(folder: Path, file: Path) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                archive.add(path, path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="takes plans, records and the summary")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART[,...]", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks and a tiny model, to see that it works")
    parser.add_argument("--cards", default="0,1", metavar="A,B", help="for the two ranks; 0,0 serves the part alone")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for every plan, as the planner"
    )
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="no case is begun after so many")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="an archive of all that was made")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="go on from such an archive")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {unknown[0]}: of {', '.join(PARTS)}")
    if options.unpack is not None:
        with tarfile.open(options.unpack) as archive:
            archive.extractall(options.out, filter="data")
    if options.cpu:  # one core for all, so that a rank alone has as many threads as beside another
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    more = [word for setting in options.set for word in ("--set", setting)]
    first, _, second = options.cards.partition(",")
    setting, until = CPUS if options.cpu else CARDS, time.monotonic() + 60 * options.minutes
    pair = Pair(options.out.resolve(), setting, (first, second or first), more, until)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: SIGTERM"))
    try:
        for part in parts:
            start = time.monotonic()
            try:
                PARTS[part](pair)
            except (OSError, subprocess.SubprocessError, _Failed) as error:  # of a record, or of MPS
                print(f"part {part} broke off: {error}", flush=True)
            print(f"{time.monotonic() - start:6.1f} s  part {part}", flush=True)
    except _Over:
        print(f"the time is over before {part} was done: the same command goes on", flush=True)
    finally:
        (pair.folder / _SUMMARY).write_text(summary(pair))
        if options.pack is not None:
            _pack(pair.folder, options.pack)
    print((pair.folder / _SUMMARY).read_text())


if __name__ == "__main__":
    main()
