"""Documents on disk: faithful loading, atomic writing, and the recording of a run into its plan."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.form import Json, Unfaithful, parse, refuse_other_form, render
from schemas.seal import append_run, verify
from schemas.validate import refuse_other_kind, refuse_other_shape

LARGEST_DOCUMENT_BYTES = 64 * 2**20


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
    _sync_folder(target.parent)


def record(path: str | os.PathLike[str], digest: str, run: Mapping[str, Json]) -> None:
    """Append ``run`` to the plan at ``path``, which must still carry the seal ``digest``.

    Two recorders take turns by a lock on the folder. Raises Unfaithful when another plan lies there now, or when the
    plan with this run could not be read back; OSError when it cannot be written.
    """
    target = Path(os.path.realpath(path))
    with _locked(target.parent):
        plan = load(target)
        if plan["seal"]["digest"] != digest:
            raise Unfaithful(f"{path}: was replaced while its run went on (seal {plan['seal']['digest'][:12]} now)")
        recorded = append_run(plan, run)
        refuse_other_shape(recorded, str(path))  # what could not be read back is never written over what can
        verify(recorded, str(path))
        write(target, recorded)


def unwritable_reason(path: str | os.PathLike[str]) -> str | None:
    """Why no document could be written at ``path``, found by making and removing a file beside it; None if one can."""
    folder = Path(os.path.realpath(path)).parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".dormouse.", dir=folder):
            return None
    except OSError as error:
        return f"the folder {folder} takes no file ({error.strerror})"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The folder itself is locked: a lock on the plan would be lost with the rename, a lock file would stay behind.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
