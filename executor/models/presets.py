"""The presets behind ``--model``: one workload family, its keys, and the sizes of each preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from torch import nn

from executor.kernels import grouped as grouped_kernels
from executor.kernels import kda as kda_kernels
from executor.kernels.registry import lookup
from executor.models.kda import KdaModel, Shape
from planner.door import BadWorkload, KernelRow, Key, Sizes, Value


@dataclass(frozen=True)
class KdaWorkload:
    """A KDA model of one size. Satisfies ``planner.door.Workload``."""

    name: str
    shape: Shape
    sizes: Sizes
    depth: str | None = "layers"

    @property
    def keys(self) -> Sequence[Key]:
        """The model half of the configuration."""
        shape = self.shape
        whole = partial(Key, kind="int", why=f"preset {self.name}")
        real = partial(Key, kind="float", why=f"preset {self.name}")
        return (
            whole("layers", default=shape.layers, low=1, high=1024),
            whole("width", default=shape.width, low=8, high=65536),
            whole("heads", default=shape.heads, low=1, high=1024),
            whole("ffn", default=shape.ffn, low=8, high=262144),
            whole("conv", default=shape.conv, low=1, high=64),
            Key("mixer", "choice", "kda", "what mixes tokens: KDA, or its convolution alone", choices=("kda", "conv")),
            whole("experts", default=shape.experts, low=0, high=4096),
            whole("topk", default=shape.topk, low=1, high=4096),
            whole("expert_ffn", default=shape.expert_ffn, low=0, high=262144),
            real("moe_capacity", default=shape.capacity, low=0.0, high=64.0),
            real("moe_lb_coef", default=shape.balance, low=0.0, high=1.0),
            whole("engram_rows", default=shape.engram_rows, low=0, high=2**31 - 1),
            whole("engram_heads", default=shape.engram_heads, low=0, high=1024),
            whole("engram_dim", default=shape.engram_dim, low=0, high=65536),
            _choice("kda", kda_kernels.ROWS),
            _choice("grouped", grouped_kernels.ROWS),
        )

    @property
    def kernels(self) -> Mapping[str, Sequence[KernelRow]]:
        """Kernel requirements in order of preference."""
        return {"kda": kda_kernels.ROWS, "grouped": grouped_kernels.ROWS}

    def kernel_shapes(self, config: Mapping[str, Value]) -> Mapping[str, Mapping[str, int]]:
        """The shapes that the kernels are called with; a kernel that the configuration does not call is left out."""
        shape, called = _shape(config), {}
        if shape.recurrent:
            called["kda"] = {"heads": shape.heads, "head": shape.width // shape.heads}
        if shape.experts and not shape.capacity:
            sizes = {"width": shape.width, "hidden": shape.expert_ffn}
            called["grouped"] = {"experts": shape.experts, "topk": shape.topk, **sizes}
        return called

    def idle(self, config: Mapping[str, Value]) -> Mapping[str, str]:
        """The sizes of what this configuration has none of."""
        dense, tables = not config["experts"], bool(config["engram_rows"])
        unread = ("topk", "expert_ffn") if dense else ("ffn",)
        found = dict.fromkeys(unread, f"experts={config['experts']}")
        return found if tables else {**found, **dict.fromkeys(("engram_heads", "engram_dim"), "engram_rows=0")}

    def build(self, config: Mapping[str, Value], kernels: Mapping[str, str]) -> nn.Module:
        """The model for resolved keys; ``kernels`` names the rows that must run. Raises BadWorkload."""
        shape = _shape(config)
        _check(shape)
        try:
            core, grouped = (lookup(kernel, kernels[kernel]) for kernel in ("kda", "grouped"))
        except KeyError as error:
            raise BadWorkload(str(error.args[0])) from None
        return KdaModel(shape, core, grouped)


def _choice(kernel: str, rows: Sequence[KernelRow]) -> Key:
    choices = ("auto", *(row["name"] for row in rows))
    return Key(kernel, "choice", "auto", "the first row of the kernel that the rank can run", choices=choices)


def _shape(config: Mapping[str, Value]) -> Shape:
    """The model's sizes as its keys have them."""
    named = {"capacity": "moe_capacity", "balance": "moe_lb_coef"}
    plain = [field.name for field in fields(Shape) if field.name != "recurrent"]
    values = {name: config[named.get(name, name)] for name in plain}
    return Shape(recurrent=config["mixer"] == "kda", **values)  # type: ignore[arg-type]  # typed by their keys


def _check(shape: Shape) -> None:
    """Raise BadWorkload where keys contradict each other."""
    if shape.width % shape.heads:
        raise BadWorkload(
            f"width={shape.width} is not a multiple of heads={shape.heads}; set one so that heads divides width"
        )
    if shape.experts and shape.topk > shape.experts:
        raise BadWorkload(
            f"topk={shape.topk} is more than experts={shape.experts}; set topk to at most {shape.experts}"
        )
    if shape.experts and not shape.expert_ffn:
        raise BadWorkload(f"experts={shape.experts} without a width of their own; set expert_ffn, say to {shape.ffn}")
    if not shape.experts and (shape.capacity or shape.balance):
        raise BadWorkload("moe_capacity and moe_lb_coef are of experts, and experts=0; set experts, or leave them 0")
    if shape.engram_rows and not (shape.engram_heads and shape.engram_dim):
        raise BadWorkload(f"engram_rows={shape.engram_rows} needs engram_heads and engram_dim above 0; set them too")


_SIZES: Sizes = {"batch": 8, "seq": 512, "steps": 1000}

TINY = KdaWorkload("tiny", Shape(layers=4, width=128, heads=4, ffn=352, conv=4), {"batch": 4, "seq": 128, "steps": 60})
# One layer, so that launches bind and not arithmetic.
SMALL = KdaWorkload(
    "small",
    Shape(layers=1, width=768, heads=12, ffn=2048, conv=4, engram_rows=8192, engram_heads=2, engram_dim=32),
    _SIZES,
)
# The widths put most parameters where few activations are (experts, tables), so that small cards hold them.
MEDIUM = KdaWorkload(
    "medium",
    Shape(
        layers=4, width=768, heads=12, ffn=2048, conv=4, experts=16, topk=2, expert_ffn=624,
        engram_rows=50000, engram_heads=4, engram_dim=64,
    ),
    _SIZES,
)  # fmt: skip
B1 = KdaWorkload(
    "b1",
    Shape(
        layers=6, width=2048, heads=32, ffn=5632, conv=4, experts=16, topk=2, expert_ffn=944,
        engram_rows=261500, engram_heads=8, engram_dim=64,
    ),
    _SIZES,
)  # fmt: skip
