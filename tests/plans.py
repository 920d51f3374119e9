"""Real plans for the executor's tests: a small model and corpus, this machine's CPU; made by the planner itself."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from executor.account import account
from handmade import request
from planner.accounts import counted_at
from planner.machine import probe
from planner.passes.compile import compile_plan
from planner.request import lengths
from schemas.document import is_reading, resolve
from schemas.seal import seal

SMALL = {"layers": "2", "width": "32", "heads": "2", "ffn": "64", "eval_windows": "2", "warmup_steps_unmeasured": "2"}
CORPUS = "corpus.txt"


def corpus(folder: Path) -> Path:
    """A file of 100,000 bytes of words, the same every time."""
    path = folder / CORPUS
    if not path.exists():
        source = random.Random(7)
        words = ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 8))) for _ in range(200)]
        path.write_bytes(" ".join(source.choices(words, k=40000)).encode()[:100000])
    return path


def plan(path: Path, ranks: int = 1, settings: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    """A sealed plan for ``ranks`` CPU ranks of this machine that trains on the file ``path``.

    ``settings`` are configuration keys over `SMALL`; ``asked`` are keys of the request, ``devices`` among them. Every
    CPU rank has one thread: so small a model gains nothing by two, and tests run beside each other.
    """
    chosen = {**(SMALL if "model" not in asked else {}), **{key: str(value) for key, value in (settings or {}).items()}}
    if "experts" in chosen and "ffn" not in (settings or {}):
        chosen.pop("ffn", None)  # it would change nothing beside experts, and is refused
    data = path.read_bytes()
    source = {"name": path.name, "weight": 1, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sizes = {"seq": 32, "batch": 3, "steps": 6, "seed": 1, "devices": f"cpu:{ranks}", **asked}
    wanted = request(set=chosen, data=[source], **sizes)
    settled = json.dumps(chosen, sort_keys=True)
    work = _account(sizes.get("model") or "tiny", settled, sizes.get("opt") or "muon", tuple(lengths(wanted)))
    made = compile_plan(wanted, seal(probe.fleet(sizes["devices"])), work)
    threaded = [place for place, entry in enumerate(made["ranks"]) if "threads" in entry]
    return with_values(made, {f"/ranks/{place}/threads": 1 for place in threaded})


@cache
def _account(model: str, settings: str, opt: str, planned: tuple[int, ...]) -> dict[str, Any]:
    asked = {"model": model, "set": json.loads(settings), "opt": opt}
    if ":" in model and planned:
        asked["lengths"] = counted_at(planned)
    return seal(json.loads(json.dumps(account(asked))))


def with_values(made: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``made`` with other values at some pointers (of readings, of decisions), sealed anew: another faithful plan."""
    body = copy.deepcopy(made)
    for pointer, value in values.items():
        item = resolve(body, pointer)
        item["value" if is_reading(item) else "chosen"] = value
        item |= {end: value for end in ("low", "high") if end in item}
    return seal(body)
