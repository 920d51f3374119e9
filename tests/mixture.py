"""A user's model with what only a fleet's sums keep equal: balanced experts, their stacks under Muon, and a table."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from executor.kernels import grouped
from executor.models.engram import Engram
from executor.models.moe import MoE


class Mixture(nn.Module):
    """forward(inputs [B, T], targets [B, T]) -> mean cross-entropy, nats a byte."""

    def __init__(self, width: int = 16, experts: int = 6, balance: float = 0.01) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.engram = Engram(width, 60, 1, 4)
        self.blocks = nn.ModuleList(
            MoE(width, 24, experts, 2, 0.0, balance, grouped.choices()["grouped_loop"]) for _ in range(2)
        )
        self.head = nn.Linear(width, 256, bias=False)
        self.engram.reset(1.0)
        for block in self.blocks:
            assert isinstance(block, MoE)
            block.reset(1.0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        x = x + self.engram(x, inputs)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
