"""The toolchain's word on a card: whether PyTorch, Triton and bitsandbytes hold or make code for it."""

from __future__ import annotations

from planner.machine.wheels import holds
from planner.passes.ledger import Ledger
from planner.passes.legality import BITSANDBYTES_CUDA13, TRITON_FROM, sm, sm_name
from schemas.document import reading, unknown
from schemas.form import Json


def put_served(ledger: Ledger, base: str, device: str) -> None:
    """Put ``served/torch``, ``/triton`` and ``/bitsandbytes`` below ``base``, for the card at ``device``."""
    capability = ledger.value(f"{device}/sm")
    for package, source, judged in (
        ("torch", "/toolchain/arch_list", _torch),
        ("triton", "/toolchain/triton", _triton),
        ("bitsandbytes", "/toolchain/bitsandbytes", _bitsandbytes),
    ):
        inputs = [f"{device}/sm", *([source] if source.split("/")[2] in ledger.draft["toolchain"] else [])]
        ledger.put(f"{base}/served/{package}", _item(judged(ledger, capability), inputs, package))


def _item(verdict: tuple[bool | None, str], inputs: list[str], package: str) -> dict[str, Json]:
    able, why = verdict
    return unknown("", why, inputs=inputs) if able is None else reading(able, "", "computed", why, inputs=inputs)


def _installed(ledger: Ledger, name: str) -> str | None:
    version: str | None = ledger.draft["toolchain"].get(name, {}).get("value")
    return version


def _torch(ledger: Ledger, capability: str | None) -> tuple[bool | None, str]:
    arches = ledger.draft["toolchain"].get("arch_list", {}).get("value")
    if arches is None or capability is None:
        return None, "the wheel's architectures or the card's capability are unknown"
    able = holds(arches, capability)
    listed = ", ".join(sm_name(arch) for arch in arches)
    return able, f"the wheel holds {listed}: {'it serves' if able else 'nothing for'} {sm_name(capability)}"


def _triton(ledger: Ledger, capability: str | None) -> tuple[bool | None, str]:
    version = _installed(ledger, "triton")
    if version is None or capability is None:
        return None, "Triton is not installed, or the card's capability is unknown"
    able = sm(capability) >= TRITON_FROM
    slow = able and sm(capability) < (8, 0)
    return able, f"Triton {version} generates code from sm_70 on" + (
        "; below sm_80 without tensor cores" if slow else ""
    )


def _bitsandbytes(ledger: Ledger, capability: str | None) -> tuple[bool | None, str]:
    version, cuda = _installed(ledger, "bitsandbytes"), _installed(ledger, "cuda")
    if version is None or capability is None:
        return None, "bitsandbytes is not installed, or the card's capability is unknown"
    if cuda is None or not cuda.startswith("13."):
        return None, f"which architectures its library for CUDA {cuda or 'unknown'} holds is not known"
    able = holds(BITSANDBYTES_CUDA13, capability)
    return able, f"its library for CUDA 13 holds {', '.join(map(sm_name, BITSANDBYTES_CUDA13))}"
