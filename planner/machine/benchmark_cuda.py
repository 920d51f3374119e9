"""One process that times cards: ``python -P -m planner.machine.benchmark_cuda``, a JSON request a line on stdin, a JSON
answer a line on stdout, first {"ready": torch's version}. It ends when stdin does.

`planner.machine.benchmark_cards` starts one a card, which sees that card alone, and one more that sees them all. torch
is imported before the first request, a context is made with it. Requests are {"part": "card" | "host" | "group" |
"pairs", ...}; what cannot be timed is answered as {"error": why}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from planner.machine.benchmark_links import group, pairs
from planner.machine.stopwatch import Place, settled, tried
from planner.passes.legality import legal
from schemas.form import Json

GRACE_SECONDS = 15  # after the asker's own deadline: it is gone, and this process must not stay
# Largest relative error, by norm, against the product in fp64 of the same operands; TF32 would give 3e-4.
LARGEST_ERROR = {"fp32": 3e-5, "fp16": 5e-3, "bf16": 2e-2}
_CHECKED_ROWS = 8

Request = Mapping[str, Json]

# Operators without work on a card although their schema does not say that they are views.
_NO_WORK = frozenset(("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


def card(request: Request) -> Json:
    """{"quantities": {key: {"samples", "stable", "note"} or {"error"}}, "free": bytes} of the one card it sees."""
    place = Place(0, request["dry"])
    square, size = request["product"] ** 2, request["copy_bytes"]
    rungs = {"fp32": 4, "fp16": 2, "bf16": 2}
    rows: dict[str, tuple[int, Callable[[], Json]]] = {
        f"rate_{rung}": ((3 * width + 12) * square, partial(_product, place, request, rung))
        for rung, width in rungs.items()
    }
    rows |= {
        "bandwidth": (3 * size, lambda: _copy(place, request)),
        "host_to_device": (3 * size, lambda: _host_copy(place, request, to_host=False)),
        "device_to_host": (3 * size, lambda: _host_copy(place, request, to_host=True)),
    }
    found = {key: tried(partial(_fitting, place, *row)) for key, row in rows.items()}
    return {"quantities": found, "free": place.free()}


def host(request: Request) -> Json:
    """{"operator_seconds": {"samples", "stable", "note"} or {"error"}} of the one card it sees."""
    return {"operator_seconds": tried(lambda: _small_model(Place(0, request["dry"]), request))}


def _fitting(place: Place, needed: int, timing: Callable[[], Json]) -> Json:
    lack = place.lacks(needed)
    return {"error": lack} if lack else timing()


def _samples(place: Place, request: Request, work: Callable[[], Any], amount: float, note: str = "") -> Json:
    """Samples of ``amount`` a second over repeats of ``work``."""
    seconds, stable = settled(lambda count: place.times(work, count), request["repeats"], request["share"])
    return {"samples": [amount / value for value in seconds], "stable": stable, "note": note}


def _product(place: Place, request: Request, rung: str) -> Json:
    import torch

    able, why = legal(rung, "cuda", place.capability())
    if not able:
        return {"error": why}
    torch.backends.cuda.matmul.allow_tf32 = False
    side, dtype = request["product"], {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[rung]
    left, right = (torch.randn(side, side, device=place.device).to(dtype) for _ in range(2))
    out = torch.full_like(left, float("nan"))
    found = _samples(place, request, lambda: torch.mm(left, right, out=out), 2 * side**3)
    exact = left[:_CHECKED_ROWS].double() @ right.double()
    error = float((out[:_CHECKED_ROWS].double() - exact).norm() / exact.norm())
    if not error <= LARGEST_ERROR[rung]:  # NaN never passes
        return {"error": f"its {rung} product is wrong: relative error {error:.1e} against fp64"}
    return {**found, "note": f"relative error {error:.1e} against fp64"}


def _copy(place: Place, request: Request) -> Json:
    import torch

    size = request["copy_bytes"]
    source = _noise(place, size)
    target = torch.zeros_like(source)
    found = _samples(place, request, lambda: target.copy_(source), 2 * size)
    return found if torch.equal(source, target) else {"error": "the copy differs from its source"}


def _noise(place: Place, size: int) -> Any:
    """``size`` random bytes on the card."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=place.device).random_(0, 256)


def _host_copy(place: Place, request: Request, to_host: bool) -> Json:
    import torch

    size = request["copy_bytes"]
    source = _noise(place, size)
    back = torch.zeros_like(source)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=place.dry is None)
    if to_host:
        found = _samples(place, request, lambda: host.copy_(source, non_blocking=True), size)
        back.copy_(host)
    else:
        host.copy_(source)
        found = _samples(place, request, lambda: back.copy_(host, non_blocking=True), size)
    return found if torch.equal(source, back) else {"error": "the copy differs from its source"}


def _small_model(place: Place, request: Request) -> Json:
    """Seconds an operator of a small model takes, forward and backward: the larger of what the host needs to queue it,
    modules, autocast, views and autograd included, and what the card needs once all are queued."""
    step = _small_step(place, request["layers"])
    operators = _operators(step)

    def queue() -> float:
        place.wait()
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    host, stable = settled(lambda count: [queue() for _ in range(count)], request["repeats"], request["share"])
    lead = int(max(host) * 4e9)  # cycles: at 2 GHz twice as long as the host ever took
    device = [place.times(step, 1, lead)[0] for _ in range(request["repeats"])]
    slower = max((host, device), key=lambda times: sorted(times)[len(times) // 2])
    middles = [f"{sorted(times)[len(times) // 2] / operators:.2e}" for times in (host, device)]
    note = f"{operators} operators: host {middles[0]} s to queue one, card {middles[1]} s to run one: the larger"
    return {"samples": [value / operators for value in slower], "stable": stable, "note": note}


def _small_step(place: Place, layers: int) -> Callable[[], Any]:
    """Forward and backward of a model too small for a card to be busy with, as a training loop calls them."""
    import torch
    from torch import nn

    width = 64
    blocks = nn.ModuleList(
        nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width, bias=False))
        for _ in range(layers)
    ).to(place.device)
    inputs = torch.randn(2, 16, width, device=place.device)
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with torch.autocast(place.device.type, torch.float16):  # bfloat16 costs the host as much, where it is there
            value = inputs
            for block in blocks:
                value = value + block(value)
            loss = value.float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def _operators(step: Callable[[], Any]) -> int:
    """How many operators ``step`` runs, as an account counts them: without views, and without memory merely taken."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            aliases = [item.alias_info for item in func._schema.returns]
            view = any(alias is not None and not alias.is_write for alias in aliases)
            self.found += not (view or func.overloadpacket.__name__ in _NO_WORK)
            return func(*args, **(kwargs or {}))

    count = Count()  # type: ignore[no-untyped-call]
    with count:
        step()
    return count.found


_PARTS: dict[str, Callable[[Request], Json]] = {"card": card, "host": host, "group": group, "pairs": pairs}


def answer(request: Request) -> Json:
    """The answer to one request; a fault of the card or of a library is {"error": its first line}."""
    return tried(lambda: _PARTS[request["part"]](request))


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer each line of ``requests``. A request that outlives its asker's deadline ends this process."""
    import torch

    print(json.dumps({"ready": str(torch.__version__)}), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["deadline"] + GRACE_SECONDS, exit=True)
        print(json.dumps(answer(request)), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()


def _end_with(parent: int) -> None:
    """End this process soon after ``parent``, its asker, whatever it is busy with: a card must not stay taken."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # NCCL writes its log to file descriptor 1: answers get one of their own, and 1 becomes stderr.
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)
        serve(sys.stdin, own)
