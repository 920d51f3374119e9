"""The pieces of a model that ``tests/benchmarks/saved_bytes.py`` runs alone: how each is built, and its inputs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.kernels import grouped, kda, registry
from executor.mechanisms.table import ORDERED
from executor.models import presets
from executor.models.cast import compute
from executor.models.engram import Engram
from executor.models.kda import EPS, VOCABULARY, Block, FeedForward, KdaModel, Mix, Shape
from executor.models.moe import MoE

PRESETS = {workload.name: workload for workload in (presets.TINY, presets.SMALL, presets.MEDIUM, presets.B1)}
ROWS = {"kda": kda.ROWS, "grouped": grouped.ROWS}
APPLY = {mechanism.NAME: mechanism.apply for mechanism in ORDERED}
# What a dense preset lacks is put beside it, so that every piece has a size.
LACKING = {"experts": 8, "topk": 2, "engram_rows": 1000, "engram_heads": 2, "engram_dim": 32}
NOT_A_CHOICE = "recurrent_torch"  # the token loop, which nobody trains with


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
    lacking |= {} if shape.experts else {"topk": LACKING["topk"]}
    return replace(shape, **lacking)


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
