"""What ``tests/benchmarks/memory.py`` tries: models at sizes, presets in budgets, and models drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple


class Case(NamedTuple):
    """A model at a batch and a length, with keys to set and further words of the command line; ``name`` stays what it
    is when sizes are made smaller."""

    name: str
    model: str
    batch: int
    seq: int
    keys: Mapping[str, str]
    more: tuple[str, ...] = ()


def case(line: str) -> Case:
    """``MODEL BxT [words]``; a word KEY=VALUE is a key to set."""
    model, shape, *words = line.split()
    batch, _, seq = shape.partition("x")
    keys = dict(word.split("=") for word in words if "=" in word)
    return Case(line.replace("--", ""), model, int(batch), int(seq), keys, tuple(w for w in words if "=" not in w))


# The most telling come first. FLA's kernels are tuned for heads of 64 channels, so tiny has two of them here.
CASES = tuple(map(case, (
    "medium 8x512",
    "b1 8x512",
    "small 8x512",
    "b1 8x512 --mechanisms moe_offload,engram_ram",
    "medium 8x512 --mechanisms act_ckpt",
    "medium 8x512 --mechanisms recompute",
    "medium 8x512 --mechanisms moe_offload",
    "medium 8x512 --dtype fp32",
    "medium 8x512 --dtype fp16",
    "medium 16x512",
    "medium 4x1024",
    "tiny 16x512 heads=2",
    "medium 8x512 --opt adamw",
    "medium 8x512 --mechanisms muon_state_bf16,optim_8bit",
    "medium 8x512 --mechanisms muon_state_bf16",
    "medium 8x512 --opt adamw --mechanisms optim_8bit",
    "medium 8x512 --mechanisms engram_ram",
    "small 8x512 --dtype fp32",
    "small 8x512 --mechanisms recompute",
    "b1 8x512 --mechanisms act_ckpt",
    "b1 8x512 --mechanisms recompute",
    "b1 4x1024",
    "small 32x512",
    "small 8x2048",
    "small 8x512 --dtype fp16 --mechanisms act_ckpt",
    "small 8x512 --opt adamw --mechanisms optim_8bit",
    "small 8x512 --mechanisms engram_ram",
    "medium 8x512 kda=chunk_torch",
    "medium 16x512 --mechanisms moe_offload,engram_ram,muon_state_bf16,optim_8bit,act_ckpt",
    "b1 16x512 --mechanisms moe_offload,act_ckpt",
    "b1 8x512 --opt adamw",
    "tiny 4x128 heads=2 --dtype fp32",
    "tiny 16x512 heads=2 --opt adamw",
    "tiny 16x512 heads=2 --dtype fp16 --mechanisms recompute",
)))  # fmt: skip

PRESETS = (
    ("medium 8x512", 4, "in-order"),
    ("b1 8x512", 16, "in-order"),
    ("b1 8x512", 16, "cheapest"),
)
"""What must run in a budget of so many GB."""

_DENSE = {"layers": "2", "width": "64", "heads": "2", "ffn": "128"}
_TABLE = {"engram_rows": "500", "engram_heads": "1", "engram_dim": "16"}
_ROUTED = {"layers": "2", "width": "64", "heads": "2", **_TABLE, "experts": "4", "expert_ffn": "32"}
SMALL = {"tiny": _DENSE, "small": {**_DENSE, **_TABLE}, "medium": _ROUTED, "b1": {**_ROUTED, "layers": "3"}}
_KEPT = ("layers", "experts", "engram_rows")  # what a smaller case keeps of the sizes that it was given


def smaller(found: Case) -> Case:
    """The same case at a size that a CPU runs in seconds."""
    kept = {key: found.keys[key] for key in _KEPT if key in found.keys}
    keys = read({**found.keys, **SMALL[found.model], **kept})
    # Not smaller, or the account's forms are not exact.
    return found._replace(batch=max(4, found.batch // 4), seq=max(64, found.seq // 8), keys=keys)


def read(keys: Mapping[str, str]) -> dict[str, str]:
    """``keys`` without those that others leave unread: a plan refuses them."""
    unread = {"topk", "expert_ffn"} if keys.get("experts") == "0" else {"ffn"} if "experts" in keys else set()
    unread |= {"engram_heads", "engram_dim"} if keys.get("engram_rows") == "0" else set()
    return {key: value for key, value in keys.items() if key not in unread}


def drawn(dice: random.Random, mechanisms: bool = True) -> Case:
    """A case with sizes drawn at random, and mechanisms that go together."""
    heads, layers, experts = dice.choice((8, 12, 16, 24)), dice.randint(1, 6), dice.choice((0, 8, 16))
    dtype, opt = dice.choice(("bf16", "bf16", "bf16", "fp16", "fp32")), dice.choice(("muon", "muon", "adamw"))
    table = dice.choice((0, 0, 20011, 50021))
    keys = {
        "layers": layers, "heads": heads, "width": 64 * heads, "experts": experts, "topk": dice.choice((1, 2)),
        "ffn": 64 * dice.randint(8, 40), "expert_ffn": 16 * dice.randint(10, 50), "engram_rows": table,
    }  # fmt: skip
    words = [f"medium {dice.choice((2, 4, 8, 12, 16))}x{dice.choice((256, 512, 1024))}"]
    words += [f"{key}={value}" for key, value in read({key: str(value) for key, value in keys.items()}).items()]
    words += [f"--dtype {dtype} --opt {opt}"]
    offered = {"act_ckpt": True, "recompute": True, "moe_offload": experts and layers > 1, "engram_ram": table}
    offered |= {"muon_state_bf16": opt == "muon", "optim_8bit": True}
    engaged = {name for name, there in offered.items() if there and dice.random() < 0.3}
    if "recompute" in engaged:
        engaged -= {"act_ckpt", "moe_offload"}
    words += [f"--mechanisms {','.join(sorted(engaged))}"] if engaged and mechanisms else []
    return case(" ".join(words))
