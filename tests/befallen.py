"""A model into whose run a fault is put. A test copies this file beside its plan, as a module of a user's own.

``FAULT="WHAT RANK"`` befalls that rank at its sixth forward (or that of the number ``FORWARD``; of several ranks their
first is not counted), in an evaluation, or in the save after that forward, and leaves the moment in a file. In a step
ranks wait 2 s for each other, and 15 s where they are told to be ``PATIENT``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

WHAT, _, RANK = os.environ.get("FAULT", "").partition(" ")
FORWARD = int(os.environ.get("FORWARD", "6"))
SEVERAL = int(os.environ.get("WORLD_SIZE", "1")) > 1
ADVICE = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

if "RANK" in os.environ and "PATIENT" not in os.environ:
    from executor import fleet

    fleet.STEP_TIMEOUT = timedelta(seconds=2)


def befall(on_card: bool) -> None:
    Path(f"fault-{RANK}").write_text(repr(time.time()))
    match WHAT:
        case "kill" | "apart":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang" | "evaluation":
            time.sleep(600)
        case "save" | "grip":
            os.fsync = settle
        case "late":
            time.sleep(2.6)
        case "deaf":
            hear_nothing()
        case "raise":
            raise ValueError("this card fell out of its slot")
        case "memory":
            if on_card:  # for real: it is given a limit just above what it holds
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
                torch.empty(2**30, device="cuda")
            raise torch.OutOfMemoryError(f"out of memory: raised by hand, as a CPU has no limit to give. {ADVICE}")
        case "cut":
            os.truncate("corpus.txt", 10)
        case "remove":
            os.replace("other.json", "plan.json")
        case "delete":
            os.unlink("plan.json")
        case "full":  # no file may grow beyond this any more
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


def settle(handle: int, settle: Callable[[int], None] = os.fsync) -> None:
    """Hang, in C with the lock of Python or without it, where a checkpoint is to settle on the disk."""
    if "/checkpoints/" in os.readlink(f"/proc/self/fd/{handle}"):
        ctypes.PyDLL(None).sleep(600) if WHAT == "grip" else time.sleep(600)
    settle(handle)


def hear_nothing() -> None:
    """Hang in C, where no signal and no exception comes through."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


class Model(nn.Module):
    """Bytes to bytes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.calls = -SEVERAL

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        here = os.environ.get("RANK", "0") == RANK
        logits = self.head(self.embedding(inputs))
        if WHAT == "slow":
            time.sleep(0.1)
        if here and (not torch.is_grad_enabled() if WHAT == "evaluation" else self.calls == FORWARD):
            befall(logits.is_cuda)
            logits = logits * float("nan") if WHAT == "nan" else logits
        elif self.calls == FORWARD and WHAT == "apart":  # the others, as one is killed
            hear_nothing()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
