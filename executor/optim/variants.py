"""What may update the AdamW route, by the name that a plan gives it; one for the whole fleet."""

from __future__ import annotations

from executor.optim.adamw import AdamW
from executor.optim.adamw_8bit import AdamW8bit
from executor.optim.adamw_fused import FusedAdamW

AnyAdamW = AdamW | FusedAdamW | AdamW8bit

ADAMW: dict[str, type[AdamW] | type[FusedAdamW] | type[AdamW8bit]] = {
    "ieee": AdamW,
    "fused": FusedAdamW,
    "8bit": AdamW8bit,
}
