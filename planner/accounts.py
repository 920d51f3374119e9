"""The account of a workload: made by ``python -m executor.account`` in a process of its own, which imports torch, and
kept in the user's cache under the digest of everything it was made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from planner.machine.toolchain import torch_constants
from planner.request import Usage
from schemas.form import Json, Unfaithful
from schemas.seal import canonical_digest
from schemas.store import load, loads, write

KIND = "dormouse.account"
DEADLINE_SECONDS = 300
WORKLOADS = "dormouse.workloads"
# What decides an account's content: how it is counted, and the form it is written in.
_PACKAGES = ("executor", "schemas")
_SUFFIXES = (".py", ".json")
_SAYS = "dormouse: "  # begins the one line in which the subprocess tells a fault of the user
_MOST_KEPT = 64


def account(
    model: str,
    settings: Mapping[str, str],
    opt: str,
    *,
    kinds: Sequence[str] = ("cpu", "cuda"),
    lengths: Sequence[int] = (),
    say: Callable[[str], None],
    folder: Path | None = None,
    make: Callable[[bytes], bytes] | None = None,
) -> dict[str, Json]:
    """The account of ``model`` with its ``settings`` (KEY: text) and optimizer, from the cache or made now.

    Args:
        kinds: of the devices that it is for: counts differ, and what is not asked for need not be counted.
        lengths: of the sequences that are planned: at these a module of one's own is counted (none: at its default).
        say: told, in one line, of a cached file that was not faithful or could not be written.
        folder: the cache (default: the user's).
        make: what turns a request's bytes into an account's (default: the subprocess).

    Raises:
        Usage: the workload, a key or a value is not known, or the account could not be made.
    """
    made_from: dict[str, Json] = {"model": model, "set": dict(settings), "opt": opt, "kinds": sorted(kinds)}
    if lengths and not _is_own(model):
        made_from["lengths"] = counted_at(lengths)
    path = _cached_at(made_from, folder)
    if path is not None and path.exists():
        try:
            return load(path, KIND)
        except Unfaithful as error:
            say(f"the cached account is not faithful and is made again: {error}")
    data = (make or partial(_subprocess, model))(json.dumps(made_from).encode())
    try:
        found = loads(data, KIND, f"account of {model}")
    except Unfaithful as error:
        raise Usage(f"--model {model}: the account that was made of it is not faithful: {error}") from None
    if path is not None:
        _keep(path, found, say)
    return found


def counted_at(lengths: Sequence[int]) -> list[int]:
    """Two lengths: the shortest and the longest, or the only one and half of it."""
    least, most = min(lengths), max(lengths)
    return [least, most] if least < most else [max(1, most // 2), max(2, most)]


def _keep(path: Path, found: Json, say: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, found)
    except OSError as error:
        say(f"the account was not cached: {path.parent}: {error.strerror}")
    else:
        _prune(path)


def _prune(kept: Path) -> None:
    """Remove all but the newest accounts beside ``kept``. One that is left over costs nothing: no failure is told."""
    with suppress(OSError):
        others = [path for path in kept.parent.glob("*.json") if path != kept]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[_MOST_KEPT - 1 :]:
            path.unlink(missing_ok=True)


def _subprocess(model: str, data: bytes) -> bytes:
    # No card is needed to count a model, and asking for one would cost seconds and memory.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "executor.account"]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=DEADLINE_SECONDS, env=environ, check=False
        )
    except subprocess.TimeoutExpired:
        raise Usage(f"--model {model}: it could not be counted within {DEADLINE_SECONDS} s") from None
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    faults = [line for line in lines if line.startswith(_SAYS)]
    if done.returncode == 2 and faults:
        _pass_on(model, [line for line in lines if line != faults[-1]])
        raise Usage(faults[-1].removeprefix(_SAYS))
    if done.returncode == 0 and done.stdout:
        _pass_on(model, lines)
        return done.stdout
    raise Usage(f"--model {model}: {_ended(done.returncode, lines)}")


def _pass_on(model: str, lines: Sequence[str]) -> None:
    """What a user's own code printed while it was counted, on stderr: stdout is the plan's."""
    if not _is_own(model):
        for line in lines:
            print(line, file=sys.stderr)


def _ended(code: int, lines: Sequence[str]) -> str:
    """Why the subprocess gave neither an account nor a message of its own."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if code < 0:
        return f"the process that counted it was ended by {signal.Signals(-code).name}"
    if code == 0 or last is None:
        return f"its code ended the process that counted it, with exit code {code}"
    return f"it could not be counted: {last}"


def _cached_at(made_from: Mapping[str, Json], folder: Path | None) -> Path | None:
    """Where this account is kept; None for a workload that lies outside executor, whose source no key could cover."""
    if not _is_own(made_from["model"]):
        return None
    torch = torch_constants() or {}
    made = {"torch": torch.get("__version__"), "python": platform.python_version(), "source": source()}
    key = canonical_digest({**made_from, **made, "tuned": tuned()})
    return (folder or _user_cache()) / "accounts" / f"{key}.json"


def tuned() -> dict[str, str]:
    """SHA-256 by place of what the user tuned and timed kernels for, which an account tells the plan."""
    from platformdirs import user_data_path  # not needed by show, diff and verify

    root = user_data_path("dormouse") / "tuned"
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*root.rglob("index.json"), *root.rglob("grouped.json")])
    }


def _user_cache() -> Path:
    from platformdirs import user_cache_path  # not needed by show, diff and verify

    return user_cache_path("dormouse")


def _is_own(model: str) -> bool:
    found = metadata.entry_points(group=WORKLOADS, name=model)
    return len(found) == 1 and all(entry.module.partition(".")[0] == "executor" for entry in found)


def source() -> dict[str, str]:
    """SHA-256 by package of the names and contents of all that decides an account; nothing of it is imported."""
    return {name: canonical_digest(dict(_contents(name))) for name in _PACKAGES}


def _contents(package: str) -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                yield path.relative_to(place).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()
