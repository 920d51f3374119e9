"""How true the model of the exchange is: ``python tests/benchmarks/exchange.py --out DIR``.

On each path between the cards (as they are joined; through host memory, with NCCL_P2P_DISABLE=1) the machine is probed
with ``--benchmark``, and planned for with what was timed and without it. Then all-reduces of sizes drawn at random from
1 MB to 2 GB, which the benchmark did not time, are timed by the same instrument in processes of their own, every sum
checked, and set beside both. "off" is measured over foretold, less one.

Records that lie in DIR already (``record-pair.json`` and ``record-staged.json``, as pair.py leaves them) are taken as
they are. On a CPU, to see that it works: ``--cpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pair import CARDS, CPUS, STAGED, Environ, Pair, done, planner

from planner.machine import visible
from planner.machine.benchmark_cards import COMMAND
from planner.machine.crew import Crew
from planner.passes.likeness import in_order
from planner.passes.paths import link_inputs, rings
from schemas.document import resolve
from schemas.form import render
from schemas.seal import seal

SMALLEST, LARGEST = 10**6, 2 * 10**9
CPU_LARGEST = 2 * 10**7
_READY_SECONDS, _DEADLINE_SECONDS = 120.0, 120.0


def foretold(pair: Pair, record: str, environ: Environ, sizes: Sequence[int]) -> tuple[str, list[float]]:
    """(the path, seconds of an all-reduce of each size) as a plan of ``record`` reckons."""
    words = planner(["--devices", record, "--model", "tiny"])
    plan = json.loads(done(words, pair.folder, environ).stdout)
    values = {pointer: resolve(plan, pointer)["value"] for pointer in link_inputs(plan)}
    if "/exchange/bucket_seconds" in values:  # what a step adds to the transfer
        values["/exchange/bucket_seconds"] = 0.0
    ring = rings(plan, *values.values())
    return plan["exchange"]["path"]["value"], [ring.all_reduce(size, 1) for size in sizes]


def without_timing(pair: Pair, record: str) -> str:
    """The name of ``record`` without what was timed of its exchange."""
    body = json.loads((pair.folder / record).read_text())
    for node in body["nodes"].values():
        for key in [key for key in node if key.startswith(("allreduce_", "loopback_"))]:
            del node[key]
    name = record.replace("record-", "untimed-")
    (pair.folder / name).write_bytes(render(seal(body)))
    return name


def measured(pair: Pair, record: str, environ: Environ, sizes: Sequence[int]) -> list[float]:
    """Seconds of an all-reduce of each of ``sizes``: medians of the first rank's."""
    devices = json.loads((pair.folder / record).read_text())["devices"]
    cards = [identity for _, identity in in_order(devices)]
    seen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if pair.on_cards else {"GLOO_SOCKET_IFNAME": "lo"}
    environs = {
        card: {**os.environ, **environ, **seen, "CUDA_VISIBLE_DEVICES": visible.named(card) if pair.on_cards else ""}
        for card in cards
    }
    dry = None if pair.on_cards else {"sm": "8.0", "free": 2**40}
    request = {"part": "group", "dry": dry, "world": len(cards), "sizes": list(sizes), "repeats": 9, "budget": 100.0}
    with TemporaryDirectory(prefix="dormouse-exchange-") as folder, Crew(COMMAND, environs) as crew:
        crew.ready(_READY_SECONDS)
        request["rendezvous"] = str(Path(folder, "store"))
        answers = crew.ask({card: {**request, "rank": rank} for rank, card in enumerate(cards)}, _DEADLINE_SECONDS)
    first = answers[cards[0]]
    if "curve" not in first:
        raise SystemExit(f"the all-reduces could not be timed: {first}")
    found = {size: median(times) for size, times in first["curve"]}
    return [found[size] for size in sizes]


def drawn(seed: int, count: int, largest: int) -> list[int]:
    """Sizes spread evenly over the logarithm, a part of an octave from any that a benchmark times first."""
    source, step = random.Random(seed), (largest / SMALLEST) ** (1 / count)
    return [int(SMALLEST * step ** (place + source.random())) // 2 * 2 for place in range(count)]


def report(
    path: str, sizes: Sequence[int], seen: Sequence[float], told: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """The page of one path: a row a size, then the worst and the middle of what is off."""
    yield f"## {path}\n"
    yield "| bytes | measured | " + " | ".join(f"{name} | off" for name in told) + " |"
    yield "|---:|---:|" + "---:|---:|" * len(told)
    for place, size in enumerate(sizes):
        cells = [f"{1e3 * values[place]:.4g} | {seen[place] / values[place] - 1:+.1%}" for values in told.values()]
        yield f"| {size} | {1e3 * seen[place]:.4g} | {' | '.join(cells)} |"
    yield ""
    for name, values in told.items():
        off = [abs(one / other - 1) for one, other in zip(seen, values, strict=True)]
        yield f"{name}: off by {max(off):.1%} at most, {median(off):.1%} in the middle, over {len(off)} sizes."
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="takes records and exchange.md")
    parser.add_argument("--seed", type=int, default=1, help="of the sizes that are drawn")
    parser.add_argument("--count", type=int, default=24, help="of the sizes")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks over gloo, to see that it works")
    options = parser.parse_args()
    pair = Pair(options.out.resolve(), CPUS if options.cpu else CARDS)
    sizes = drawn(options.seed, options.count, CPU_LARGEST if options.cpu else LARGEST)
    lines = ["# The model of the exchange, beside the exchange", "", "Times in milliseconds.", ""]
    paths: dict[str, Environ] = {"pair": {}} | ({} if options.cpu else {"staged": STAGED})
    for name, environ in paths.items():
        record = pair.record(name, environ)
        path, timed = foretold(pair, record, environ, sizes)
        _, reckoned = foretold(pair, without_timing(pair, record), environ, sizes)
        seen = measured(pair, record, environ, sizes)
        lines += report(path, sizes, seen, {"with a benchmark": timed, "without": reckoned})
        (pair.folder / "exchange.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
