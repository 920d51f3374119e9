"""What ``tests/benchmarks/throughput.py`` tells: the page of a record, a section a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def render(record: Mapping[str, Any], about: str) -> str:
    """The page of a record: what was measured on, then a section a model. ``about``: what was done, in paragraphs, of
    which the first and the last are of the command."""
    ceiling, versions = record["ceilings"], record["versions"]
    said = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    _, *reading, _ = about.split("\n\n")
    lines = [
        "# How fast a training step is", "", *"\n\n".join(reading).splitlines(), "",
        f"{record['device']}; {said}.",
        f"Best possible here: {ceiling['flops'] / 1e12:,.1f} TFLOP/s ({ceiling['product']}^3 product), "
        f"{ceiling['bytes'] / 1e9:,.0f} GB/s ({ceiling['copy_bytes'] / 2**20:,.0f} MiB copied).",
    ]  # fmt: skip
    for model in record["models"]:
        lines += ["", *(_failed(model) if "error" in model else _section(model))]
    return "\n".join(lines) + "\n"


def _title(model: Mapping[str, Any]) -> str:
    return f"## {model['model']}, {model['batch']} x {model['seq']}"


def _failed(model: Mapping[str, Any]) -> list[str]:
    return [_title(model), "", f"Not measured: {model['error']}"]


def _section(model: Mapping[str, Any]) -> list[str]:
    wall, kernels, floor = model["wall"]["median"], model["kernel_seconds"], model["floor_seconds"]
    peak = "not measured" if model["peak_bytes"] is None else f"{model['peak_bytes'] / 2**30:.2f} GiB"
    ends = f"{_ms(model['wall']['least'])} to {_ms(model['wall']['most'])}"
    lines = [
        f"{_title(model)}, {model['dtype']}", "",
        f"{model['parameters'] / 1e6:,.1f} M parameters; {model['tokens_per_second']:,.0f} tokens/s; peak {peak}. "
        f"A step takes {_ms(wall)} ms by the host ({ends}), {_ms(model['device']['total']['median'])} ms by "
        f"{model['clock']}, and is launched in {_ms(model['launched']['median'])} ms. Its "
        f"{model['kernels']:,.0f} kernels take {_ms(kernels)} ms, at best {_ms(floor)} ms.",
        "", _waits(model["synchronisations"]), "",
        "| part | kernels | forward, update ms | backward ms | share | GFLOP | least MB | floor ms | ratio | binds |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    first = "launches, then " if model["launch_bound"] else ""
    for row in model["rows"]:
        binds = "" if row["binds"] is None else first + row["binds"]
        lines.append(_line(row["part"], row["kernels"], row["forward"], row["backward"], row["seconds"] / kernels,
                           row["flops"], row["least_bytes"], row["floor"], row["ratio"], binds))  # fmt: skip
    total = {key: sum(row[key] for row in model["rows"]) for key in ("forward", "backward", "flops", "least_bytes")}
    binds = "launches" if model["launch_bound"] else ""
    lines.append(_line("all", model["kernels"], total["forward"], total["backward"], 1.0, total["flops"],
                       total["least_bytes"], floor, kernels / floor, binds))  # fmt: skip
    lines.append(f"\nThe step is {wall / floor:.1f} times its floor.")
    return lines


def _waits(waits: Mapping[str, int] | None) -> str:
    if waits is None:
        return "Host synchronisations: a CPU has none to count."
    lines = "".join(f"\n- {count} x `{line}`" for line, count in waits.items())
    return f"Host synchronisations until the step is launched: {sum(waits.values())}.{lines}"


def _line(part: str, kernels: float, forward: float, backward: float, share: float, flops: int, least: int,
          floor: float, ratio: float | None, binds: str) -> str:  # fmt: skip
    cells = (part, f"{kernels:,.0f}", _ms(forward), _ms(backward), f"{share:.1%}", f"{flops / 1e9:,.1f}",
             f"{least / 1e6:,.1f}", _ms(floor), "" if ratio is None else f"{ratio:.1f}", binds)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds < 0.01 else f"{1e3 * seconds:,.1f}"
