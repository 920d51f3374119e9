"""Where a changed item of a plan came from: the inputs it names, and what no item names, the request and the record.

A decision names the readings it was made from, but not the option that asked for it. `ORIGINS` adds that by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from schemas.document import resolve
from schemas.form import Json

Plans = Sequence[Mapping[str, Json]]
"""The older and the newer plan."""


class Origin(NamedTuple):
    """What the items at pointers like ``pattern`` come from beside their inputs; {1} is the pattern's first group.

    ``asked`` always counts, where it changed. ``also`` counts only where neither that nor an input explains the change:
    what a pass looks at without naming it.
    """

    pattern: str
    asked: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


_WORK = ("/workload/digest",)
_SHAPE = ("/request/batch", "/request/capacity", "/request/seq", "/request/dtype", *_WORK, "/request/devices")

ORIGINS: tuple[Origin, ...] = (
    Origin("/workload/model", ("/request/model",)),
    Origin("/workload/digest", ("/request/model", "/request/set", "/request/opt")),
    Origin("/workload/(opt|steps|seed)", ("/request/{1}",), _WORK),
    Origin("/workload/config/([^/]+)", ("/request/set/{1}",), ("/request/model", "/request/opt", *_WORK)),
    Origin("/workload/data/sources(/[0-9]+)?.*", ("/request/data{1}",)),
    Origin("/ranks/[0-9]+/dtype", ("/request/dtype",)),
    Origin("/ranks/[0-9]+/kernels/([^/]+)", ("/request/set/{1}",), (*_WORK, "/request/set")),
    Origin("/ranks/[0-9]+/batch", ("/request/batch", "/request/capacity"), (*_SHAPE[2:], "/request/fit")),
    Origin("/ranks/[0-9]+/seq", ("/request/seq", "/request/capacity"), _WORK),
    Origin("/ranks/[0-9]+/memory/limit", ("/request/fit",), ("/request/devices",)),
    Origin("(/ranks/[0-9]+|/fit)/mechanisms", ("/request/fit", "/request/fit_policy", "/request/mechanisms"), _SHAPE),
    Origin("(/ranks/[0-9]+)/(demand|memory)/.*", (), ("{1}/mechanisms", "/fit/mechanisms", "/request/set")),
    Origin("(/ranks/[0-9]+)/worth.*", ("{1}/mechanisms", "/fit/mechanisms")),
    Origin("/ranks/[0-9]+/calibration.*|/exchange/calibration.*", ("/request/calibrate",)),
    Origin("(/ranks/[0-9]+)/rates.*", (), ("{1}/dtype", "/request/devices")),
    Origin("/ranks/[0-9]+(/members|/devices)?", ("/request/devices",), (*_SHAPE, "/request/fit", "/fleet")),
    Origin("/exchange/(efficiency|latency|nvlink_rate)", (), ("/exchange/path", "/request/devices")),
    Origin("/exchange/reduce_dtype", ("/request/reduce",), ("/request/devices",)),
    Origin("/exchange/owners.*", (), ("/request/opt", *_WORK, "/request/devices")),
    Origin("/step/(even_seconds|best_alone_seconds|gain_over_.*)", ("/step/seconds",)),
    Origin("/(ranks|exchange|fit|step)/.*", (), ("/request/devices", *_WORK)),
)  # fmt: skip
_CARD = re.compile("(/fleet/(?:devices|nodes|links)/[^/]+)(/(?:ids|order|node|kind|name|members))?(/.*)?")


class Links:
    """What each of ``changes`` rests on; ``carrying`` are those of them whose value is another: what others see."""

    def __init__(self, plans: Plans, changes: Iterable[str], carrying: Iterable[str]) -> None:
        self._plans, self._carrying = plans, dict.fromkeys(carrying)
        self._beneath = {pointer: self._below(pointer) for pointer in changes}

    def causes(self, pointer: str) -> list[str]:
        """The changes that ``pointer`` rests on and that rest on no other; none where it is such a leaf itself."""
        reached, waiting = {pointer}, [pointer]
        while waiting:
            for below in self._beneath[waiting.pop()]:
                if below not in reached:
                    reached.add(below)
                    waiting.append(below)
        return sorted(change for change in reached - {pointer} if not self._beneath[change])

    def _below(self, pointer: str) -> list[str]:
        if pointer.startswith("/fleet/"):
            return self._touched(self._of_the_fleet(pointer), pointer)
        asked, also = _origins(pointer)
        # Where only what was asked is another, the choice is not: no input had a part in it.
        inputs = _inputs(pointer, self._plans) if pointer in self._carrying else []
        return self._touched([*inputs, *asked], pointer) or self._touched(also, pointer)

    def _of_the_fleet(self, pointer: str) -> list[str]:
        """Another fleet was asked for: --devices. Another record of it was made: the readings speak for themselves,
        or where a card of another name stands there, that name does."""
        found = _CARD.fullmatch(pointer)
        recorded = all(str(plan["request"]["devices"]).startswith("record:") for plan in self._plans)
        asked = [] if recorded else ["/request/devices"]
        if found is None or found[3] is None:
            return asked
        name = f"{found[1]}/name"
        timed = any(_basis(plan, pointer) == "benchmarked" for plan in self._plans)
        return ([name] if name in self._carrying else []) + (["/request/benchmark"] if timed else [])

    def _touched(self, sources: Iterable[str], pointer: str) -> list[str]:
        """The changes at, beneath or around ``sources``, which may name a whole object or a part of a changed one."""
        found: list[str] = []
        for source in sources:
            if source in self._carrying:
                found.append(source)
                continue
            inner = [change for change in self._carrying if change.startswith(source + "/")]
            found += inner or [change for change in self._carrying if source.startswith(change + "/")]
        return [change for change in dict.fromkeys(found) if change != pointer]


def _origins(pointer: str) -> tuple[list[str], list[str]]:
    """(asked, also) of `ORIGINS` for ``pointer``, of the first row that is about it and, for also, of all rows."""
    matches = [(origin, re.fullmatch(origin.pattern, pointer)) for origin in ORIGINS]
    rows = [(origin, found) for origin, found in matches if found is not None]
    if not rows:
        return [], []
    first, match = rows[0]
    asked = [_filled(target, match) for target in first.asked]
    return asked, [_filled(target, match) for row, match in rows for target in row.also]


def _filled(target: str, match: re.Match[str]) -> str:
    return target.format("", *(group or "" for group in match.groups()))


def _inputs(pointer: str, plans: Plans) -> list[str]:
    items = [_resolved(plan, pointer) for plan in plans]
    sources = [source for item in items if isinstance(item, dict) for source in item.get("inputs", ())]
    return list(dict.fromkeys(sources))


def _basis(plan: Mapping[str, Json], pointer: str) -> Json:
    item = _resolved(plan, pointer)
    return item.get("basis") if isinstance(item, dict) else None


def _resolved(plan: Mapping[str, Json], pointer: str) -> Json:
    try:
        return resolve(plan, pointer)
    except KeyError:
        return None
