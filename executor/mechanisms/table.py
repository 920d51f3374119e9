"""The memory mechanisms in their order: the cheapest first, as --fit-policy in-order engages them."""

from __future__ import annotations

from types import ModuleType

from executor.mechanisms import act_ckpt, engram_ram, moe_offload, muon_state_bf16, optim_8bit, recompute

ORDERED: tuple[ModuleType, ...] = (moe_offload, engram_ram, muon_state_bf16, optim_8bit, act_ckpt, recompute)
"""Each holds NAME, SCOPE, EXACT, ROW, eligibility, offered and apply."""
