"""A byte-level language model of Kimi Delta Attention blocks.

Embedding -> L x [RMSNorm -> KDA mix -> +; RMSNorm -> SwiGLU -> +] -> RMSNorm -> linear head (its own matrix).
Legend: B batch, T length, D width, H heads, K channels a head (D = H K), R rank of the low-rank maps (R = K).

Products run in the autocast dtype where autocast is on; the residual stream, the norms, the delta rule's core and
the loss stay fp32. The mixing layer follows Kimi Linear (arXiv 2510.26692, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
EPS = 1e-6


def _compute(x: Tensor) -> Tensor:
    """x in the autocast dtype, cast once for all products that read it (autocast itself would cast once a product)."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Mix(nn.Module):
    """Kimi Delta Attention: [B, T, D] -> [B, T, D]. ``core`` is the kernel of the plan, taken from the registry."""

    def __init__(self, width: int, heads: int, conv: int, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.channels, self.core = heads, width // heads, core
        rank = self.channels
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.conv = nn.Conv1d(3 * width, 3 * width, conv, groups=3 * width, padding=conv - 1, bias=False)
        self.beta = nn.Linear(width, heads, bias=False)
        self.decay_down = nn.Linear(width, rank, bias=False)
        self.decay_up = nn.Linear(rank, width, bias=False)
        self.gate_down = nn.Linear(width, rank, bias=False)
        self.gate_up = nn.Linear(rank, width, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.norm = nn.RMSNorm(self.channels, eps=EPS)
        self.out = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def reset(self, out_scale: float) -> None:
        """Matrices by fan-in, convolution near the identity, decay rates spread over time scales as in Mamba."""
        for linear in (self.q, self.k, self.v, self.beta, self.decay_down, self.decay_up, self.gate_down, self.gate_up):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.out.weight, std=out_scale * self.out.in_features**-0.5)
        nn.init.normal_(self.conv.weight, std=0.1)
        self.conv.weight[..., -1] += 1.0  # the present token passes
        self.A_log.uniform_(1, 16).log_()
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, H, K]."""
        return x.reshape(*x.shape[:-1], self.heads, self.channels)

    def forward(self, x: Tensor) -> Tensor:
        x = _compute(x)
        batch, length, width = x.shape
        qkv = torch.cat((self.q(x), self.k(x), self.v(x)), -1).transpose(1, 2)
        qkv = F.silu(self.conv(qkv)[..., :length]).transpose(1, 2)  # causal: padded on both sides, the end cut
        beta = self.beta(x)
        decay = self.decay_up(self.decay_down(x))
        gate = self.gate_up(self.gate_down(x))
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = (self._heads(part) for part in torch.split(qkv.float(), width, -1))
            g = self._heads(F.softplus(decay.float() + self.dt_bias))
            g = g * -self.A_log.exp().unsqueeze(-1)
            q, k = F.normalize(q, dim=-1, eps=EPS), F.normalize(k, dim=-1, eps=EPS)
            mixed = self.norm(self.core(q, k, v, g, beta.float().sigmoid()))
            mixed = mixed.reshape(batch, length, width) * gate.float().sigmoid()
        return self.out(_compute(mixed))  # type: ignore[no-any-return]


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
        x = _compute(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, the unit that activation recomputation wraps: [B, T, D] fp32 -> [B, T, D] fp32."""

    def __init__(self, mix: Mix, ffn: FeedForward, width: int) -> None:
        super().__init__()
        self.mix_norm, self.mix = nn.RMSNorm(width, eps=EPS), mix
        self.ffn_norm, self.ffn = nn.RMSNorm(width, eps=EPS), ffn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class KdaModel(nn.Module):
    """forward(inputs [B, T] int64, targets [B, T] int64) -> mean cross-entropy, fp32 scalar, nats a byte."""

    def __init__(self, layers: int, width: int, heads: int, ffn: int, conv: int, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(Mix(width, heads, conv, core), FeedForward(width, ffn), width) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
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

    def logits(self, inputs: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, 256] in the compute dtype."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(_compute(self.norm(x)))  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
