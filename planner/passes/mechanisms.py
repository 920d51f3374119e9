"""Sets of memory mechanisms: which there are for a rank, and which go together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planner.passes.layout import device_pointer
from planner.passes.sharding import is_sharded
from schemas.document import resolve
from schemas.form import Json

Mechanisms = tuple[str, ...]
Rows = Mapping[str, Mapping[str, Json]]


@dataclass(frozen=True)
class Offer:
    """What of an account's mechanisms one fleet may engage. ``barred``: those that it cannot, and why; ``asked``: those
    asked for by name, which are engaged whatever the memory."""

    rows: Rows
    barred: Mapping[str, str]
    asked: Mechanisms

    def names(self, scope: str, kinds: Collection[str]) -> Mechanisms:
        """Those decided for a "rank" or for the "fleet" that run on all ``kinds``."""
        return tuple(
            name
            for name, row in self.rows.items()
            if row["scope"] == scope and name not in self.barred and set(kinds) <= set(row["devices"])
        )

    def together(self, names: Collection[str]) -> bool:
        """Whether no mechanism of ``names`` excludes another."""
        return not any(set(self.rows[name].get("excludes", ())) & set(names) for name in names)

    def subsets(
        self, names: Sequence[str], beside: Mechanisms = (), asked: Collection[str] | None = None
    ) -> list[Mechanisms]:
        """The sets of ``names`` that go together with ``beside``, smallest first, each in the order of ``names``; all
        hold those of them that were ``asked`` for (None: in the request)."""
        must = set(self.asked if asked is None else asked) & set(names)
        sizes = range(len(must), len(names) + 1)
        sets = itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes)
        return [chosen for chosen in sets if must <= set(chosen) and self.together((*beside, *chosen))]

    def open_sets(self, kind: str, fit: Json, fleet: Mechanisms | None = None) -> list[Mechanisms]:
        """The sets that --fit may still choose of for one rank of ``kind``: every subset of its own, beside the
        ``fleet``'s (None: not decided yet, so all of them, which save most and cost no compute). Without --fit, what
        was asked for alone."""
        own, shared = self.names("rank", [kind]), self.names("fleet", [kind])
        if fit in (None, "off"):
            return [tuple(name for name in (*shared, *own) if name in self.asked)]
        beside = shared if fleet is None else fleet
        return [(*beside, *chosen) for chosen in self.subsets(own, beside)]


def offer(draft: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json]) -> Offer:
    """What the fleet of a draft may engage."""
    rows: Rows = dict(sorted(account["mechanisms"].items(), key=lambda item: int(item[1]["order"])))
    reasons = {name: barred(draft, row) for name, row in rows.items()}
    asked = request.get("mechanisms") or ()
    return Offer(
        rows, {name: why for name, why in reasons.items() if why}, tuple(name for name in rows if name in asked)
    )


def barred(draft: Mapping[str, Json], row: Mapping[str, Json]) -> str | None:
    """Why the fleet of ``draft`` cannot engage a mechanism at all; None where it can."""
    world = sum(len(entry["members"]) for entry in draft["ranks"])
    if row.get("fleet") is False and world > 1:
        return f"one rank alone can have it, and here are {world}: {row['fleet_why']}"
    if row.get("sharded") is False and is_sharded(draft):
        return f"not under --shard fsdp: {row['sharded_why']}"
    asked = draft["workload"]["config"].get("adamw", {}).get("asked")
    if row.get("component") == "adamw_state" and asked not in (None, "auto"):
        return f"adamw={asked} was asked for, and this is an AdamW of its own"
    missing = [item for item in row.get("toolchain", ()) if draft["toolchain"].get(item, {}).get("value") is None]
    if missing:
        return f"needs {', '.join(missing)}, not installed"
    if row.get("alike") and len(kinds_of(draft)) > 1:
        return f"its arithmetic differs between kinds of device, and here are {', '.join(kinds_of(draft))}"
    for entry in draft["ranks"]:
        for package in set(row.get("toolchain", ())) & entry.get("served", {}).keys():
            served = entry["served"][package]
            if not served["value"]:
                how = "is not known to serve" if served["value"] is None else "does not serve"
                return f"{package} {how} {_name(draft, entry)}: {served['why']}"
    return None


def kinds_of(draft: Mapping[str, Json]) -> list[str]:
    """The kinds of device of a fleet: what computes alike has one name and one compute capability."""
    return sorted({_name(draft, entry) for entry in draft["ranks"]})


def _name(draft: Mapping[str, Json], entry: Mapping[str, Json]) -> str:
    device = resolve(draft, device_pointer(draft, entry))
    name = str(device["name"]["value"] or device["kind"])
    return f"{name} (sm {device['sm']['value']})" if device.get("sm", {}).get("value") else name
