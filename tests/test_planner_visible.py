"""Which cards and slices are visible: every form of CUDA_VISIBLE_DEVICES, as data, over recorded or made-up cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, load
from planner.machine import nvml, probe
from planner.request import Usage

ROWS = json.loads((Path(__file__).parent / "cases" / "nvml_visible.json").read_text("utf-8"))


def _environ(row: Any) -> dict[str, str]:
    named = {"CUDA_VISIBLE_DEVICES": row["visible"], "CUDA_DEVICE_ORDER": row.get("order")}
    return {key: value for key, value in named.items() if value is not None}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['cards']}: {row['visible']!r}")
def test_visible_is_what_cuda_shows_in_its_order(row: Any) -> None:
    fake = FakeNvml(load(row["cards"]))
    if "refused" in row:
        with pytest.raises(Usage, match=row["refused"]):
            nvml.read(fake, _environ(row), "node-00000000")
    else:
        found = nvml.read(fake, _environ(row), "node-00000000")
        assert list(found.devices) == row["ids"]
        assert row.get("note", "") in " ".join(found.notes)
        assert bool(found.notes) == ("note" in row)
    assert (fake.calls[0], fake.calls[-1]) == ("nvmlInit()", "nvmlShutdown()")


def test_the_visible_order_is_the_order_of_ranks_whatever_order_a_file_lists_cards_in() -> None:
    from planner.passes.likeness import in_order

    record = probe.record(
        "auto", environ={"CUDA_VISIBLE_DEVICES": "2,1,0"}, cards=FakeNvml(load("three_of_three_kinds"))
    )
    names = [f"GPU-{place:08x}-1111-2222-3333-444455556666" for place in (2, 1, 0)]
    assert [identity for _, identity in in_order(dict(sorted(record["devices"].items())))] == names
    assert record["devices"][names[0]]["ids"] == [names[0], names[2]], "alike cards share an entry"


def test_what_was_read_otherwise_than_written_is_said() -> None:
    said: list[str] = []
    environ = {"CUDA_VISIBLE_DEVICES": "0,5"}
    record = probe.record("auto", environ=environ, cards=FakeNvml(load("two_unlike")), say=said.append)
    assert len(record["devices"]) == 1
    assert len(said) == 1
    assert "CUDA ends the list there" in said[0]
