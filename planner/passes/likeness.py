"""What is alike is said once: nodes, and devices on alike nodes, that a record tells apart only by their names.

A device entry holds ``ids`` and, beside each, its place in the fleet's order (``order``): ranks follow that order,
whatever the entries' own order in a file is. A node entry may stand for several (``members``); a device entry on such a
node has as many ids on each member, member after member.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping

from schemas.form import Json

FREE_NEAR = 0.05  # free memory of alike devices within this of each other counts as alike
_NAMES = ("ids", "order", "node", "members")

Devices = dict[str, dict[str, Json]]
Nodes = dict[str, dict[str, Json]]


def node_count(plan: Mapping[str, Json]) -> int:
    """Nodes of the fleet: those that are alike share one entry with ``members``."""
    return sum(len(node.get("members", (0,))) for node in plan["fleet"]["nodes"].values())


def numbered(devices: Mapping[str, Json]) -> Devices:
    """``devices`` with each id's place in the order that the entries stand in now."""
    places = itertools.count()
    return {key: {**item, "order": [next(places) for _ in item["ids"]]} for key, item in devices.items()}


def in_order(devices: Mapping[str, Json]) -> list[tuple[str, str]]:
    """(key of the entry, id) of every device, in the fleet's order; without one, as the entries stand."""
    told = {key: item if "order" in item else numbered(devices)[key] for key, item in devices.items()}
    rows = [
        (place, key, name) for key, item in told.items() for place, name in zip(item["order"], item["ids"], strict=True)
    ]
    return [(key, name) for _, key, name in sorted(rows)]


def levelled(entries: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """``entries`` (nodes or devices) in which those that are alike but for their free memory, and near in that, all say
    the least of it: what each has free differs from one probing to the next, and a plan must hold on every one."""
    found = {key: dict(item) for key, item in entries.items()}
    classes: dict[str, list[str]] = {}
    for key, item in found.items():
        if isinstance(item.get("memory_free", {}).get("value"), int):
            classes.setdefault(_traits({**item, "memory_free": None}), []).append(key)
    for keys in classes.values():
        free = [found[key]["memory_free"]["value"] for key in keys]
        if min(free) < max(free) <= min(free) * (1 + FREE_NEAR):
            many = sum(len(found[key].get("ids", (key,))) for key in keys)
            why = f"the least of {many} that are alike; the most is {max(free)} B"
            level = {**found[keys[free.index(min(free))]]["memory_free"], "why": why}
            for key in keys:
                found[key]["memory_free"] = level
    return found


def grouped(nodes: Mapping[str, Json], devices: Mapping[str, Json]) -> tuple[Nodes, Devices]:
    """The same fleet with alike nodes, and alike devices of alike nodes, in one entry each."""
    places = {name: place for place, (_, name) in enumerate(in_order(devices))}
    on_node: dict[str, list[tuple[str, Json]]] = {name: [] for name in nodes}
    for item in devices.values():
        on_node[item["node"]].append((_traits(item), item))
    classes: dict[str, list[str]] = {}
    for name, node in nodes.items():
        held = sorted((traits, len(item["ids"])) for traits, item in on_node[name])
        alone = "" if "members" not in node else name  # what stands for several already is left as it is
        classes.setdefault(json.dumps([_traits(node), held, alone]), []).append(name)
    found_nodes: Nodes = {}
    found_devices: Devices = {}
    for names in classes.values():
        first = nodes[names[0]]
        found_nodes[names[0]] = {**first, "members": list(names)} if len(names) > 1 else dict(first)
        for item in _merged([on_node[name] for name in names]):
            item |= {"node": names[0], "order": [places[identity] for identity in item["ids"]]}
            found_devices[item["ids"][0]] = item
    return found_nodes, found_devices


def _traits(item: Mapping[str, Json]) -> str:
    """Everything of an entry but its names."""
    return json.dumps({key: value for key, value in item.items() if key not in _NAMES}, sort_keys=True)


def _merged(by_node: Iterable[list[tuple[str, Json]]]) -> list[dict[str, Json]]:
    """One entry for all devices of the same traits, ids node after node."""
    found: dict[str, dict[str, Json]] = {}
    for held in by_node:
        for traits, item in held:
            if traits in found:
                found[traits]["ids"] = [*found[traits]["ids"], *item["ids"]]
            else:
                found[traits] = dict(item)
    return list(found.values())
