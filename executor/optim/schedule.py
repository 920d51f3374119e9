"""The learning-rate factor by step."""

from __future__ import annotations


def factor(step: int, steps: int, warmup: int, final: float) -> float:
    """Factor on the learning rate at step 0 .. steps-1.

    Linear warm-up: (step + 1) / warmup over the first ``warmup`` steps; then a straight line from 1 at step ``warmup``
    to ``final`` at the last step. Only sums, products and quotients, so every rank gets the same bits.
    """
    if step < warmup:
        return (step + 1) / warmup
    last = steps - 1
    if last <= warmup:
        return final if step >= last and last > 0 else 1.0
    done = (min(step, last) - warmup) / (last - warmup)
    return 1.0 - (1.0 - final) * done
