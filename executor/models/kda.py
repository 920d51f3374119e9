"""A byte-level language model of Kimi Delta Attention blocks, with a mixture of experts and Engram where asked for.

Embedding -> L x [RMSNorm -> mix -> +; Engram -> + (first block only); RMSNorm -> SwiGLU or experts -> +] -> RMSNorm ->
linear head (its own matrix). Engram's gate reads the stream, so it comes where the first mix has put context there.
Legend: B batch, T length, D width, H heads, K channels a head (D = H K), R rank of the low-rank maps (R = K).

Products run in the autocast dtype where autocast is on; the residual stream, the norms, routing and the loss stay fp32,
and so does the delta rule's core but for its own products. The mixing layer follows Kimi Linear (arXiv 2510.26692,
section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.models.cast import compute
from executor.models.engram import Engram
from executor.models.moe import MoE

VOCABULARY = 256
EPS = 1e-6
Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``experts`` 0: a feed-forward of ``ffn`` in each block; ``engram_rows`` 0: no Engram."""

    layers: int
    width: int
    heads: int
    ffn: int
    conv: int
    recurrent: bool = True
    experts: int = 0
    topk: int = 1
    expert_ffn: int = 0
    capacity: float = 0.0
    balance: float = 0.0
    engram_rows: int = 0
    engram_heads: int = 0
    engram_dim: int = 0


class Mix(nn.Module):
    """[B, T, D] -> [B, T, D]: short convolution, Kimi Delta Attention, output gate.

    ``core`` is the kernel of the plan, taken from the registry; without one (None) the convolution alone mixes tokens.
    """

    def __init__(self, width: int, heads: int, conv: int, core: Kernel | None) -> None:
        super().__init__()
        self.heads, self.channels, self.core = heads, width // heads, core
        rank, streams = self.channels, 1 if core is None else 3
        if core is not None:
            self.q = nn.Linear(width, width, bias=False)
            self.k = nn.Linear(width, width, bias=False)
            self.beta = nn.Linear(width, heads, bias=False)
            self.decay_down = nn.Linear(width, rank, bias=False)
            self.decay_up = nn.Linear(rank, width, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(width))
        self.v = nn.Linear(width, width, bias=False)
        self.conv = nn.Conv1d(
            streams * width, streams * width, conv, groups=streams * width, padding=conv - 1, bias=False
        )
        self.gate_down = nn.Linear(width, rank, bias=False)
        self.gate_up = nn.Linear(rank, width, bias=False)
        self.norm = nn.RMSNorm(self.channels, eps=EPS)
        self.out = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def reset(self, out_scale: float) -> None:
        """Matrices by fan-in, convolution near the identity, decay rates spread over time scales as in Mamba."""
        for linear in (module for module in self.children() if isinstance(module, nn.Linear)):
            scale = out_scale if linear is self.out else 1.0
            nn.init.normal_(linear.weight, std=scale * linear.in_features**-0.5)
        nn.init.normal_(self.conv.weight, std=0.1)
        self.conv.weight[..., -1] += 1.0  # the present token passes
        if self.core is None:
            return
        self.A_log.uniform_(1, 16).log_()
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, H, K]."""
        return x.reshape(*x.shape[:-1], self.heads, self.channels)

    def _convolved(self, *streams: Tensor) -> Tensor:
        """Each [B, T, D] -> [B, T, D of all]. Causal: padded on both sides, the end cut."""
        joined = torch.cat(streams, -1).transpose(1, 2)
        return F.silu(self.conv(joined)[..., : joined.shape[-1]]).transpose(1, 2)

    def _mixed(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, H, K]."""
        if self.core is None:
            return self._heads(self._convolved(self.v(x)))
        streams = torch.split(self._convolved(self.q(x), self.k(x), self.v(x)), x.shape[-1], -1)
        decay, beta = self.decay_up(self.decay_down(x)), self.beta(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, decay = (self._heads(part) for part in (*streams, decay))
            return self.core(q, k, v, decay, beta, self.A_log, self.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = compute(x)
        gate = self.gate_up(self.gate_down(x))
        mixed = self._mixed(x)
        with torch.autocast(x.device.type, enabled=False):
            wide = self.norm.weight.dtype
            mixed = self.norm(mixed.to(wide)).view_as(x) * gate.to(wide).sigmoid()
        return self.out(compute(mixed))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    @torch.no_grad()
    def reset(self, out_scale: float) -> None:
        """Matrices by fan-in; the output is scaled down so that every block starts near the identity."""
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.down.weight, std=out_scale * self.down.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = compute(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, the unit that activation recomputation wraps: ([B, T, D] fp32, [B, T] bytes) -> [B, T, D] fp32."""

    def __init__(self, mix: Mix, ffn: FeedForward | MoE, width: int, engram: Engram | None = None) -> None:
        super().__init__()
        self.engram = engram
        self.mix_norm, self.mix = nn.RMSNorm(width, eps=EPS), mix
        self.ffn_norm, self.ffn = nn.RMSNorm(width, eps=EPS), ffn

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        if self.engram is not None:
            x = x + self.engram(x, inputs)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class KdaModel(nn.Module):
    """forward(inputs [B, T] int64, targets [B, T] int64) -> mean cross-entropy, fp32 scalar, nats a byte."""

    def __init__(self, shape: Shape, core: Kernel, grouped: Kernel | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(_block(shape, layer, core, grouped) for layer in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=EPS)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial values from torch's default generator, in a fixed order: one seed, one model."""
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.1 * self.head.in_features**-0.5)
        scale = (2 * len(self.blocks)) ** -0.5
        for block in self.blocks:
            assert isinstance(block, Block)
            block.mix.reset(scale)
            block.ffn.reset(scale)
            if block.engram is not None:
                block.engram.reset(scale)

    def logits(self, inputs: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, 256] in the compute dtype."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, inputs)
        return self.head(compute(self.norm(x)))  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _block(shape: Shape, layer: int, core: Kernel, grouped: Kernel | None) -> Block:
    mix = Mix(shape.width, shape.heads, shape.conv, core if shape.recurrent else None)
    ffn: FeedForward | MoE = FeedForward(shape.width, shape.ffn)
    if shape.experts:
        assert grouped is not None
        sizes = (shape.expert_ffn, shape.experts, shape.topk, shape.capacity, shape.balance)
        ffn = MoE(shape.width, *sizes, grouped)
    engram = None
    if shape.engram_rows and layer == 0:
        engram = Engram(shape.width, shape.engram_rows, shape.engram_heads, shape.engram_dim)
    return Block(mix, ffn, shape.width, engram)
