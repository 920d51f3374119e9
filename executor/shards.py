"""FSDP2: each rank keeps its rows of every parameter, of its gradient and of its moments; whole parameters exist for
one unit at a time, while it computes.

A unit is a repeated block; what lies in no block is one more, the root, which stays whole from its forward to its
backward. A unit's parameters are gathered in fp32, as they are, and computed with as on one device: under the rank's
own autocast. So ranks of unlike dtypes gather the same bits. Its gradients are summed by a reduce-scatter in the
planned dtype, and come weighted by their rank's share of the step's tokens, as in `executor.exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from executor.clock import Clock
from executor.exchange import Exchanged
from executor.parts import own
from executor.precision import DTYPES, NAMES
from executor.units import ROOT, units

# Newer releases of torch name them anew and warn of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PATIENCE_SECONDS = 0.02  # after so long it is asked whether another rank has gone


class Lost(RuntimeError):
    """Another rank will not come to the collective that this one waits in."""


class Traffic:
    """Counts and times what FSDP2 moves. ``seen`` is renewed by `begin` before each forward; ``entered`` is when
    (monotonic) this rank last came to a collective, ``handed`` how many it came to. While there is a ``gone``, which
    tells whether another rank is, a wait ends with it, and this rank has ``lost`` another."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.entered, self.handed = 0.0, 0
        self.gone: Callable[[], bool] | None = None
        self.lost = False
        self.begin()

    def begin(self) -> None:
        # Gloo has no streams: a rank waits for each of its collectives where it calls it.
        self.seen = Exchanged(blocking=not self.clock.on_card)

    def timed(self, collective: Callable[[], dist.Work | None], group: dist.ProcessGroup) -> dist.Work | None:
        """Run ``collective`` of ``group``. Raises Lost."""
        self.entered, self.handed = time.monotonic(), self.handed + 1
        if self.gone is not None and not self.clock.on_card:
            # Gloo waits inside of a collective, deaf to all else: so ranks first meet in one that can be asked.
            here = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
            assert here is not None
            self.wait(here.is_completed)
        span = [self.clock.now()]
        self.seen.spans.append(span)
        work = collective()
        if work is None:  # its end stands in the stream that it was launched in
            span.append(self.clock.now())
        return work

    def wait(self, done: Callable[[], bool]) -> None:
        """Until it is ``done``. Raises Lost where it will not be."""
        pause = time.monotonic() + _PATIENCE_SECONDS
        while not done():
            if time.monotonic() > pause:  # to ask takes longer than most collectives do
                if self.gone is not None and self.gone():
                    self.lost = True
                    raise Lost("another rank's launch failed")
                time.sleep(_PATIENCE_SECONDS)


class _Collective:
    """What FSDP2 asks of a collective of one's own: memory for it, and the call."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Collective):
    """A unit's parameters from all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.traffic.seen.gathered += output_tensor.nbytes
        return self.traffic.timed(lambda: gather(output_tensor, input_tensor, group, async_op), group)


class Scatter(_Collective):
    """The sum of a unit's gradients over the ranks, to each its rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        seen = self.traffic.seen
        seen.bytes += input_tensor.nbytes
        seen.buckets += 1
        seen.dtypes.add(NAMES.get(input_tensor.dtype, str(input_tensor.dtype)))
        return self.traffic.timed(lambda: scatter(output_tensor, input_tensor, group, async_op), group)


def gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    """``part`` of every rank, one after another, into ``whole``."""
    work: dist.Work | None = _all_gather(whole, part, group=group, async_op=later)
    return work


def scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    """The sum of ``whole`` over the ranks, of which ``part`` is this rank's share."""
    work: dist.Work | None = _reduce_scatter(part, whole, op=dist.ReduceOp.SUM, group=group, async_op=later)
    return work


def shard(
    model: nn.Module, group: dist.ProcessGroup, kind: str, reduce_dtype: str, traffic: Traffic
) -> dict[str, nn.Parameter]:
    """Shard ``model`` in place over the ranks of ``group``, unit by unit, onto this rank's device of ``kind``; buffers
    become rank 0's.

    Returns:
        This rank's rows of each parameter, by name: plain parameters over the same memory, for the optimizers.

    Raises:
        ValueError: a parameter belongs to two units.
    """
    _refuse_shared(model)
    mesh = DeviceMesh.from_group(group, kind)
    # An fp32 parameter computes as it is; autocast casts it where it would on one device.
    policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[reduce_dtype], cast_forward_inputs=False)
    for _, unit in units(model):
        made = fully_shard(unit, mesh=mesh, mp_policy=policy)
        assert isinstance(made, FSDPModule)
        made.set_gradient_divide_factor(1.0)  # losses are weighted, so that gradients are summed
        made.set_force_sum_reduction_for_comms(True)
        made.set_custom_all_gather(Gather(traffic))  # type: ignore[arg-type]
        made.set_custom_reduce_scatter(Scatter(traffic))  # type: ignore[arg-type]
    for buffer in model.buffers():
        dist.broadcast(buffer, 0, group=group)
    return {name: _rows(parameter) for name, parameter in model.named_parameters()}


def _rows(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(own(parameter), requires_grad=parameter.requires_grad)


def keep_gradients(model: nn.Module, rows: dict[str, nn.Parameter]) -> None:
    """Give each parameter the gradient that it keeps from step to step, and its rows the same memory.

    After the smoke launch, which tells a parameter that no gradient reached by its having none. Raises RuntimeError
    where FSDP2 has moved a parameter meanwhile: its rows would be updated and never gathered.
    """
    for name, parameter in model.named_parameters():
        if own(parameter).untyped_storage().data_ptr() != rows[name].untyped_storage().data_ptr():
            raise RuntimeError(f"{name} lies elsewhere than when it was sharded")
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            rows[name].grad = own(parameter.grad)


def rest(model: nn.Module) -> None:
    """After a forward without a backward: the root's parameters go, and no unit is taken for one that backward will
    come to."""
    assert isinstance(model, FSDPModule)
    again = getattr(model, "reset_iter_state", model.reshard)  # newer releases of torch have it
    again()


def _refuse_shared(model: nn.Module) -> None:
    """FSDP2 would shard a parameter that two units share in each of them."""
    unit_of: dict[nn.Parameter, str] = {}
    names = [name for name, _ in units(model) if name != ROOT]
    for key, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((name for name in names if key.startswith(f"{name}.")), ROOT)
        if unit_of.setdefault(parameter, unit) != unit:
            raise ValueError(f"{key} is another unit's parameter too, and FSDP2 shards each unit apart: --shard none")
