"""How a fleet is set against one process: what is kept of a run, how far two runs are apart, and the gradient of
several ranks added up by hand.

t_r are the tokens of rank r in a step, g_r its gradient of the mean over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from executor import build
from executor.fingerprints import fingerprint
from executor.parts import whole
from executor.precision import compute_in
from executor.slices import data_slice, rank_slice, work_slice, world_size
from schemas.form import Json

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

CLEAR = 1e-6
"""A gradient's least element whose sign and size stand well above AdamW's epsilon."""


class Watch:
    """Told of each step by the loop (`executor.loop.Observe`): keeps what the gates compare.

    ``weights`` and ``gradients`` are those of the first step, in float64 on the host; ``buffers`` those of every step.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.fingerprints: list[str] = []
        self.buffers: list[Arrays] = []
        self.weights: Arrays = {}
        self.gradients: Arrays = {}

    def __call__(self, step: int, loss: float, model: nn.Module) -> None:
        self.losses.append(loss)
        self.fingerprints.append(fingerprint(model))
        self.buffers.append({name: buffer.cpu().numpy().copy() for name, buffer in model.named_buffers()})
        if step == 0:
            named = dict(model.named_parameters())
            self.weights = {name: _double(whole(parameter)) for name, parameter in named.items()}
            self.gradients = {name: _double(whole(item.grad)) for name, item in named.items() if item.grad is not None}


def losses_apart(found: Sequence[float], right: Sequence[float]) -> tuple[float, str]:
    """The largest difference, and at which step, counted from 1; infinite where a run has more steps, NaN where a loss
    is."""
    if len(found) != len(right) or not right:
        return float("inf"), f"{len(found)} steps, not {len(right)}"
    apart = np.abs(np.subtract(found, right))
    return float(apart.max()), f"step {int(apart.argmax()) + 1}"


def furthest(found: Mapping[str, Array], right: Mapping[str, Array]) -> tuple[float, str]:
    """The largest ||found - right|| / ||right|| of one tensor, and its name; infinite where one is missing, NaN where a
    number is."""
    if found.keys() != right.keys() or not right:
        return float("inf"), f"{len(found)} tensors, not {len(right)}"
    apart = np.array([relative(found[name], item) for name, item in right.items()])
    return float(apart.max()), list(right)[int(apart.argmax())]


def weights_apart(found: Arrays, right: Arrays, gradients: Arrays) -> tuple[float, str]:
    """`furthest` of weights after one step, of the elements whose step rounding does not decide: AdamW's first is
    g / (|g| + 1e-8), which turns the last bits of a gradient that is about as small into a step as large as any."""
    clear = {name: (found == 0) | (np.abs(found) >= CLEAR) for name, found in gradients.items()}
    own, one = ({name: item[clear.get(name, ...)] for name, item in side.items()} for side in (found, right))
    return furthest(own, one)


def relative(found: Array, right: Array) -> float:
    """||found - right|| / ||right||; of a zero ``right``, ||found||."""
    return float(np.linalg.norm(found - right) / (np.linalg.norm(right) or 1.0))


def steps_apart(fingerprints: Sequence[Sequence[str]]) -> list[int]:
    """The steps after which not every rank had the same fingerprint, counted from 1; those that not all came to too."""
    steps = max(map(len, fingerprints), default=0)
    at = [{mine[step] if step < len(mine) else None for mine in fingerprints} for step in range(steps)]
    return [step + 1 for step, digests in enumerate(at) if len(digests) > 1]


def balances_apart(found: Sequence[Arrays], right: Sequence[Arrays]) -> int:
    """How many (step, mixture) have not the balance of one process bit for bit, or counts that were not zeroed."""
    apart = abs(len(found) - len(right))
    for mine, other in zip(found, right, strict=False):
        for name in balances(other):
            counted = mine.get(name.removesuffix("bias") + "counts")
            same = name in mine and np.array_equal(mine[name], other[name])
            apart += not same or counted is None or bool(counted.any())
    return apart


def balances(buffers: Arrays) -> list[str]:
    """The names of the buffers that hold a mixture's balance."""
    return [name for name in buffers if name.endswith("bias")]


def gradient_by_hand(plan: Mapping[str, Json], places: Sequence[Path], kind: str = "cpu") -> Arrays:
    """sum(t_r g_r) / sum(t_r) at the first step, each rank's windows after another in this one process, in float64.

    Each rank's part is computed by its planned kernels in its planned dtype, on a device of ``kind``.
    """
    total: Arrays = {}
    device = build.device_of(kind)
    for rank in range(world_size(plan)):
        own, data = rank_slice(plan, rank), data_slice(plan, rank)
        _, model = build.model(work_slice(plan), dict(own.kernels))
        model.to(device)
        reader = build.reader(build.open_corpora(data.sources, places), data)
        inputs, targets = reader.batch(0, data.global_batch, data.offset, data.batch, data.seq)
        with compute_in(own.dtype, device.type):
            loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        for name, parameter in model.named_parameters():
            part = np.zeros(parameter.shape) if parameter.grad is None else _double(parameter.grad)
            total[name] = total.get(name, np.zeros(parameter.shape)) + data.token_weight * part
    return total


def _double(tensor: Any) -> Array:
    array: Array = tensor.double().cpu().numpy()
    return array.copy()
