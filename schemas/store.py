"""Documents on disk: faithful loading, atomic writing, and the recording of a run into its plan."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.form import Json, Unfaithful, parse, refuse_other_form, render
from schemas.seal import append_run, verify
from schemas.validate import refuse_other_kind, refuse_other_shape

LARGEST_DOCUMENT_BYTES = 64 * 2**20
MOUNTS = Path("/proc/self/mountinfo")
RUN_BYTES = 256 * 2**10  # more than a run takes in its plan


def load(path: str | os.PathLike[str], kind: str = "dormouse.plan") -> dict[str, Json]:
    """Read the document at ``path`` and prove it: form, kind, version, schema, counts, seal and runs.

    Raises:
        Unfaithful: it cannot be read, or is not what it claims to be.
    """
    name = str(path)
    return loads(_read(name), kind, name)


def loads(data: bytes, kind: str, name: str) -> dict[str, Json]:
    """As `load`, from bytes; ``name`` is how messages call the document."""
    document: dict[str, Json] = parse(data, name)
    refuse_other_kind(document, kind, name)
    refuse_other_shape(document, name)
    refuse_other_form(data, document, name)
    verify(document, name)
    return document


def _read(name: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise Unfaithful(f"{name}: is not a file")
        if os.path.getsize(name) > LARGEST_DOCUMENT_BYTES:
            raise Unfaithful(f"{name}: is larger than {LARGEST_DOCUMENT_BYTES} bytes, which no document is")
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise Unfaithful(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write(path: str | os.PathLike[str], document: Json) -> None:
    """Put ``document`` at ``path`` whole: a new file beside it, fsync, rename. A crash leaves the old or the new.

    A symbolic link stays one: the file it leads to is replaced. Raises OSError when the folder takes no file.
    """
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".new", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(render(document))
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(target.parent)


def record(path: str | os.PathLike[str], plan: Mapping[str, Json], run: Mapping[str, Json], new: bool = True) -> None:
    """Append ``run`` to ``plan`` where it lies: at ``path``, under the same seal, with the runs recorded meanwhile.

    Where nothing lies there and a ``new`` one may, the plan is put there with the run. Two recorders take turns by a
    lock on the folder. Raises Unfaithful when another plan lies there now, or none any more, or when the plan with this
    run could not be read back; OSError when it cannot be written.
    """
    target, digest = Path(os.path.realpath(path)), plan["seal"]["digest"]
    with _locked(target.parent):
        if not new and not target.exists():
            raise Unfaithful(f"{path}: was removed while its run went on")
        there = load(target) if target.exists() else plan
        if there["seal"]["digest"] != digest:
            raise Unfaithful(f"{path}: was replaced while its run went on (seal {there['seal']['digest'][:12]} now)")
        write(target, with_run(there, run, str(path)))


def with_run(plan: Mapping[str, Json], run: Mapping[str, Json], name: str) -> dict[str, Json]:
    """``plan`` with ``run`` appended, proved to be what can be read back. Raises Unfaithful."""
    recorded = append_run(plan, run)
    refuse_other_shape(recorded, name)  # what could not be read back is never written over what can
    verify(recorded, name)
    return recorded


def unrecordable_reason(path: str | os.PathLike[str], plan: Mapping[str, Json]) -> str | None:
    """Why a run of ``plan`` could not be recorded at ``path``; None if it can, as far as can be told before it.

    Raises Unfaithful where something lies there that is no plan.
    """
    if os.path.lexists(path):
        there = load(path)["seal"]["digest"]
        if there != plan["seal"]["digest"]:
            return f"{path} holds another plan (seal {there[:12]}; the plan to run has {plan['seal']['digest'][:12]})"
    return unwritable_reason(path, len(render(plan)) + RUN_BYTES)


def unwritable_reason(path: str | os.PathLike[str], size: int = 0) -> str | None:
    """Why no document of ``size`` bytes could be put at ``path``; None if one can.

    Found by making and removing a file of that size beside it, and by opening what lies there for writing.
    """
    target = Path(os.path.realpath(path))
    try:
        with tempfile.NamedTemporaryFile(prefix=".dormouse.", dir=target.parent) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"the folder {target.parent} takes no file{f' of {size} bytes' * bool(size)} ({error.strerror})"
    if _is_mounted(target):
        return f"{target} is a mount point, and cannot be replaced by the plan with its run"
    try:
        if target.exists():  # an immutable file is found only by asking for it
            os.close(os.open(target, os.O_RDWR))
    except OSError as error:
        return f"{target} cannot be written ({error.strerror})"
    return None


def _is_mounted(target: Path) -> bool:
    """Whether ``target`` is a mount point: `os.path.ismount` sees no file that is bound from the same file system."""
    if os.path.ismount(target):
        return True
    try:
        rows = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:  # not Linux
        return False
    escaped = re.sub(r"[\\ \t\n]", lambda found: f"\\{ord(found[0]):03o}", str(target))
    return any(row.split(" ")[4] == escaped for row in rows)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The folder itself is locked: a lock on the plan would be lost with the rename, a lock file would stay behind.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on disk: a rename is safe only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
