"""How ranks act as one: the agreed loss and verdict of a step, the one norm, the owners' updates, sums of counts, the
comparison of weights. What a step asks stays on the device; `agreed` reads the verdict once the step is launched.

`Alone` is the fleet of a one-rank plan: no process group, nothing between the plain loop and its arithmetic. `Ranks` is
every other. Collectives of setup have a generous deadline; those of training a short one, so that a dead rank ends the
run soon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from executor import exchange, trial
from executor.build import Optimizers, device_of
from executor.clock import Clock
from executor.exchange import Exchanged, Reducer
from executor.fingerprints import lanes, owner
from executor.owners import Sharing
from executor.slices import ExchangeSlice, RankSlice
from executor.trial import Trial

SETUP_TIMEOUT = timedelta(minutes=30)
STEP_TIMEOUT = timedelta(seconds=15)
"""What a rank waits for another in a step, beyond the time that the plan says the step takes."""
UNKNOWN_STEP_SECONDS = 60.0

Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Agreed:
    """A step's loss as the fleet's token-weighted mean (nats a byte), the ranks whose own loss was not finite, and
    whether any rank was asked to stop."""

    loss: float
    nonfinite: tuple[int, ...]
    stop: bool


class Fleet(Protocol):
    """What the loop asks of the fleet. Every rank asks the same, in the same order. ``sharded``: a rank holds parts of
    the model's tensors, and any forward is of all ranks together."""

    rank: int
    size: int
    deadline: float
    sharded: bool

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> Forward: ...
    def clear(self, parameters: Sequence[nn.Parameter]) -> None: ...
    def weighted(self, loss: Tensor) -> Tensor: ...
    def announce(self, loss: Tensor, stop: bool) -> Callable[[], Tensor]: ...
    def norm(self, gradients: Sequence[Tensor]) -> Tensor: ...
    def share(self, updates: list[Tensor]) -> list[Tensor]: ...
    def total(self, counts: Tensor) -> Tensor: ...
    def unlike(self, model: nn.Module) -> tuple[list[int], str]: ...
    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]: ...
    def saving(self) -> AbstractContextManager[None]: ...
    def begin(self) -> None: ...
    def exchanged(self) -> Exchanged | None: ...
    def held(self) -> list[Tensor]: ...
    def owners_bytes(self) -> int | None: ...
    def tried(self) -> Trial | None: ...
    def waited(self) -> float: ...
    def came(self) -> int: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


def zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Zero the gradients, which are kept from step to step: all at once, since launches bind a small model."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


class Alone:
    """One rank: its loss is the fleet's, its updates are all there are."""

    rank, size, deadline, sharded = 0, 1, 0.0, False

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> Forward:
        return model

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        zero_gradients(parameters)

    def weighted(self, loss: Tensor) -> Tensor:
        return loss

    def announce(self, loss: Tensor, stop: bool) -> Callable[[], Tensor]:
        seen = loss.detach().to(torch.float64)
        asked = torch.full_like(seen, stop)
        return lambda: torch.stack([asked, (~torch.isfinite(seen)).to(torch.float64), seen])

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def share(self, updates: list[Tensor]) -> list[Tensor]:
        return updates

    def total(self, counts: Tensor) -> Tensor:
        return counts

    def unlike(self, model: nn.Module) -> tuple[list[int], str]:
        return [], ""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        return

    def exchanged(self) -> Exchanged | None:
        return None

    def held(self) -> list[Tensor]:
        return []

    def owners_bytes(self) -> int | None:
        return None

    def tried(self) -> Trial | None:
        return None

    def waited(self) -> float:
        return 0.0

    def came(self) -> int:
        return 0

    def wait(self) -> None:
        return

    def close(self) -> None:
        return


class Ranks:
    """Several ranks over one backend, each with the whole model; their link is tried as they come together.
    ``watched``: a card's queue that hangs is found by the run's own watch, which records it; torch, which would end the
    process, keeps out. Raises LinkFailed.
    """

    sharded = False

    def __init__(
        self, rank: RankSlice, token_weight: float, plan: ExchangeSlice, clock: Clock, store: Any, watched: bool = False
    ) -> None:
        self.rank, self.size, self.token_weight, self._plan = rank.rank, rank.size, token_weight, plan
        self._device = device_of(rank.kind)
        on_card, watched = rank.kind == "cuda", watched and rank.kind == "cuda"
        if watched:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        dist.init_process_group(
            plan.backend,
            store=PrefixStore("groups", store),
            rank=rank.rank,
            world_size=rank.size,
            timeout=SETUP_TIMEOUT,
            device_id=self._device if on_card else None,
        )
        self.deadline = patience(plan)
        """Seconds that a rank waits for another in a step."""
        self._patience = SETUP_TIMEOUT if watched else timedelta(seconds=self.deadline)
        group = dist.new_group(timeout=self._patience)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._trial = trial.tried(group, rank.rank, self._device, plan)
        self._reducer = Reducer(group, plan.reduce_dtype, clock)
        self._sharing: Sharing | None = None
        self._entered, self._came = time.monotonic(), 0

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> Forward:
        """``model`` under DDP. Weights become rank 0's: unlike processors may draw other initial values of one seed."""
        muon = optimizers.muon
        if muon is not None:
            shapes = [parameter.shape for parameter in muon.parameters]
            self._sharing = Sharing(shapes, self._plan.owners, muon.ns_dtype, self._device, self._group)
        return exchange.wrap(model, self._reducer, self._plan.bucket_bytes)

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        zero_gradients(parameters)

    def weighted(self, loss: Tensor) -> Tensor:
        """The rank's part of the mean over the step's tokens: gradients are summed over ranks."""
        return loss * self.token_weight

    def announce(self, loss: Tensor, stop: bool) -> Callable[[], Tensor]:
        """Start the one collective of a step's verdict; it travels while backward runs. The function gives it, as
        `agreed` reads it, without waiting for it on the host of a card."""
        seen = loss.detach().to(torch.float64)
        finite = torch.isfinite(seen)
        vector = torch.zeros(self.size + 2, dtype=torch.float64, device=self._device)
        vector[0].fill_(stop)
        vector[1 + self.rank] = (~finite).to(torch.float64)
        vector[-1] = (seen * self.token_weight).masked_fill_(~finite, 0.0)
        self._enter()
        work = dist.all_reduce(vector, group=self._group, async_op=True)

        def result() -> Tensor:
            assert work is not None
            work.wait()
            return vector

        return result

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the reduced gradients as rank 0 rounds it, so that every rank clips by the same factor."""
        found = torch.zeros((), device=self._device)
        if self.rank == 0:
            found.copy_(torch.nn.utils.get_total_norm(gradients))
        self._enter()
        dist.broadcast(found, 0, group=self._group)
        return found

    def share(self, updates: list[Tensor]) -> list[Tensor]:
        assert self._sharing is not None
        self._enter()
        return self._sharing.all(updates)

    def total(self, counts: Tensor) -> Tensor:
        """Integers summed over the ranks, exactly, in place."""
        self._enter()
        dist.all_reduce(counts, group=self._group)
        return counts

    def unlike(self, model: nn.Module) -> tuple[list[int], str]:
        """The ranks whose weights are not rank 0's, and the first tensor that is not."""
        mine, sizes = lanes(model)
        found = mine.new_empty(self.size, len(mine))
        self._enter()
        dist.all_gather(list(found.unbind()), mine, group=self._group)
        other = found != found[0]
        ranks: list[int] = other.any(1).nonzero().flatten().tolist()
        return ranks, owner(sizes, int(other.any(0).nonzero()[0])) if ranks else ""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around forwards that no backward follows."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Around a checkpoint's writing, in which ranks may wait for another's disk."""
        return nullcontext()

    def begin(self) -> None:
        self._reducer.begin()

    def exchanged(self) -> Exchanged | None:
        return self._reducer.seen

    def held(self) -> list[Tensor]:
        """What of a step's exchange is kept for the next one's."""
        return self._reducer.held()

    def owners_bytes(self) -> int | None:
        return None if self._sharing is None else self._sharing.bytes

    def tried(self) -> Trial | None:
        """What the link did before the first step."""
        return self._trial

    def waited(self) -> float:
        """Seconds since this rank last came to a collective: of those that lose one another, who came last has the
        least."""
        return time.monotonic() - self._last()

    def _last(self) -> float:
        return max(self._entered, self._reducer.entered)

    def came(self) -> int:
        """How many collectives this rank came to: of ranks that hang, who came to the fewest holds the others up."""
        return self._came + self._reducer.handed

    def _enter(self) -> None:
        self._entered, self._came = time.monotonic(), self._came + 1

    def wait(self) -> None:
        """Until all ranks are here, with the generous deadline: after warm-up, and while rank 0 evaluates."""
        self._enter()
        dist.barrier(device_ids=[0] if self._device.type == "cuda" else None)

    def close(self) -> None:
        """Leave together: a rank that leaves gloo while another still sends can abort it."""
        self._enter()
        dist.barrier(device_ids=[0] if self._device.type == "cuda" else None)
        dist.destroy_process_group()


def patience(plan: ExchangeSlice) -> float:
    """Seconds for which nothing may move in a step, or in what takes less than one at a time."""
    longest = UNKNOWN_STEP_SECONDS if plan.step_seconds is None else plan.step_seconds
    return STEP_TIMEOUT.total_seconds() + round(longest)


def abandon() -> None:
    """Leave the process group without the others, after a failure."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agreed(verdict: Sequence[float]) -> Agreed:
    """From a step's verdict: how many were asked to stop, one flag a rank, then the sum of the weighted losses."""
    nonfinite = tuple(rank for rank, flag in enumerate(verdict[1:-1]) if flag)
    return Agreed(float("nan") if nonfinite else verdict[-1], nonfinite, verdict[0] > 0)
