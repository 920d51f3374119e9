"""A model with a buffer that follows what it has seen, for tests whose ranks see unlike data."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Bytes to bytes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(256, width), nn.BatchNorm1d(width), nn.Linear(width, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embedding(inputs).transpose(1, 2)).transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
