"""Which builds of PyTorch hold machine code for which cards, as read from the published wheels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.passes.legality import sm


@dataclass(frozen=True)
class Wheel:
    """One line of wheels: CUDA version, the torch versions it is true of, and the architectures in it."""

    cuda: str
    torch: str
    arches: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"a cu{self.cuda.replace('.', '')} build of torch {self.torch}"


# cu128 lost Maxwell and Pascal with torch 2.8 and Volta with 2.11, so after 2.10 no one wheel holds both Volta or older
# and Blackwell.
WHEELS = (
    Wheel("13.0", "2.11 or newer", ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")),
    Wheel("12.8", "2.11 or newer", ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")),
    Wheel("12.6", "2.11 or newer", ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0")),
)


def holds(arches: Iterable[str], capability: str) -> bool:
    """Whether machine code for ``arches`` runs on a card of ``capability``: within one major version, code for a minor
    version runs on it and on every later one."""
    major, minor = sm(capability)
    return any(sm(arch)[0] == major and sm(arch)[1] <= minor for arch in arches)


def serving(capabilities: Iterable[str]) -> Wheel | None:
    """The first wheel that holds code for all ``capabilities``; None when none does."""
    wanted = list(capabilities)
    return next((wheel for wheel in WHEELS if all(holds(wheel.arches, card) for card in wanted)), None)
