"""``python -m executor.tune``: tune FLA's kernels for this card once, and keep what came of it.

    python -m executor.tune --heads 12,16,32 --head-size 64 --dtypes bf16,fp16 [--out DIR]

Nearly all of the time is compiling, so workers first compile every configuration into one Triton cache, each its share
and all at once; then one process alone times them. Without that the shapes of the presets take ten minutes or more.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.kernels import tuned

SEQUENCES, LENGTH = 8, 512  # of the problem that is timed; the presets' own


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
    triton, fla = tuned.toolchain()
    index: tuned.Index = {
        "card": torch.cuda.get_device_name(0), "triton": triton, "fla": fla, "head": options.head_size,
        "heads": options.heads, "dtypes": options.dtypes,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        start = time.monotonic()
        _in_workers(options, cache)
        compiled = time.monotonic()
        os.environ.update(_environment(cache))
        _time_briefly()
        _visit(options)
        print(f"compiled in {compiled - start:.0f} s, timed in {time.monotonic() - compiled:.0f} s", file=sys.stderr)
    folder = Path(options.out or tuned.user_folder()) / tuned.folder_name(index)
    print(f"{_write(folder, index)} kernels kept in {folder}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m executor.tune", description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--heads", type=numbers, default=[12, 16, 32], help="numbers of heads, separated by commas")
    parser.add_argument("--head-size", type=int, default=64, help="channels a head")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bf16", "fp16"], help="bf16,fp16")
    parser.add_argument("--out", help="the folder to keep it in; otherwise the user's own")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not set(options.dtypes) <= {"bf16", "fp16"}:
        parser.error("--dtypes takes bf16 and fp16: the kernels' operands are 16 bits wide")
    return options


def _environment(cache: str) -> dict[str, str]:
    """Fresh tuning: no configuration of before, no timing kept by Triton, one cache of compiled code."""
    return {"TRITON_CACHE_DIR": cache, "FLA_CACHE_MODE": "disabled", "FLA_CACHE_RESULTS": "0",
            "FLA_DISABLE_BACKEND_DISPATCH": "1"}  # fmt: skip


def _in_workers(options: argparse.Namespace, cache: str) -> None:
    given = ["--heads", ",".join(map(str, options.heads)), "--head-size", str(options.head_size)]
    given += ["--dtypes", ",".join(options.dtypes), "--workers", str(options.workers)]
    command = [sys.executable, "-m", "executor.tune", *given, "--worker"]
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
    _visit(options)


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


def _visit(options: argparse.Namespace) -> None:
    """Run forward and backward at every shape and dtype: what has no configuration yet is tuned by the way."""
    import torch

    from executor.kernels.kda_fla import chunk
    from executor.precision import DTYPES

    for heads in options.heads:
        for dtype in options.dtypes:
            shape = (SEQUENCES, LENGTH, heads, options.head_size)
            sizes = (shape, shape, shape, shape, shape[:3])
            made = (torch.randn(size, device="cuda").to(DTYPES[dtype]).requires_grad_() for size in sizes)
            q, k, v, decay, beta = made
            rate = torch.zeros(heads, device="cuda", requires_grad=True)
            bias = torch.zeros(heads * options.head_size, device="cuda", requires_grad=True)
            torch.autograd.backward(chunk(q, k, v, decay, beta, rate, bias).float().square().mean())
            torch.cuda.synchronize()


def _write(folder: Path, index: tuned.Index) -> int:
    """One file a kernel, in the form that FLA reads. Gives their number."""
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    files: dict[str, dict[str, Any]] = {}
    for tuner in (item for item in gc.get_objects() if isinstance(item, CachedAutotuner) and item.cache):
        file = files.setdefault(
            tuner.kernel_name,
            {"kernel_name": tuner.kernel_name, "triton_version": index["triton"], "autotune_entries": {}},
        )
        for key, config in tuner.cache.items():
            row = {name: getattr(config, name) for name in ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")}
            entry = {"autotune_key": AutotuneKey.normalize_autotune_key(key), "config": row}
            file["autotune_entries"][AutotuneKey.key_hash(key)] = entry
            file.setdefault("default_config", row)
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in {**files, "index": dict(index)}.items():
        (folder / f"{name}.json").write_text(json.dumps(file, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return len(files)


if __name__ == "__main__":
    sys.exit(main())
