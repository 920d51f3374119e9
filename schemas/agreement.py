"""What the parts of a plan, and of a record, must agree on beyond their own shapes: nodes, devices, ranks and owners
make one whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from schemas.form import Json, Unfaithful

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def refuse_disagreement(document: Mapping[str, Json], name: str) -> None:
    """Raise Unfaithful, naming the pointer, where ranks are missing or twofold, name devices or owners that are not
    there, or exchange by another way than their devices do; or devices name nodes that are not there. The schema of
    ``document``, a plan or a record, must hold."""
    if document["format"] == "dormouse.record":
        _known_devices(document, "", name)
    else:
        _refuse_ranks(document, _known_devices(document["fleet"], "/fleet", name), name)


def _known_devices(fleet: Mapping[str, Json], at: str, name: str) -> Collection[str]:
    """The ids of all devices of ``fleet``, which lies ``at`` that pointer."""
    known = Counter(identity for device in fleet["devices"].values() for identity in device["ids"])
    _refuse(name, f"{at}/devices", "names a device twice", [key for key, times in known.items() if times > 1])
    for key, device in fleet["devices"].items():
        _refuse(name, f"{at}/devices/{key}/node", "names no node", {device["node"]} - fleet["nodes"].keys())
        if len(device.get("order", device["ids"])) != len(device["ids"]):
            raise Unfaithful(f"{name}: {at}/devices/{key}/order: has not one place for each of the ids")
        if len(device["ids"]) % len(fleet["nodes"][device["node"]].get("members", [""])):
            raise Unfaithful(f"{name}: {at}/devices/{key}/ids: are not as many on each of the node's members")
    return known.keys()


def _refuse_ranks(plan: Mapping[str, Json], known: Collection[str], name: str) -> None:
    for place, entry in enumerate(plan["ranks"]):
        if len(entry["members"]) != len(entry["devices"]):
            raise Unfaithful(f"{name}: /ranks/{place}/devices: has not one device for each of the members")
        _refuse(name, f"/ranks/{place}/devices", "names no device of the fleet", set(entry["devices"]) - set(known))
    members = [member for entry in plan["ranks"] for member in entry["members"]]
    if sorted(members) != list(range(len(members))):
        raise Unfaithful(f"{name}: /ranks: the members are not the ranks 0 to {len(members) - 1}, each once")
    kinds = {device["kind"] for device in plan["fleet"]["devices"].values()}
    backend = plan["exchange"]["backend"]["chosen"]
    if backend not in ({"none"} if len(members) == 1 else {_BACKENDS[kind] for kind in kinds}):
        raise Unfaithful(
            f"{name}: /exchange/backend: {len(members)} ranks on {' and '.join(sorted(kinds))} have no {backend}"
        )
    if len(members) > 1 and "reduce_dtype" not in plan["exchange"]:
        raise Unfaithful(f"{name}: /exchange: says no dtype for what {len(members)} ranks reduce")
    owners = plan["exchange"]["owners"]["chosen"] if "owners" in plan["exchange"] else []
    _refuse(name, "/exchange/owners", "names no rank", set(owners) - set(members))


def _refuse(name: str, pointer: str, what: str, found: Collection[object]) -> None:
    if found:
        raise Unfaithful(f"{name}: {pointer}: {what}: {', '.join(sorted(map(str, found)))}")
