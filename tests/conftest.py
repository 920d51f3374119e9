"""One thread a test process, set before torch is imported.

Tests run two processes on two cores; with two threads each, the threads spin waiting for each other and a run of
12 s was seen to take 118. A test that is about threads sets them itself, in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh buffers hold NaN, so that what is not written, and what is read too early, shows."""
    import torch  # after the threads are set

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
