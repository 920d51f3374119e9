"""``python -m executor.tune``: tune FLA's kernels for this card once, time the grouped product, and keep both.

    python -m executor.tune --models small,medium,b1 [--set KEY=VALUE ...] [--dtypes bf16,fp16] [--out DIR]

Nearly all of the time is compiling, so workers first compile every configuration into one Triton cache, each its share
and all at once; then one process alone times them. One process would take over three minutes for each shape and dtype.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from executor.kernels import tuned
from planner.door import BadWorkload, Shaped, Tuned

SEQUENCES, LENGTH = 8, 512  # of the problem that is timed; the presets' own

Shapes = list[tuple[int, int]]  # (channels a head, heads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where there is no card or an argument is wrong."""
    options = _options(arguments)
    if options.worker is not None:
        _compile_share(options)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("dormouse: tuning needs a CUDA card, and this process sees none", file=sys.stderr)
        return 2
    try:
        called = [_kernel_shapes(model, options.set) for model in options.models]
    except BadWorkload as error:
        print(f"dormouse: {error}", file=sys.stderr)
        return 2
    options.shapes = sorted({(one["kda"]["head"], one["kda"]["heads"]) for one in called if "kda" in one})
    card = torch.cuda.get_device_name(0)
    folder = Path(options.out or tuned.user_folder()) / tuned.folder_name(card)
    with tempfile.TemporaryDirectory() as cache:
        _tune(options, cache, card, folder)
    _time_grouped([one["grouped"] for one in called if "grouped" in one], options.dtypes, card, folder)
    print(f"kept in {folder}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m executor.tune", description=__doc__.splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=words, default=["small", "medium", "b1"], help="whose shapes to tune for")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the models' configuration")
    parser.add_argument("--dtypes", type=words, default=["bf16", "fp16"], help="bf16,fp16")
    parser.add_argument("--out", help="the folder to keep it in; otherwise the user's own")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shapes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not set(options.dtypes) <= {"bf16", "fp16"}:
        parser.error("--dtypes takes bf16 and fp16: the kernels' operands are 16 bits wide")
    if not all("=" in item for item in options.set):
        parser.error("--set takes KEY=VALUE")
    return options


def _kernel_shapes(model: str, settings: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
    """The shapes that a model calls its kernels with. Raises BadWorkload."""
    from executor.workloads import configure, resolve, values

    workload = resolve(model)
    if not isinstance(workload, Shaped):
        raise BadWorkload(f"--models {model}: does not say with which shapes it calls its kernels")
    chosen = values(configure(workload, dict(item.split("=", 1) for item in settings)))
    return workload.kernel_shapes(chosen)


def _tune(options: argparse.Namespace, cache: str, card: str, folder: Path) -> None:
    """Compile in workers, time alone, and write one folder for each head size."""
    start = time.monotonic()
    _in_workers(options, cache)
    compiled = time.monotonic()
    os.environ.update(_environment(cache))
    _time_briefly()
    triton, fla = tuned.toolchain()
    for head in sorted({head for head, _ in options.shapes}):
        heads = [number for size, number in options.shapes if size == head]
        _visit([(head, number) for number in heads], options.dtypes)
        index: Tuned = {"card": card, "triton": triton, "fla": fla, "head": head, "heads": heads,
                        "dtypes": options.dtypes}  # fmt: skip
        _write(folder / f"head-{head}", index)
    seconds = (compiled - start, time.monotonic() - compiled)
    print("FLA: compiled in {:.0f} s, timed in {:.0f} s".format(*seconds), file=sys.stderr)


def _environment(cache: str) -> dict[str, str]:
    """Fresh tuning: no configuration of before, no timing kept by Triton, one cache of compiled code."""
    return {"TRITON_CACHE_DIR": cache, "FLA_CACHE_MODE": "disabled", "FLA_CACHE_RESULTS": "0",
            "FLA_DISABLE_BACKEND_DISPATCH": "1"}  # fmt: skip


def _in_workers(options: argparse.Namespace, cache: str) -> None:
    given = ["--dtypes", ",".join(options.dtypes), "--workers", str(options.workers)]
    command = [sys.executable, "-m", "executor.tune", "--shapes", json.dumps(options.shapes), *given, "--worker"]
    environment = {**os.environ, **_environment(cache), "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, str(n)], env=environment) for n in range(options.workers)]
    failed = [n for n, worker in enumerate(workers) if worker.wait() != 0]
    if failed:  # what they did not compile is compiled when it is timed
        print(f"dormouse: {len(failed)} of {len(workers)} compiling workers failed", file=sys.stderr)


def _compile_share(options: argparse.Namespace) -> None:
    """Compile every n-th configuration of each kernel; the others count as endlessly slow."""
    from triton.runtime.autotuner import Autotuner

    untouched = Autotuner._bench

    def compile_only(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        mine = self.configs.index(config) % options.workers == options.worker
        return untouched(self, *args, config=config, **meta) if mine else [float("inf")] * 3

    Autotuner._bench = compile_only
    Autotuner.do_bench = property(lambda self: _once)
    _visit(options.shapes, options.dtypes)


def _time_briefly() -> None:
    """A tenth of a second a configuration, as Triton takes, would be minutes in all."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    def bench(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=25, quantiles=quantiles)

    Autotuner.do_bench = property(lambda self: bench)


def _once(call: Any, quantiles: Any) -> list[float]:
    call()
    return [0.0] * len(quantiles)


def _visit(shapes: Shapes, dtypes: Sequence[str]) -> None:
    """Run forward and backward at every shape and dtype: what has no configuration yet is tuned by the way."""
    import torch

    from executor.kernels.kda_fla import chunk
    from executor.precision import DTYPES

    for head, heads in shapes:
        for dtype in dtypes:
            wide = (SEQUENCES, LENGTH, heads, head)
            sizes = (wide, wide, wide, wide, wide[:3])
            made = (torch.randn(size, device="cuda").to(DTYPES[dtype]).requires_grad_() for size in sizes)
            q, k, v, decay, beta = made
            rate, bias = (torch.zeros(size, device="cuda", requires_grad=True) for size in (heads, heads * head))
            torch.autograd.backward(chunk(q, k, v, decay, beta, rate, bias).float().square().mean())
            torch.cuda.synchronize()


def _write(folder: Path, index: Tuned) -> None:
    """One file a kernel, in the form that FLA reads, and the index; of this head size alone."""
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    files: dict[str, dict[str, Any]] = {}
    for tuner in (item for item in gc.get_objects() if type(item) is CachedAutotuner and item.cache):
        empty = {"kernel_name": tuner.kernel_name, "triton_version": index["triton"], "autotune_entries": {}}
        file = files.setdefault(tuner.kernel_name, empty)
        for key, config in tuner.cache.items():
            row = {name: getattr(config, name) for name in ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")}
            entry = {"autotune_key": AutotuneKey.normalize_autotune_key(key), "config": row}
            file["autotune_entries"][AutotuneKey.key_hash(key)] = entry
            file.setdefault("default_config", row)
        tuner.cache.clear()
    for name, file in {**files, "index": dict(index)}.items():
        _dump(folder / f"{name}.json", file)


def _time_grouped(shapes: Sequence[Mapping[str, int]], dtypes: Sequence[str], card: str, folder: Path) -> None:
    from executor.kernels.timing import grouped_seconds

    versions = {package: version(package).partition("+")[0] for package in ("torch", "triton")}
    rows: dict[str, list[dict[str, Any]]] = {}
    for shape in shapes:
        for dtype in dtypes:
            for choice, seconds in grouped_seconds(shape, SEQUENCES, LENGTH, dtype).items():
                where = {"card": card, "toolchain": versions, "shape": {**shape, "batch": SEQUENCES, "seq": LENGTH}}
                rows.setdefault(choice, []).append({**where, "dtype": dtype, "seconds": float(f"{seconds:.6g}")})
                print(f"grouped {dict(shape)} {dtype} {choice}: {seconds * 1e3:.3f} ms", file=sys.stderr)
    if rows:
        _dump(folder / "grouped.json", rows)


def _dump(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
