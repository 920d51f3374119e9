"""What a module keeps for backward, counted and real: ``python tests/benchmarks/saved_bytes.py --out saved.json``.

Each piece of the model runs alone, under each memory mechanism that reaches it, in each dtype, at two batches. Counted
is what the account counts: a `Tally` on tensors without memory, fp16 as bf16, a kernel as the row that it counts as.
Real, on a card, is the CUDA allocator's own: bytes requested, and bytes allocated, which are rounded. On a CPU, whose
allocator keeps no statistics, a `Tally` on real tensors stands for it.

Three marks, each above what was there before: the highest of forward, what lies there when forward is over (its output
and all that is saved), the highest of backward. Parameters, their gradients, inputs and the output's gradient are there
before. Whatever lies there on one side only is listed by size, with an operator that made one of it, or on a card with
the line of ours that asked for one.

On a CPU, to see that it works: ``--device cpu --preset tiny --batches 2,3 --seq 64``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from saved_page import render
from saved_pieces import PIECES, PRESETS, ROWS, Case, built, cases, inputs_of
from torch import Tensor, nn

from executor.count import Tally
from executor.kernels.offload import pool
from executor.phantom import phantoms, storage_of
from executor.precision import DTYPES, compute_in
from planner.door import counted_as

_ABOUT = __doc__ or ""
HOME = Path(__file__).resolve().parents[2]


@dataclass
class Bytes:
    """Of one side, above what was there before. ``lies``: what lies there after forward, (bytes, what made it)."""

    forward: int
    saved: int
    backward: int
    host: int
    lies: list[tuple[int, str]] = field(default_factory=list)


class Named(Tally):  # type: ignore[no-untyped-call]
    """A tally that knows of each storage which operator made it."""

    def __init__(self, known: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        super().__init__(known, tables)
        self._before = {id(storage_of(tensor)) for tensor in known}
        self._made: dict[int, tuple[weakref.ref[Any], int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._name(tensor, f"{func._schema.name.removeprefix('aten::')} {list(tensor.shape)} {tensor.dtype}")
        return result

    def _name(self, tensor: Tensor, text: str) -> None:
        storage = storage_of(tensor)
        key = id(storage)
        known = self._made.get(key)
        if key not in self._before and (known is None or known[0]() is not storage):
            self._made[key] = (weakref.ref(storage), storage.nbytes(), text.replace("torch.", ""))

    def lies(self) -> list[tuple[int, str]]:
        """(bytes, what made it) of every storage that somebody still holds."""
        return [(nbytes, text) for there, nbytes, text in self._made.values() if there() is not None and nbytes]


def passed(module: nn.Module, inputs: Sequence[Tensor], dtype: str) -> Tensor:
    """One forward in the compute dtype."""
    with compute_in(dtype, inputs[0].device.type):
        return module(*inputs)  # type: ignore[no-any-return]


def ready(module: nn.Module, inputs: Sequence[Tensor], dtype: str) -> Tensor:
    """A pass that makes every parameter's gradient and what libraries allocate once; gives the output's gradient."""
    out = passed(module, inputs, dtype)
    gradient = torch.ones_like(out.detach())
    torch.autograd.backward(out, gradient)
    for tensor in inputs:
        tensor.grad = None
    return gradient


def tallied(module: nn.Module, inputs: Sequence[Tensor], dtype: str) -> Bytes:
    """By a tally, on tensors with memory or without."""
    gradient = ready(module, inputs, dtype)
    tables = [parameter for parameter in module.parameters() if getattr(parameter, "lazy_rows", False)]
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    with Named([*inputs, gradient, *module.parameters(), *module.buffers(), *grads], tables) as tally:
        out = passed(module, inputs, dtype)
        forward, saved, lies = tally.peak, tally.live, tally.lies()
        tally.peak = tally.live
        torch.autograd.backward(out, gradient)
    beside = tally.tables_peak + sum(table.numel() * table.element_size() for table in tables)
    return Bytes(forward, saved, max(tally.peak, beside if tables else 0), tally.host, lies)


def counted(case: Case, options: argparse.Namespace) -> Bytes:
    """What the account counts."""
    choices = {kernel: counted_as(kernel, choice, ROWS) for kernel, choice in case.kernels}
    dtype = "fp32" if case.dtype == "fp32" else "bf16"
    with phantoms(options.device), torch.device("cpu"):
        module = built(case, options, {"grouped": "grouped_loop", **choices})
        return tallied(module, inputs_of(case, options, torch.device("cpu"), DTYPES[dtype]), dtype)


def real(case: Case, options: argparse.Namespace) -> dict[str, Bytes]:
    """{"requested", "allocated"}: what the device really held; on a CPU both are the one that was tallied."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        module = built(case, options, {"grouped": "grouped_loop", **dict(case.kernels)})
    inputs = inputs_of(case, options, device, DTYPES[case.dtype])
    if device.type == "cpu":
        found = tallied(module, inputs, case.dtype)
        return {"requested": found, "allocated": found}
    return _on_card(module, inputs, case.dtype)


STATISTICS = {"requested": "requested_bytes.all", "allocated": "allocated_bytes.all"}


def _on_card(module: nn.Module, inputs: Sequence[Tensor], dtype: str) -> dict[str, Bytes]:
    """By the allocator's own statistics, after two passes: kernels choose their way in the first."""
    ready(module, inputs, dtype)
    gradient = ready(module, inputs, dtype)
    gc.collect()
    device = inputs[0].device
    before, blocks, lent = _now("current"), _blocks(), _lent(device)
    torch.cuda.reset_peak_memory_stats()
    out = passed(module, inputs, dtype)
    forward, saved, host = _now("peak"), _now("current"), _lent(device) - lent
    lies = [(size, line) for (address, size), line in _blocks().items() if (address, size) not in blocks]
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(out, gradient)
    backward = _now("peak")
    return {
        kind: Bytes(forward[kind] - start, saved[kind] - start, backward[kind] - start, host, lies)
        for kind, start in before.items()
    }


def _now(which: str) -> dict[str, int]:
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    return {kind: int(statistics[f"{name}.{which}"]) for kind, name in STATISTICS.items()}


def _blocks() -> dict[tuple[int, int], str]:
    """What the allocator has given out, by address and bytes requested, with our line that asked for it."""
    return {
        (block["address"], block["requested_size"]): _line_of_ours(block.get("frames", ()))
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _line_of_ours(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        path = Path(frame["filename"])
        if path.is_relative_to(HOME / "executor"):
            return f"{path.relative_to(HOME)}:{frame['line']}"
    return ""


def _lent(device: torch.device) -> int:
    """Bytes of the host's buffers that hold something offloaded."""
    found = pool(device)
    return found.bytes - sum(size * len(buffers) for size, buffers in found.free.items())


def workspaces() -> dict[str, int]:
    """Bytes that libraries take and keep, in the order in which they come; only what is asked before anything else
    ran on the card tells them apart."""
    found = {}
    held = torch.cuda.memory_allocated()
    for name, work in (
        ("a product in bf16", partial(_product, torch.bfloat16, False)),
        ("a product in fp32", partial(_product, torch.float32, False)),
        ("backward, which is another thread", partial(_product, torch.bfloat16, True)),
        ("backward in fp32", partial(_product, torch.float32, True)),
    ):
        work()
        torch.cuda.synchronize()
        found[name], held = torch.cuda.memory_allocated() - held, torch.cuda.memory_allocated()
    return found


def _product(dtype: torch.dtype, back: bool) -> None:
    left = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=back)
    out = left @ left
    if back:
        out.sum().backward()  # type: ignore[no-untyped-call]


def compared(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the record."""
    start = time.perf_counter()
    row: dict[str, Any] = {**asdict(case), "title": case.title, "seq": options.seq}
    count = counted(case, options)
    try:
        found = real(case, options)
    except Exception as error:  # of one piece on one card: told in its row, and the others go on
        return {**row, "error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
    sides = {"counted": count, **found}
    row |= {side: {key: value for key, value in asdict(each).items() if key != "lies"} for side, each in sides.items()}
    row["only_counted"], row["only_real"] = _apart(count.lies, found["requested"].lies)
    return {**row, "seconds": time.perf_counter() - start}


def _apart(
    counted_lies: Sequence[tuple[int, str]], real_lies: Sequence[tuple[int, str]]
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """What lies on one side only, by size, the largest first."""
    left = Counter(size for size, _ in counted_lies)
    left.subtract(size for size, _ in real_lies)
    found: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
    for side, (lies, sign) in zip(found, ((counted_lies, 1), (real_lies, -1)), strict=True):
        for size, text in sorted(lies, reverse=True):
            if sign * left[size] > 0:
                left[size] -= sign
                side.append((size, text))
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=_ABOUT.partition(":")[0])
    parser.add_argument("--preset", choices=tuple(PRESETS), default="medium", help="whose sizes the pieces have")
    parser.add_argument("--batches", default="4,8", help="sequences, separated by commas")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--dtypes", default="bf16,fp16,fp32", help=f"of {', '.join(DTYPES)}, separated by commas")
    parser.add_argument("--pieces", help=f"of {'; '.join(PIECES)}, separated by commas (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further case after so long")
    parser.add_argument("--out", type=Path, help="where all of it goes as JSON; the page goes beside it")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this process sees no CUDA card; --device cpu shows that the script works")
    return options


def main() -> None:
    options = _options()
    start, cuda = time.perf_counter(), options.device == "cuda"
    if cuda:
        torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if cuda else "CPU", "torch": torch.__version__,
        "options": {key: str(value) for key, value in vars(options).items()},
        "workspaces": workspaces() if cuda else {}, "rows": [],
    }  # fmt: skip
    todo = list(cases(options))
    for place, case in enumerate(todo):
        if time.perf_counter() - start > 60 * options.minutes:
            print(f"out of time: {len(todo) - place} of {len(todo)} cases are left", file=sys.stderr)
            break
        record["rows"].append(compared(case, options))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(render(record, _ABOUT), encoding="utf-8")
    print(render(record, _ABOUT), end="")


if __name__ == "__main__":
    main()
