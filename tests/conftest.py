"""One thread a test process, set before torch is imported.

Tests run two processes on two cores; with two threads each, the threads spin waiting for each other and a run of
12 s was seen to take 118. A test that is about threads sets them itself, in its own process.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
