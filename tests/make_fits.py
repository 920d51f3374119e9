"""docs/fits.md: what fits where, of the presets, under both policies of --fit: ``python tests/make_fits.py``.

It plans on cards as their makers list them and with the recorded accounts of the presets, so it needs neither a card
nor torch, and takes seconds. ``--print`` writes to stdout instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from planner.machine import catalogue  # noqa: E402
from planner.passes.cost import COMPONENTS, STATE  # noqa: E402
from planner.passes.order import draft_of  # noqa: E402
from planner.refusals.of_plans import does_not_fit  # noqa: E402
from schemas.seal import seal  # noqa: E402
from worlds import account, request  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "fits.md"
BATCH, SEQ, GIGA, GIBI = 8, 512, 10**9, 2**30
OLD_CARD, CARD = "gtx-1650", "rtx-5060-ti-16gb"
POLICIES = ("in-order", "cheapest")


class Row(NamedTuple):
    """One row of the specification's table: its model, cards and budget in GB, and what was foretold there."""

    model: str
    cards: str
    gigabytes: float
    foretold: str

    @property
    def name(self) -> str:
        count = "two of " if self.cards.endswith("x2") else ""
        return f"{self.model}, {count}{self.gigabytes:g} GB{' (GTX 1650)' if self.cards == OLD_CARD else ''}"


ROWS = (
    Row("small", CARD, 4, "nothing engaged (0.31 GiB)"),
    Row("small", CARD, 16, "nothing engaged"),
    Row("medium", CARD, 4, "nothing engaged (2.03 GiB)"),
    Row("medium", CARD, 16, "nothing engaged"),
    Row("b1", CARD, 4, "**does not fit** (6.68 GiB with everything)"),
    Row("b1", CARD, 16, "moe_offload, engram_ram (8.03 GiB)"),
    Row("b1", f"{CARD}x2", 16, "moe_offload, muon_state_bf16 (12.52 GiB)"),
    Row("b1", f"{CARD}x2", 17.1, ""),
    Row("medium", OLD_CARD, 4, ""),
)

HEAD = f"""# What fits where

The presets at {BATCH} x {SEQ} in budgets of 4 and 16 GB on an RTX 5060 Ti, and on two of them, under both policies of
`--fit`. Made by `python tests/make_fits.py` from listed cards and recorded accounts; a test holds this page to it. A
budget of N GB is N x 10^9 bytes, and a plan stays within nine tenths of it. Peaks are predicted; how they compare with
a card's own is in [memory.md](memory.md).

"Foretold" is what the first sketch of this system reckoned: 4 B an element of weights, 4 of gradients, the optimizers'
state, and 64 B a token and channel of activations. It left out weights in the compute dtype (kept for backward), a
table's gradient before it is added, copies of gradients while they are reduced, updates on their way from owner to
owner, and what libraries hold. 17.1 GB is all that a card sold as one of 16 GB has (16 GiB). A GTX 1650 computes in
fp32, where activations are twice as wide.
"""

COMPONENTS_SAID = """
## By component

GiB of the fullest rank. The backward peak is state + activations + buckets, the optimizer's state + update + buckets;
state is all that stands above the activations."""


def planned(row: Row, policy: str) -> tuple[dict[str, Any], str | None]:
    """The draft of a row under a policy, and the way out where it does not fit."""
    asked = request(batch=BATCH, seq=SEQ, fit=[round(row.gigabytes * GIGA)], fit_policy=policy)
    record, work = seal(catalogue.record_body(row.cards)), account(row.model)
    draft: Any = draft_of(asked, record, work)
    refused = [*does_not_fit(draft, {"request": asked, "record": record, "account": work})]
    return draft, refused[0].escape if refused else None


def page() -> str:
    made = {(row, policy): planned(row, policy) for row in ROWS for policy in POLICIES}
    parts = [*_outcomes(made), *_ways(made), *_pair(made), COMPONENTS_SAID, *_components(made)]
    return "\n".join([HEAD, *parts, ""])


def _outcomes(made: dict[Any, Any]) -> list[str]:
    lines = ["| preset and budget | dtype | foretold | in order | cheapest |", "|---|---|---|---|---|"]
    for row in ROWS:
        told = [_told(*made[row, policy]) for policy in POLICIES]
        dtype = made[row, "cheapest"][0]["ranks"][0]["dtype"]["chosen"]
        lines.append(f"| {row.name} | {dtype} | {row.foretold} | {told[0]} | {told[1]} |")
    return lines


def _told(draft: dict[str, Any], way: str | None) -> str:
    entry = draft["ranks"][0]
    peak, step = entry["memory"]["peak"]["value"] / GIBI, draft["step"]["seconds"]["value"]
    if way is not None:
        return f"**does not fit**: {peak:.2f} GiB with {engaged(draft)}"
    time = f", {step:.3g} s a step" if step is not None else ""
    return f"{engaged(draft)}: {peak:.2f} GiB{time}"


def engaged(draft: dict[str, Any]) -> str:
    names = [*draft["ranks"][0]["mechanisms"]["chosen"], *draft["fit"]["mechanisms"]["chosen"]]
    return ", ".join(names) or "nothing engaged"


def _ways(made: dict[Any, Any]) -> list[str]:
    lines = ["", "Where it does not fit, the nearest changes that would, each of them planned:", ""]
    ways = {row.name: made[row, "cheapest"][1] for row in ROWS if made[row, "cheapest"][1] is not None}
    return [*lines, *[f"- {name}: {way}" for name, way in ways.items()]]


def _pair(made: dict[Any, Any]) -> list[str]:
    """b1 on two cards of 16 GB: what was foretold and what is counted, side by side as sums."""
    (row,) = (row for row in ROWS if row.cards.endswith("x2") and row.foretold)
    draft, _ = made[row, "cheapest"]
    memory = draft["ranks"][0]["memory"]
    parts = [
        name for name in (*STATE, "activations", "buckets") if round(memory.get(name, {}).get("value", 0) / GIBI, 2)
    ]
    counted = " + ".join(f"{memory[name]['value'] / GIBI:.2f} {name.replace('_', ' ')}" for name in parts)
    alive = sorted(memory["alive"].items(), key=lambda item: -item[1]["value"])[:2]
    most = " and ".join(f"{item['value'] / GIBI:.2f} {name.replace('_', ' ')}" for name, item in alive)
    return [
        "",
        f"{row.name}, in GiB, a rank:",
        "",
        "- foretold: 3.99 masters + 3.99 gradients + 1.24 muon momentum in bf16 + 2.99 tables state + 0.31 activations"
        " and AdamW's state = 12.52",
        f"- counted, with {engaged(draft)}: {counted} = {memory['backward_peak']['value'] / GIBI:.2f}, of"
        f" {memory['limit']['value'] / GIBI:.2f} that may be filled. Of the activations {most}. A rank keeps the"
        " momentum of the matrices that it owns, half of all.",
    ]


def _components(made: dict[Any, Any]) -> list[str]:
    lines = []
    for policy in POLICIES:
        rows = [row for row in ROWS if policy == "in-order" or _differs(made, row)]
        if not rows:
            continue
        memories = [made[row, policy][0]["ranks"][0]["memory"] for row in rows]
        lines += ["", f"{'In order' if policy == 'in-order' else 'Cheapest, where it is otherwise'}:", ""]
        lines += [f"| | {' | '.join(row.name for row in rows)} |", "|---|" + "---:|" * len(rows)]
        parts = [name for name in COMPONENTS if any(name in memory for memory in memories)]
        for name in (*parts, "backward_peak", "optimizer_peak", "limit"):
            cells = [_cell(memory, name) for memory in memories]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(memory: dict[str, Any], name: str) -> str:
    value = memory.get(name, {}).get("value")
    return "" if value is None else f"{value / GIBI:.2f}"


def _differs(made: dict[Any, Any], row: Row) -> bool:
    one, other = (engaged(made[row, policy][0]) for policy in POLICIES)
    return one != other


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
