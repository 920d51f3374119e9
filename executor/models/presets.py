"""The presets behind ``--model``: one workload family, its keys, and the sizes of each preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from executor.kernels import kda as kda_kernels
from executor.kernels.registry import lookup
from executor.models.kda import KdaModel
from planner.door import BadWorkload, KernelRow, Key, Sizes, Value


@dataclass(frozen=True)
class KdaWorkload:
    """A KDA model of one size. Satisfies ``planner.door.Workload``."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: int
    sizes: Sizes
    depth: str | None = "layers"

    @property
    def keys(self) -> Sequence[Key]:
        """The model half of the configuration."""
        whole = partial(Key, kind="int", why=f"preset {self.name}")
        choices = ("auto", *(row["name"] for row in kda_kernels.ROWS))
        return (
            whole("layers", default=self.layers, low=1, high=1024),
            whole("width", default=self.width, low=8, high=65536),
            whole("heads", default=self.heads, low=1, high=1024),
            whole("ffn", default=self.ffn, low=8, high=262144),
            whole("conv", default=4, low=1, high=64),
            Key("kda", "choice", "auto", "the first row of the kernel that the rank can run", choices=choices),
        )

    @property
    def kernels(self) -> Mapping[str, Sequence[KernelRow]]:
        """Kernel requirements in order of preference."""
        return {"kda": kda_kernels.ROWS}

    def build(self, config: Mapping[str, Value], kernels: Mapping[str, str]) -> nn.Module:
        """The model for resolved keys; ``kernels["kda"]`` is the row that must run. Raises BadWorkload."""
        layers, width, heads, ffn, conv = (int(config[key]) for key in ("layers", "width", "heads", "ffn", "conv"))
        if width % heads:
            raise BadWorkload(f"width={width} is not a multiple of heads={heads}; set one so that heads divides width")
        try:
            core = lookup("kda", kernels["kda"])
        except KeyError as error:
            raise BadWorkload(str(error.args[0])) from None
        return KdaModel(layers, width, heads, ffn, conv, core)


TINY = KdaWorkload("tiny", layers=4, width=128, heads=4, ffn=352, sizes={"batch": 4, "seq": 128, "steps": 60})
