"""Made-up accounts: that of b1 with fewer mechanisms, each of which saves and costs what is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from worlds import account

ORDER = ["moe_offload", "engram_ram", "muon_state_bf16", "optim_8bit", "act_ckpt", "recompute"]
VARIANTS = ("moe_offload", "act_ckpt", "moe_offload+act_ckpt", "recompute")


@st.composite
def accounts(draw: st.DrawFn) -> dict[str, Any]:
    """The account of b1, drawn otherwise."""
    made = account("b1")
    dropped = draw(st.sets(st.sampled_from(ORDER), max_size=3))
    made["mechanisms"] = {name: row for name, row in made["mechanisms"].items() if name not in dropped}
    scales = {name: (draw(st.floats(0.05, 1.0)), draw(st.floats(1.0, 2.0))) for name in VARIANTS}
    for by_variant in [v for by_dtype in made["compute"]["cuda"].values() for v in by_dtype.values()]:
        for name, (saved, work) in scales.items():
            forms = by_variant[name]
            forms["saved"] = {part: _times(form, saved) for part, form in by_variant["plain"]["saved"].items()}
            forms["flops"] = _times(by_variant["plain"]["flops"], work)
    return made


def _times(form: dict[str, float], factor: float) -> dict[str, float]:
    return {key: float(f"{value * factor:.6g}") for key, value in form.items()}


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of ``names``, each in their order."""
    sizes = range(len(names) + 1)
    return list(itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes))
