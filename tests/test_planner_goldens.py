"""Whole plans of recorded and listed machines, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from make_goldens import golden, path
from schemas.store import loads
from worlds import cases


@pytest.mark.parametrize("row", cases("goldens.json"), ids=lambda row: row["name"])
def test_a_recorded_world_gives_the_golden_plan(row: dict[str, Any]) -> None:
    data = golden(row)
    loads(data, "dormouse.plan", row["name"])
    expected = path(row).read_bytes()
    if data != expected:
        lines = zip(data.decode().split("\n"), expected.decode().split("\n"), strict=False)
        found, wanted = next((a, b) for a, b in lines if a != b)
        pytest.fail(f"differs from {path(row).name} first in\n{found}\nwhich was\n{wanted}")
