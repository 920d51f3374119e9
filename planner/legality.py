"""What a device may run: the capability ladder and the conditions of a kernel, as one table of rules.

The ladder is CUDA's table of arithmetic by compute capability: fp16 from sm_53, bf16 from sm_80. Native means native: a
card that only emulates bf16 does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.form import Json

BF16_FROM = (8, 0)
FP16_FROM = (5, 3)


def sm(text: str) -> tuple[int, int]:
    """Compute capability "8.6" as (8, 6)."""
    major, minor = text.split(".")
    return int(major), int(minor)


def sm_name(text: str) -> str:
    return "sm_" + text.replace(".", "")


def rung_verdict(rung: str, kind: str, capability: str | None) -> tuple[bool, str]:
    """Whether a device of ``kind`` (cpu, cuda) and compute ``capability`` can compute in ``rung``, and why."""
    if rung == "fp32":
        return True, "every device computes in fp32"
    if kind == "cpu":
        if rung == "bf16":
            return True, "PyTorch's CPU kernels take bf16 operands on every processor, natively or converted"
        return False, "PyTorch's CPU products in fp16 have no native path here"
    assert capability is not None
    start = BF16_FROM if rung == "bf16" else FP16_FROM
    able = sm(capability) >= start
    return able, f"{sm_name(capability)} {'has' if able else 'lacks'} native {rung} (from sm_{start[0]}{start[1]})"


def kernel_veto(
    row: Mapping[str, Json], kind: str, capability: str | None, dtype: str, toolchain: Mapping[str, Json]
) -> str | None:
    """Why the kernel ``row`` of an account cannot run so; None when it can.

    ``toolchain`` holds readings; a package whose version is unknown is not there.
    """
    if kind not in row["devices"]:
        return f"runs on {', '.join(row['devices'])}, not on {kind}"
    if row["min_sm"] is not None and kind == "cuda":
        if capability is None:
            return f"needs compute capability {row['min_sm']}, and this card's is unknown"
        if sm(capability) < sm(row["min_sm"]):
            return f"needs {sm_name(row['min_sm'])}, and this card is {sm_name(capability)}"
    if dtype not in row["dtypes"]:
        return f"takes {', '.join(row['dtypes'])}, not {dtype}"
    missing = [name for name in row["toolchain"] if toolchain.get(name, {}).get("value") is None]
    return f"needs {', '.join(missing)}, not installed" if missing else None
