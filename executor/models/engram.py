"""Engram: conditional memory, rows of a large table looked up by the last few bytes.

The n-grams that end at a position are hashed, each by several heads, to rows of one table. What is found is projected
to a key and a value; how well the residual stream fits the key says how much of the value is let in. A lookup costs a
few rows a position whatever the table's size, so parameters grow and work does not. The idea is that of Engram
(DeepSeek, "Conditional Memory via Scalable Lookup", 2026); hash, gate and code are our own.

Legend: B batch, T length, D width, O orders of n-grams, H heads an order, S = O H lookups a position, E channels a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.models.cast import compute
from executor.models.host_table import HostTable

ORDERS = (2, 3, 4)
PADDING = 256  # the symbol before a window's first byte: no byte has it, so windows depend on nothing before them
SEED = 0xE26AA7  # of the hash: part of what the model is, and the same in every run
EPS = 1e-6
TABLE_STD = 0.02

_MASK = (1 << 64) - 1


class Engram(nn.Module):
    """([B, T, D] residual stream, [B, T] int64 bytes) -> [B, T, D], to be added to the residual stream.

    ``table`` [sum of the heads' row counts, E] holds the heads' rows one after the other; its attribute ``lazy_rows``
    says that a step touches few of them. ``host`` holds it instead after ``to_host``.
    """

    multipliers: Tensor
    primes: Tensor
    starts: Tensor

    def __init__(self, width: int, rows: int, heads: int, dim: int, orders: Sequence[int] = ORDERS) -> None:
        super().__init__()
        self.orders = [order for order in orders for _ in range(heads)]  # of each lookup
        counts = row_counts(rows, len(self.orders))
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self.register_buffer("multipliers", torch.tensor(multipliers_of(self.orders)), persistent=False)
        self.register_buffer("primes", torch.tensor(counts), persistent=False)
        self.register_buffer("starts", torch.tensor(starts), persistent=False)
        self.table = nn.Parameter(torch.empty(sum(counts), dim))
        self.table.lazy_rows = True  # type: ignore[attr-defined]
        self.host: HostTable | None = None
        self.key = nn.Linear(len(self.orders) * dim, width, bias=False)
        self.value = nn.Linear(len(self.orders) * dim, width, bias=False)
        self.stream_norm = nn.RMSNorm(width, eps=EPS)
        self.key_norm = nn.RMSNorm(width, eps=EPS)

    @torch.no_grad()
    def reset(self, out_scale: float) -> None:
        """Rows small, so that the first updates shape them; matrices by fan-in, the output scaled down."""
        nn.init.normal_(self.table, std=TABLE_STD)
        nn.init.normal_(self.key.weight, std=self.key.in_features**-0.5)
        nn.init.normal_(self.value.weight, std=out_scale * self.value.in_features**-0.5)

    def indices(self, inputs: Tensor) -> Tensor:
        """[B, T] int64 bytes -> [B, T, S] int64 rows of the table."""
        return hashed(inputs, self.multipliers, self.primes, self.starts)

    def to_host(self) -> None:
        """Move the table to host memory: it is no parameter any more, and the forward brings the rows it looks up."""
        constants = {name: buffer.cpu() for name, buffer in self.named_buffers()}
        self.host = HostTable(self.table.detach().cpu(), partial(hashed, **constants), len(self.orders))
        self.register_parameter("table", None)

    def host_tensors(self) -> dict[str, Tensor]:
        """The table under its parameter's name, where it lies in host memory, with every update done."""
        if self.host is None:
            return {}
        self.host.settle()
        return {"table": self.host.weight}

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        rows, slots = (self.table, self.indices(inputs)) if self.host is None else self.host.take(inputs)
        found = compute(F.embedding(slots, rows).flatten(-2))
        key, value = self.key(found), self.value(found)
        with torch.autocast(x.device.type, enabled=False):
            fit = (self.stream_norm(x) * self.key_norm(key.to(x.dtype))).sum(-1, keepdim=True)
            return torch.sigmoid(fit * x.shape[-1] ** -0.5) * value.to(x.dtype)  # type: ignore[no-any-return]


def hashed(inputs: Tensor, multipliers: Tensor, primes: Tensor, starts: Tensor) -> Tensor:
    """[B, T] int64 bytes -> [B, T, S] int64 rows, the same on every device.

    An n-gram is the sum of its bytes times an odd multiplier each, in 64 bits that wrap around; shifts and a product
    mix high bits into low ones before the remainder by the head's prime, and each head's rows begin at its start.
    """
    before = len(multipliers) - 1
    padded = F.pad(inputs, (before, 0), value=PADDING).unsqueeze(-1)
    lagging = (padded.narrow(1, before - lag, inputs.shape[1]) for lag in range(before + 1))
    mixed = reduce(torch.add, map(torch.mul, lagging, multipliers))
    mixed = (mixed ^ _shifted(mixed, 32)) * _MIXER
    mixed = mixed ^ _shifted(mixed, 29)
    return torch.remainder(mixed, primes) + starts


def parameters(width: int, rows: int, heads: int, dim: int, orders: Sequence[int] = ORDERS) -> int:
    """How many parameters an Engram of these sizes has; all but two matrices and two norms are the table's."""
    lookups = len(orders) * heads
    return sum(row_counts(rows, lookups)) * dim + 2 * width * lookups * dim + 2 * width


def row_counts(rows: int, lookups: int) -> list[int]:
    """The first ``lookups`` primes from ``rows`` on: distinct, so that no two heads collide on the same n-grams."""
    return list(islice(_primes_from(rows), lookups))


def multipliers_of(orders: Sequence[int]) -> list[list[int]]:
    """[longest order, S] odd int64 multipliers by lag, 0 for what lies before a lookup's n-gram."""
    words = _words(SEED)
    by_lookup = [[_signed(next(words) | 1) for _ in range(order)] for order in orders]
    return [[row[lag] if lag < len(row) else 0 for row in by_lookup] for lag in range(max(orders))]


def _primes_from(low: int) -> Iterator[int]:
    candidate = max(low, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1


def _words(seed: int) -> Iterator[int]:
    """Random 64-bit words: SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        yield word ^ (word >> 31)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


_MIXER = _signed(0xBF58476D1CE4E5B9)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """int64 shifted right as 64 bits without a sign."""
    return (x >> bits) & (_MASK >> bits)
