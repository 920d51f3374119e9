"""The tests of the refusals that a machine's own state calls for: its wheel, its slices, its modes, its platform."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.machine.wheels import holds, serving
from planner.passes.legality import sm_name
from planner.refusals.refusal import Refusal
from schemas.form import Json

Facts = Mapping[str, Json]


def _cards(facts: Facts) -> dict[str, Json]:
    return {key: item for key, item in facts["record"]["devices"].items() if item["kind"] == "cuda"}


def _value(item: Facts, key: str) -> Json:
    return item.get(key, {}).get("value")


def _said(key: str, item: Facts) -> str:
    capability = _value(item, "sm")
    name = _value(item, "name") or "a card without a name"
    return f"{name} ({key}, {sm_name(capability)})" if capability else f"{name} ({key})"


def wheel_lacks_card(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """A card that the wheel holds no machine code for would end with "no kernel image" at its first launch."""
    cards, arches = _cards(facts), _value(facts["record"]["toolchain"], "arch_list")
    if arches is None:
        return
    lacking = [
        _said(k, item) for k, item in cards.items() if _value(item, "sm") and not holds(arches, item["sm"]["value"])
    ]
    if lacking:
        yield Refusal(
            "wheel-lacks-card",
            f"a run on {', '.join(lacking)}",
            f"torch {_value(facts['record']['toolchain'], 'torch')} holds code for {', '.join(map(sm_name, arches))}",
            "its first kernel would end with: no kernel image is available for execution on the device",
            _wheel_for(cards),
        )


def no_wheel_serves(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """Cards of one fleet that no one published wheel serves together."""
    cards = _cards(facts)
    known = {_value(item, "sm") for item in cards.values()} - {None}
    if known and serving(known) is None:
        yield Refusal(
            "no-wheel-serves",
            f"one fleet of {', '.join(_said(key, item) for key, item in cards.items())}",
            f"compute capabilities {', '.join(sorted(map(sm_name, known)))}",
            "no build of torch 2.11 or newer holds code for all of them: Volta and older ended where Blackwell began",
            "plan the older and the newer cards apart",
        )


def _wheel_for(cards: Facts) -> str:
    wheel = serving({_value(item, "sm") for item in cards.values()} - {None})
    if wheel is None:
        return "no published wheel serves all of these cards: plan the older and the newer ones apart"
    return f"install {wheel.name}, which serves every card here, and plan anew"


def cuda_missing(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    cards, toolchain = _cards(facts), facts["record"]["toolchain"]
    version = _value(toolchain, "torch")
    if cards and version is not None and version.endswith("+cpu"):
        yield Refusal(
            "cuda-missing",
            f"a run on {', '.join(_said(key, item) for key, item in cards.items())}",
            f"torch {version}",
            "a CPU build of torch launches nothing on a card",
            _wheel_for(cards),
        )


def nccl_platform(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    cards = _cards(facts)
    ranks = sum(len(item["ids"]) for item in cards.values())
    platforms = {_value(node, "platform") for node in facts["record"]["nodes"].values()}
    if ranks > 1 and "windows" in platforms:
        yield Refusal(
            "nccl-windows",
            f"{ranks} cards in one run on Windows",
            "NCCL does not exist for Windows",
            "gloo would carry CUDA gradients through the host under the plan's name",
            "run it under Linux or WSL 2, or plan one card",
        )


def mig_parent(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    for key, item in _cards(facts).items():
        if _value(item, "mig") == "on":
            yield Refusal(
                "mig-parent",
                f"a run on {_said(key, item)}",
                "the card is divided (MIG on), and no slice of it is visible",
                "a divided card computes in its slices only",
                "name one slice: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L lists them)",
            )


def mig_fleet(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    cards = _cards(facts).values()
    slices = [identity for item in cards if _value(item, "mig") == "slice" for identity in item["ids"]]
    if len(slices) > 1:
        yield Refusal(
            "mig-fleet",
            "several MIG slices in one run",
            ", ".join(slices),
            "NCCL does not join slices of a divided card, and CUDA shows a process one slice only",
            "plan one slice, or end the division (nvidia-smi -mig 0)",
        )


def compute_mode(plan: Facts, facts: Facts) -> Iterator[Refusal]:
    """Prohibited: no process may compute. Exclusive: one may, so a card that another holds already is not to be had."""
    for key, item in _cards(facts).items():
        mode, free = _value(item, "compute_mode"), _value(item, "memory_free")
        held = mode == "exclusive_process" and free is None
        if mode == "prohibited" or held:
            yield Refusal(
                "compute-mode",
                f"a run on {_said(key, item)}",
                f"compute mode {mode}" + (", and its free memory cannot be read" if held else ""),
                "another process holds the card, and the driver gives no second context"
                if held
                else "the driver lets no process compute on it",
                "end the other process, or nvidia-smi -c DEFAULT" if held else "nvidia-smi -c DEFAULT",
            )
