"""Several ranks that share one model under FSDP2: what of a fleet is then otherwise.

Each element of a parameter has one rank, which alone updates it: so ranks cannot drift apart in what they gather, and
what they compare is that what they gathered is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from executor.build import Optimizers
from executor.clock import Clock
from executor.exchange import Exchanged
from executor.fleet import SETUP_TIMEOUT, Forward, Ranks
from executor.shards import Lost, Traffic, keep_gradients, rest, shard
from executor.slices import ExchangeSlice, RankSlice


class Sharded(Ranks):
    """Ranks of which each holds its rows of the model. `shard` comes first, then the smoke launch, then `prepare`."""

    sharded = True

    def __init__(
        self, rank: RankSlice, token_weight: float, plan: ExchangeSlice, clock: Clock, store: Any, watched: bool = False
    ) -> None:
        super().__init__(rank, token_weight, plan, clock, store, watched)
        # The smoke launch goes over it: kernels are tuned meanwhile, on one rank longer than on another.
        group = dist.new_group(timeout=SETUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._shards, self._kind = group, rank.kind
        self._traffic = Traffic(clock)
        self._rows: dict[str, nn.Parameter] = {}

    def shard(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Shard ``model`` in place; gives this rank's rows of its parameters by name. Raises ValueError."""
        self._rows = shard(model, self._shards, self._kind, self._plan.reduce_dtype, self._traffic)
        return self._rows

    @contextmanager
    def launching(self, lost: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Around the smoke launch. Gives what waits on a card for all that was launched. Where another rank is ``lost``
        meanwhile, collectives end and Lost is raised."""
        self._traffic.gone = lost
        try:
            yield self._arrive
        finally:
            self._traffic.gone = None

    @property
    def lost(self) -> bool:
        """Whether the smoke launch ended because another rank's did."""
        return self._traffic.lost

    def _arrive(self) -> None:
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        try:
            self._traffic.wait(event.query)
        except Lost:
            self._shards.abort()
            raise

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> Forward:
        keep_gradients(model, self._rows)
        _set_pg_timeout(self._patience, self._shards)
        return model

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        torch._foreach_zero_([row.grad for row in self._rows.values() if row.grad is not None])

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm over all ranks' rows, as rank 0 rounds it, so that every rank clips by the same factor."""
        mine = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()])
        squares = mine.to(self._device, torch.float64).square()
        self._enter()
        dist.reduce(squares, 0, group=self._group)
        found = squares.sqrt().to(torch.float32)
        dist.broadcast(found, 0, group=self._group)
        return found

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        seen = self._traffic.seen
        self.begin()  # what a step moved is without it
        try:
            yield
        finally:
            rest(model)
            self._traffic.seen = seen

    @contextmanager
    def saving(self) -> Iterator[None]:
        _set_pg_timeout(SETUP_TIMEOUT, self._shards)
        yield
        _set_pg_timeout(self._patience, self._shards)

    def begin(self) -> None:
        self._traffic.begin()

    def exchanged(self) -> Exchanged | None:
        return self._traffic.seen

    def came(self) -> int:
        return super().came() + self._traffic.handed

    def _last(self) -> float:
        return max(super()._last(), self._traffic.entered)
