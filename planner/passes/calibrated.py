"""Times as passes put them: modelled over rates, or where a measured run speaks, modelled times its ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.passes.cost import UNIT_RATES, ratio_at
from planner.passes.ledger import Ledger
from schemas.document import reading, resolve
from schemas.form import Json


def calibrated_time(
    ledger: Ledger,
    pointer: str,
    calibration: str,
    formula: Callable[..., float],
    work: Sequence[str],
    rates: Sequence[str],
    said: tuple[str, str | None],
    *,
    measurable: bool = False,
) -> None:
    """Put a time at ``pointer``: ``formula(*work, *rates)``, as it is or times the ratio that ``calibration`` teaches.

    A ratio is measured / modelled at the rates' own values, so under it the result rests on the measurement and not on
    the rates: at a measured batch the rates cancel. Its range is the measured spread. ``said`` holds the why, and the
    pointer of the batch that the ratio is taken at (None: the ratio holds for every batch).
    """
    why, batch = said
    if not _holds(ledger, calibration):
        ledger.compute(pointer, "s", formula, [*work, *rates], why, measurable=measurable)
        return
    known = [ledger.value(rate) for rate in rates]
    modelled = formula(*[ledger.value(source) for source in work], *(UNIT_RATES if None in known else known))
    points = ledger.value(calibration)
    value, low, high = (
        modelled * ratio_at(points, ledger.value(batch) if batch else points[-1][0], at) for at in (1, 2, 3)
    )
    inputs = [*work, calibration, *([batch] if batch else [])]
    why = f"{why}, times the measured ratio"
    item = reading(float(value), "s", "computed", why, inputs=inputs, low=low, high=high, measurable=measurable)
    ledger.put(pointer, item)


def _holds(ledger: Ledger, pointer: str) -> bool:
    try:
        found: Json = resolve(ledger.draft, pointer)
    except KeyError:
        return False
    return found is not None
