"""A rank that is killed at any moment, in a forward, an exchange, a save, the record: what it leaves can be gone on
from."""

from __future__ import annotations

from pathlib import Path

import pytest

import killed


@pytest.mark.parametrize(("ranks", "kills"), [(1, 6), (2, 6)])
def test_after_a_kill_at_any_moment_the_run_goes_on_to_the_very_end_it_would_have_had(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    wrong, kinds = killed.trials(tmp_path, ranks, kills, seed=ranks)
    assert wrong == [] and sum(kinds.values()) == kills
    assert kinds.keys() == set(killed.KINDS) - ({"exchange"} if ranks == 1 else set())
