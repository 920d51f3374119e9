"""What a device may run, as two readings: what its operands allow, and what the installed toolchain serves.

The first is CUDA's table of arithmetic by compute capability (the specification's matrix), one row a feature. Native
means native: a card that only emulates bf16 does not have it. The second is the toolchain's own word, which can only be
stricter. A rank's verdict is the stricter of the two, and names which.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.form import Json

# Feature -> the compute capability it begins at, and why there. None: every CUDA card.
FROM: dict[str, tuple[tuple[int, int] | None, str]] = {
    "fp32": (None, "every device computes in fp32"),
    "fp16": ((5, 3), "half-precision arithmetic begins with Maxwell's sm_53"),
    "bf16": ((8, 0), "bf16 tensor cores begin with Ampere's sm_80"),
    "triton_moe": ((8, 0), "the grouped product's operands are bf16"),
    "fla_kda": ((5, 3), "the fused kernel's operands are fp16 or wider"),
}
# Compute capabilities that multiply fp16 by this share of their fp32 rate (arithmetic throughput, CUDA C++ programming
# guide): native, and no gain. The P100 beside them (sm_60) has twice its fp32 rate.
SLOW_FP16 = {"6.1": "1/64"}
# Triton generates code from sm_70 on; it documents support from sm_80, and below that its products use no tensor cores.
TRITON_FROM = (7, 0)
# Machine code in bitsandbytes' library for CUDA 13.
BITSANDBYTES_CUDA13 = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def sm(text: str) -> tuple[int, int]:
    """Compute capability "8.6" as (8, 6)."""
    major, minor = text.split(".")
    return int(major), int(minor)


def sm_name(text: str) -> str:
    return "sm_" + text.replace(".", "")


def begins_at(feature: str) -> str:
    """The name of the compute capability that ``feature`` begins at."""
    start = FROM[feature][0]
    return "any" if start is None else sm_name(f"{start[0]}.{start[1]}")


def legal(feature: str, kind: str, capability: str | None) -> tuple[bool, str]:
    """Whether operands of ``feature`` are native on a device of ``kind`` (cpu, cuda) and ``capability``, and why."""
    start, why = FROM[feature]
    if start is None:
        return True, why
    if kind == "cpu":
        if feature in ("bf16", "fp16"):
            return True, f"PyTorch's CPU kernels take {feature} operands on every processor, natively or converted"
        return False, "PyTorch's CPU kernels have no path for it here"
    assert capability is not None
    able = sm(capability) >= start
    return able, f"{sm_name(capability)} {'has' if able else 'lacks'} native {feature} (from {begins_at(feature)})"


def is_gtx16(name: str | None) -> bool:
    """Whether the card is a Turing GTX 16xx, whose half precision was seen to give NaN (pytorch 58123, 77955)."""
    return name is not None and "GTX 16" in name.upper().replace("-", " ")


def kernel_veto(
    row: Mapping[str, Json],
    kind: str,
    capability: str | None,
    dtype: str,
    toolchain: Mapping[str, Json],
    shape: Mapping[str, int],
) -> str | None:
    """Why the kernel ``row`` of an account cannot run so; None when it can. The stricter word is named.

    ``toolchain`` holds readings; a package whose version is unknown is not there. ``shape`` is what it is called with.
    """
    if kind not in row["devices"]:
        return f"runs on {', '.join(row['devices'])}, not on {kind}"
    if row["min_sm"] is not None and kind == "cuda":
        if capability is None:
            return f"needs compute capability {row['min_sm']}, and this card's is unknown"
        if sm(capability) < sm(row["min_sm"]):
            return f"needs {sm_name(row['min_sm'])}, and this card is {sm_name(capability)} (its operands rule it out)"
    if dtype not in row["dtypes"]:
        return f"takes {', '.join(row['dtypes'])}, not {dtype}"
    for size, most in row.get("most", {}).items():
        if shape.get(size, 0) > most:
            return f"takes a {size} of at most {most}, not {shape[size]}"
    return _toolchain_veto(row, kind, capability, toolchain)


def _toolchain_veto(
    row: Mapping[str, Json], kind: str, capability: str | None, toolchain: Mapping[str, Json]
) -> str | None:
    missing = [name for name in row["toolchain"] if toolchain.get(name, {}).get("value") is None]
    if missing:
        return f"needs {', '.join(missing)}, not installed"
    if "triton" in row["toolchain"] and kind == "cuda" and capability is not None and sm(capability) < TRITON_FROM:
        return f"needs Triton, which generates no code for {sm_name(capability)} (the toolchain rules it out)"
    return None
