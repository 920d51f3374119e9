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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.count import Tally
from executor.kernels import grouped, kda, registry
from executor.kernels.offload import pool
from executor.mechanisms.table import ORDERED
from executor.models import presets
from executor.models.cast import compute
from executor.models.engram import Engram
from executor.models.kda import EPS, VOCABULARY, Block, FeedForward, KdaModel, Mix, Shape
from executor.models.moe import MoE
from executor.phantom import phantoms, storage_of
from executor.precision import DTYPES, compute_in
from planner.door import counted_as

HOME = Path(__file__).resolve().parents[2]
PRESETS = {workload.name: workload for workload in (presets.TINY, presets.SMALL, presets.MEDIUM, presets.B1)}
ROWS = {"kda": kda.ROWS, "grouped": grouped.ROWS}
APPLY = {mechanism.NAME: mechanism.apply for mechanism in ORDERED}
# What a dense preset lacks is put beside it, so that every piece has a size.
LACKING = {"experts": 8, "topk": 2, "engram_rows": 1000, "engram_heads": 2, "engram_dim": 32}
NOT_A_CHOICE = "recurrent_torch"  # the token loop, which nobody trains with
SHOWN = 6  # sizes that are told of a difference


# The pieces.


class Core(nn.Module):
    """A kernel of the delta rule alone, with the parameters that it reads."""

    def __init__(self, shape: Shape, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.core = core
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(shape.heads)), nn.Parameter(torch.zeros(shape.width))

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            return self.core(*inputs, self.A_log, self.dt_bias)


class Head(nn.Module):
    """What follows the last block: norm, head, loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(shape.width, eps=EPS), nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(compute(self.norm(x))).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stack(nn.Module):
    """Alike modules one after the other, where a mechanism looks for blocks."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *beside)
        return x


class Piece(NamedTuple):
    """``make`` builds it of a shape and the kernels' functions by name; ``kernels`` are those that it calls, ``takes``
    its inputs, ``in_block`` whether it is a part of a block, ``routed`` whether it has experts."""

    make: Callable[[Shape, Mapping[str, Any]], nn.Module]
    kernels: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("stream",)
    in_block: bool = True
    routed: bool = False


def _mix(shape: Shape, kernels: Mapping[str, Any]) -> Mix:
    return Mix(shape.width, shape.heads, shape.conv, kernels["kda"])


def _moe(shape: Shape, kernels: Mapping[str, Any]) -> MoE:
    sizes = (shape.expert_ffn, shape.experts, shape.topk, shape.capacity, shape.balance)
    return MoE(shape.width, *sizes, kernels["grouped"])


def _engram(shape: Shape, kernels: Mapping[str, Any]) -> Engram:
    return Engram(shape.width, shape.engram_rows, shape.engram_heads, shape.engram_dim)


def _block(shape: Shape, kernels: Mapping[str, Any], routed: bool) -> Block:
    ffn = _moe(shape, kernels) if routed else FeedForward(shape.width, shape.ffn)
    return Block(_mix(shape, kernels), ffn, shape.width)


def _model(shape: Shape, kernels: Mapping[str, Any]) -> KdaModel:
    return KdaModel(replace(shape, layers=2), kernels["kda"], kernels["grouped"])


PIECES = {
    "embedding": Piece(lambda s, k: nn.Embedding(VOCABULARY, s.width), (), ("bytes",), in_block=False),
    "RMSNorm": Piece(lambda s, k: nn.RMSNorm(s.width, eps=EPS)),
    "core": Piece(lambda s, k: Core(s, k["kda"]), ("kda",), ("q", "k", "v", "decay", "beta")),
    "Mix": Piece(_mix, ("kda",)),
    "FeedForward": Piece(lambda s, k: FeedForward(s.width, s.ffn)),
    "MoE": Piece(_moe, ("grouped",), routed=True),
    "MoE with slots": Piece(lambda s, k: _moe(replace(s, capacity=1.25), k), routed=True),
    "Engram": Piece(_engram, (), ("stream", "bytes")),
    "head, loss": Piece(lambda s, k: Head(s), (), ("stream", "bytes"), in_block=False),
    "Block": Piece(partial(_block, routed=False), ("kda",), ("stream", "bytes")),
    "Block of experts": Piece(partial(_block, routed=True), ("kda", "grouped"), ("stream", "bytes"), routed=True),
    "model, 2 layers": Piece(_model, ("kda", "grouped"), ("bytes", "bytes"), routed=True),
}


@dataclass(frozen=True)
class Case:
    """One row: a piece, the row of each kernel that it calls, the mechanisms engaged, dtype and batch."""

    piece: str
    kernels: tuple[tuple[str, str], ...]
    engaged: tuple[str, ...]
    dtype: str
    batch: int

    @property
    def title(self) -> str:
        return ", ".join((self.piece, *(choice for _, choice in self.kernels)))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All cases that the device can run."""
    for name, piece in PIECES.items():
        if options.pieces and name not in options.pieces.split(","):
            continue
        for dtype in options.dtypes.split(","):
            for kernels in _choices(piece.kernels, dtype, options.device):
                for engaged in _engaged(piece):
                    for batch in map(int, options.batches.split(",")):
                        yield Case(name, kernels, engaged, dtype, batch)


def _choices(names: Sequence[str], dtype: str, device: str) -> Iterator[tuple[tuple[str, str], ...]]:
    """Each kernel's every choice; of two kernels, the first of both and the last of both."""
    serving = [
        [(name, row["name"]) for row in ROWS[name]
         if device in row["devices"] and dtype in row["dtypes"] and row["name"] != NOT_A_CHOICE]
        for name in names
    ]  # fmt: skip
    if len(serving) < 2:
        yield from ((pair,) for pair in serving[0]) if serving else [()]
    else:
        yield from dict.fromkeys(tuple(rows[place] for rows in serving) for place in (0, -1))


def _engaged(piece: Piece) -> Iterator[tuple[str, ...]]:
    """The sets of mechanisms that reach a piece and change its forward."""
    yield ()
    if piece.in_block:
        yield from (("act_ckpt",), ("recompute",))
    if piece.routed:
        yield from (("moe_offload",), ("moe_offload", "act_ckpt"))


# One side and the other.


@dataclass
class Bytes:
    """Of one side, above what was there before. ``lies``: what lies there after forward, (bytes, what made it)."""

    forward: int
    saved: int
    backward: int
    host: int
    lies: list[tuple[int, str]] = field(default_factory=list)


class Named(Tally):
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


def built(case: Case, options: argparse.Namespace, choices: Mapping[str, str]) -> nn.Module:
    """The piece with its mechanisms. Where experts are offloaded there are two of it, since the last one's stay."""
    piece = PIECES[case.piece]
    functions: dict[str, Any] = {kernel: registry.lookup(kernel, choice) for kernel, choice in choices.items()}
    shape = shape_of(options.preset)
    if case.piece.startswith("model"):
        module: nn.Module = piece.make(shape, functions)
    else:
        layers = 1 + ("moe_offload" in case.engaged)
        module = Stack([piece.make(shape, functions) for _ in range(layers)])
        for part in module.modules():
            if isinstance(part, Mix | FeedForward | MoE | Engram):
                part.reset(1.0)
    for name in case.engaged:
        APPLY[name](module)
    return module


def shape_of(preset: str) -> Shape:
    """The preset's sizes, experts and a table included."""
    shape = PRESETS[preset].shape
    lacking: dict[str, Any] = {name: value for name, value in LACKING.items() if not getattr(shape, name)}
    lacking |= {} if shape.expert_ffn else {"expert_ffn": shape.ffn // 4}
    return replace(shape, **({} if shape.experts else {"topk": LACKING["topk"]}), **lacking)


def inputs_of(case: Case, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The piece's inputs on ``device``; those of a kernel in the compute dtype, the residual stream in fp32."""
    shape, tokens = shape_of(options.preset), (case.batch, options.seq)
    wide = {"stream": (shape.width,), "beta": (shape.heads,), "bytes": ()}
    channels = (shape.heads, shape.width // shape.heads)
    found = []
    for name in PIECES[case.piece].takes:
        size = (*tokens, *wide.get(name, channels))
        if name == "bytes":
            found.append(torch.randint(VOCABULARY, size, device=device))
        else:
            wanted = torch.float32 if name == "stream" else dtype
            found.append(torch.randn(size, device=device).to(wanted).detach().requires_grad_())
    return found


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
        kind: Bytes(*(mark[kind] - before[kind] for mark in (forward, saved, backward)), host, lies)
        for kind in STATISTICS
    }


def _now(which: str) -> dict[str, int]:
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    return {kind: int(statistics[f"{name}.{which}"]) for kind, name in STATISTICS.items()}


def _blocks() -> dict[tuple[int, int], str]:
    """What the allocator has given out, by address and bytes requested, with our line that asked for it."""
    return {
        (block["address"], block["requested_size"]): _line_of_ours(block.get("frames", ()))
        for segment in torch.cuda.memory_snapshot()
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


# What is told.


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


def off(row: Mapping[str, Any], mark: str, side: str = "requested") -> float:
    """The relative error of the count."""
    wanted = row[side][mark]
    return (row["counted"][mark] - wanted) / wanted if wanted else float(row["counted"][mark] != 0)


def render(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    _, *reading = (__doc__ or "").split("\n\n")
    done = [row for row in record["rows"] if "error" not in row]
    lines = ["# What a module keeps for backward, counted and real", "", *"\n\n".join(reading[:-1]).splitlines(), ""]
    lines += [f"{record['device']}; torch {record['torch']}; preset {record['options']['preset']}, "
              f"length {record['options']['seq']}.", ""]  # fmt: skip
    lines += [f"- {name}: {size / 2**20:.2f} MiB kept" for name, size in record["workspaces"].items()]
    for mark in ("saved", "backward"):
        wrong = [row for row in done if abs(off(row, mark)) > 0.001]
        lines += ["", f"{len(wrong)} of {len(done)} counts of {mark} are off by more than 0.1 %."]
    lines += [
        "", "MiB; each as counted / requested / allocated.", "",
        "| piece | under | dtype | batch | forward peak | saved | off | backward peak | off | only counted "
        "| only real |",
        "|---|---|---|--:|---|---|--:|---|--:|---|---|",
    ]  # fmt: skip
    return "\n".join([*lines, *map(_line, record["rows"])]) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    first = (row["title"], "+".join(row["engaged"]) or "nothing", row["dtype"], str(row["batch"]))
    if "error" in row:
        return f"| {' | '.join(first)} | {row['error']} |  |  |  |  |  |  |"
    cells = []
    for mark in ("forward", "saved", "backward"):
        cells.append(" / ".join(f"{row[side][mark] / 2**20:.2f}" for side in ("counted", "requested", "allocated")))
        if mark != "forward":
            cells.append(f"{off(row, mark):+.2%}")
    return f"| {' | '.join((*first, *cells, _sizes(row['only_counted']), _sizes(row['only_real'])))} |"


def _sizes(lies: Sequence[Sequence[Any]]) -> str:
    shown = [f"{size / 2**20:.3f} {text}".strip() for size, text in lies[:SHOWN]]
    return "; ".join(shown) + (f"; {len(lies) - SHOWN} more" if len(lies) > SHOWN else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
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
        options.out.with_suffix(".md").write_text(render(record), encoding="utf-8")
    print(render(record), end="")


if __name__ == "__main__":
    main()
