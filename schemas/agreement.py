"""What a plan's parts must agree on beyond their own shapes: ranks, devices and owners make one whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from schemas.form import Json, Unfaithful


def refuse_disagreement(plan: Mapping[str, Json], name: str) -> None:
    """Raise Unfaithful, naming the pointer, where ranks are missing or twofold, or name devices or owners that are
    not there. The plan's schema must hold."""
    known = Counter(identity for device in plan["fleet"]["devices"].values() for identity in device["ids"])
    _refuse(name, "/fleet/devices", "names a device twice", [key for key, times in known.items() if times > 1])
    for key, device in plan["fleet"]["devices"].items():
        _refuse(name, f"/fleet/devices/{key}/node", "names no node", {device["node"]} - plan["fleet"]["nodes"].keys())
        if len(device.get("order", device["ids"])) != len(device["ids"]):
            raise Unfaithful(f"{name}: /fleet/devices/{key}/order: has not one place for each of the ids")
    for place, entry in enumerate(plan["ranks"]):
        if len(entry["members"]) != len(entry["devices"]):
            raise Unfaithful(f"{name}: /ranks/{place}/devices: has not one device for each of the members")
        _refuse(name, f"/ranks/{place}/devices", "names no device of the fleet", set(entry["devices"]) - known.keys())
    members = [member for entry in plan["ranks"] for member in entry["members"]]
    if sorted(members) != list(range(len(members))):
        raise Unfaithful(f"{name}: /ranks: the members are not the ranks 0 to {len(members) - 1}, each once")
    owners = plan["exchange"]["owners"]["chosen"] if "owners" in plan["exchange"] else []
    _refuse(name, "/exchange/owners", "names no rank", set(owners) - set(members))


def _refuse(name: str, pointer: str, what: str, found: Collection[object]) -> None:
    if found:
        raise Unfaithful(f"{name}: {pointer}: {what}: {', '.join(sorted(map(str, found)))}")
