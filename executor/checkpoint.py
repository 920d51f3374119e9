"""A model on disk, so that what was trained can be used: its tensors, and beside them what they are, as plain JSON.

    FOLDER/model.safetensors   the tensors, in the format of that name (github.com/huggingface/safetensors)
    FOLDER/checkpoint.json     model, configuration, kernels, seal of the plan; the rows and the digest of each file

Nothing is unpickled and nothing is mapped. A file of tensors is written, and read, in one pass that also makes its
digest, so that it never takes memory of its own: a host table may be larger than what is free. Its header follows from
the rows in checkpoint.json, which have a digest of their own: no byte of a file is taken on trust.

What a run needs besides its model to go on lies in further files of tensors of the same folder (`executor.resume`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from executor.parts import is_part, wholes
from executor.parts import put as put_part
from schemas.form import Json, Unfaithful, parse, render
from schemas.seal import canonical_digest
from schemas.store import LARGEST_DOCUMENT_BYTES, sync_folder

FORMAT, VERSION = "dormouse.checkpoint", 1
DOCUMENT, MODEL = "checkpoint.json", "model.safetensors"
FINAL = "final"
"""The folder, in a run's, of the model that it left."""
CHUNK_BYTES = 2**26
"""What is copied to the host, written and digested at a time; and at most lies in the system's memory before it is on
the disk: so a file goes on in pieces that a slow disk, too, takes within seconds."""
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class _Rows(NamedTuple):
    """A file of tensors as its row describes it: (name, dtype, shape) of each, the file's bytes and their SHA-256."""

    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]
    length: int
    sha256: str


class BadCheckpoint(Exception):
    """A checkpoint that cannot be read, is not what it claims to be, or is of another model: one line, exit code 2."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that makes the model what it is, by name: its state, and the tables that lie in host memory.

    A module whose tables left the device gives them by ``host_tensors()``, under the names they had there, so that a
    checkpoint does not tell where they lay. The tensors are the model's own, not copies.

    Raises:
        BadCheckpoint: some state is no tensor, or of a dtype that the format lacks.
    """
    found: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules():
        if hasattr(module, "host_tensors"):
            prefix = f"{name}." if name else ""
            found |= {prefix + own: tensor for own, tensor in module.host_tensors().items()}
    for name, item in found.items():
        if not isinstance(item, Tensor) or item.dtype not in CODES:
            what = str(item.dtype) if isinstance(item, Tensor) else f"a {type(item).__name__}"
            raise BadCheckpoint(f"the model's state {name} is {what}, which a checkpoint cannot hold")
    return found


def save(folder: Path, model: nn.Module, facts: Mapping[str, Json], beat: Callable[[], None] = lambda: None) -> Path:
    """Put ``model`` into ``folder`` with ``facts`` beside it: written whole under another name, fsync, rename.

    A checkpoint that lies there already is replaced: until the new one is complete it stays as it is. Of a sharded
    model, this is one rank's part; every other rank calls `accompany` meanwhile. ``beat`` is as in `write`.

    Raises:
        BadCheckpoint: the model's state has something that a checkpoint cannot hold.
        OSError: the folder takes no file; nothing is left behind.
    """
    tensors = tensors_of(model)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    try:
        complete(made, folder, facts, {MODEL: write(made / MODEL, tensors, beat)}, beat)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def complete(
    made: Path,
    folder: Path,
    facts: Mapping[str, Json],
    files: Mapping[str, Json],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Make the folder ``made``, which holds ``files`` (their rows by `write`), the checkpoint in ``folder``.

    Its document comes last and the name at the very end: what has the name is whole. ``beat`` is as in `write`. Raises
    OSError.
    """
    body = {"format": FORMAT, "format_version": VERSION, **facts, "files": dict(files)}
    with (made / DOCUMENT).open("xb") as file:
        file.write(render({**body, "digest": _digest(body)}))
        _settle(file)
    beat()
    sync_folder(made)
    beat()
    _replace(made, folder)
    sync_folder(folder.parent)
    beat()


def no_room_reason(folder: Path, model: nn.Module) -> str | None:
    """Why ``folder``, which need not exist yet, could not hold ``model``; None where there is room for it."""
    needed, free = sum(tensor.nbytes for tensor in tensors_of(model).values()), free_bytes(folder)
    return None if free >= needed else f"the trained model takes {needed} bytes; {free} are free there"


def free_bytes(folder: Path) -> int:
    """Bytes free where ``folder``, which need not exist yet, would lie."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(nearest).free


def load(folder: Path) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """(the facts, the tensors by name, on the CPU) of the checkpoint in ``folder``, every byte proved by its digest.

    Raises:
        BadCheckpoint: it cannot be read, or is not what it claims to be.
    """
    document = read_facts(folder)
    rows = _rows_of(folder, document, MODEL)
    # A file that ends early leaves no memory as it was found.
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in _sound(folder / MODEL, rows)}
    _read(folder / MODEL, rows, tensors)
    return document, tensors


def read_into(folder: Path, document: Mapping[str, Json], file: str, targets: Mapping[str, Tensor]) -> None:
    """Read ``file`` of the checkpoint with this ``document`` into ``targets``, where they lie: no memory of its own.

    Raises:
        BadCheckpoint: it has other tensors (nothing is read then), or was changed (``targets`` hold anything then).
    """
    rows = _rows_of(folder, document, file)
    _refuse_unlike(targets, {name: (dtype, shape) for name, dtype, shape in rows.tensors}, str(folder / file))
    _read(folder / file, rows, targets)


def prove(folder: Path, document: Mapping[str, Json], file: str) -> None:
    """Raise BadCheckpoint where ``file`` of the checkpoint with this ``document`` is not, byte for byte, what was
    saved."""
    path, rows = folder / file, _rows_of(folder, document, file)
    digest = hashlib.sha256()
    with _opened(path, rows.length) as opened:
        while data := opened.read(CHUNK_BYTES):
            digest.update(data)
    _refuse_changed(path, digest.hexdigest(), rows.sha256)


def read_facts(folder: Path) -> dict[str, Json]:
    """checkpoint.json of ``folder``, proved by its own digest; no tensor is read. Raises BadCheckpoint."""
    path = folder / DOCUMENT
    try:
        if path.stat().st_size > LARGEST_DOCUMENT_BYTES:
            raise BadCheckpoint(f"{path}: is larger than {LARGEST_DOCUMENT_BYTES} bytes, which no document is")
        document = parse(path.read_bytes(), str(path))
    except OSError as error:
        left = folder / FINAL
        hint = f" (a run leaves its model in {left})" if (left / DOCUMENT).is_file() else ""
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except Unfaithful as error:
        raise BadCheckpoint(str(error)) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadCheckpoint(f"{path}: is not a checkpoint ({FORMAT})")
    if document.get("format_version") != VERSION:
        found = document.get("format_version")
        raise BadCheckpoint(f"{path}: format_version {found}; this Dormouse reads {VERSION}")
    body = {key: value for key, value in document.items() if key != "digest"}
    if document.get("digest") != _digest(body) or not isinstance(document.get("files"), dict):
        raise BadCheckpoint(f"{path}: was changed after it was saved")
    return document


@torch.no_grad()
def put(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy ``tensors`` into ``model``, which must have those names, shapes and dtypes exactly.

    Args:
        name: how messages call the checkpoint.

    Raises:
        BadCheckpoint: naming the first tensor that does not agree; nothing is copied then.
    """
    wanted = tensors_of(model)
    _refuse_unlike(wanted, {key: (item.dtype, tuple(item.shape)) for key, item in tensors.items()}, name)
    for key, own in wanted.items():
        own.copy_(tensors[key])


def _refuse_unlike(wanted: Mapping[str, Tensor], found: Mapping[str, Kind], name: str) -> None:
    lacking, beside = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if lacking or beside:
        one = f"it lacks {lacking[0]}" if lacking else f"the model has no {beside[0]}"
        raise BadCheckpoint(f"{name}: is of another model: {one} ({len(lacking)} lacking, {len(beside)} beside)")
    for key, tensor in wanted.items():
        own = (tensor.dtype, tuple(tensor.shape))
        if own != found[key]:
            raise BadCheckpoint(f"{name}: is of another model: {key} is {_shown(found[key])}, not {_shown(own)}")


def _shown(kind: Kind) -> str:
    return f"{CODES[kind[0]]} {list(kind[1])}"


def _digest(body: Mapping[str, Json]) -> str:
    # Of what will be read back: floats as they are rendered.
    return canonical_digest(json.loads(render(dict(body))))


def _header(rows: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What the format puts before the tensors: the length of the JSON as 8 bytes, the JSON, blanks up to 8 bytes."""
    described: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, dtype, shape in rows:
        end = place + prod(shape) * dtype.itemsize
        described[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, Tensor], beat: Callable[[], None] = lambda: None) -> dict[str, Json]:
    """Write ``tensors`` to ``path``, whose folder is made; gives the file's row. The widest come first: so each lies on
    its own width. Tensors of which ranks hold parts are made whole one by one, with every other rank in `accompany`.
    ``beat`` is called whenever a piece of the file was taken.

    Raises OSError.
    """
    order = _order(tensors)
    rows = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    header = _header(rows)
    sha256, length, settled = hashlib.sha256(header), len(header), 0
    pending = wholes(tensors[name] for name in order)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(header)
            for tensor in pending:
                for part in _parts(tensor):
                    data = part.cpu().numpy().data
                    file.write(data)
                    sha256.update(data)
                    length += len(data)
                    beat()
                    if length - settled >= CHUNK_BYTES:
                        _settle(file)
                        settled = length
                        beat()
            _settle(file)
            beat()
    finally:
        deque(pending, maxlen=0)  # the other ranks give their parts of every tensor, whatever became of the file
    described = [{"name": name, "dtype": CODES[dtype], "shape": list(shape)} for name, dtype, shape in rows]
    return {"length": length, "sha256": sha256.hexdigest(), "tensors": described}


def accompany(tensors: Mapping[str, Tensor]) -> None:
    """Give this rank's parts of ``tensors`` to the rank that writes them."""
    deque(wholes(tensors[name] for name in _order(tensors)), maxlen=0)


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of ``tensor`` as uint8 pieces, where it lies."""
    flat = tensor.detach().contiguous().reshape(-1)
    return torch.split(flat.view(torch.uint8), CHUNK_BYTES) if len(flat) else ()


def _rows_of(folder: Path, document: Mapping[str, Json], file: str) -> _Rows:
    row = document["files"].get(file)
    try:
        tensors = [(item["name"], _DTYPES[item["dtype"]], tuple(map(int, item["shape"]))) for item in row["tensors"]]
        return _Rows(tensors, int(row["length"]), str(row["sha256"]))
    except (TypeError, KeyError, ValueError, AttributeError):
        raise BadCheckpoint(f"{folder / DOCUMENT}: /files/{file} does not describe a file of tensors") from None


def _sound(path: Path, rows: _Rows) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """The tensors of ``rows``, before anything is allocated for them: of as many bytes as lie at ``path``."""
    names = {name for name, *_ in rows.tensors}
    if len(names) < len(rows.tensors) or any(size < 0 for *_, shape in rows.tensors for size in shape):
        raise BadCheckpoint(f"{path}: its rows in {DOCUMENT} contradict each other")
    described = len(_header(rows.tensors)) + sum(prod(shape) * dtype.itemsize for _, dtype, shape in rows.tensors)
    with _opened(path, rows.length, described):
        return rows.tensors


@contextmanager
def _opened(path: Path, *lengths: int) -> Iterator[IO[bytes]]:
    """The file at ``path``, which must have each of ``lengths``. Raises BadCheckpoint for an OSError in the block."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if any(length != found for length in lengths):
                raise BadCheckpoint(f"{path}: has {found} bytes; {lengths[0]} were saved")
            yield file
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None


@torch.no_grad()
def _read(path: Path, rows: _Rows, targets: Mapping[str, Tensor]) -> None:
    header = _header(_sound(path, rows))
    digest = hashlib.sha256(header)
    with _opened(path, rows.length) as file:
        if file.read(len(header)) != header:
            raise BadCheckpoint(f"{path}: its header is not what {DOCUMENT} describes")
        for name, *_ in rows.tensors:
            _fill(targets[name], file, digest)
    _refuse_changed(path, digest.hexdigest(), rows.sha256)


def _refuse_changed(path: Path, found: str, saved: str) -> None:
    if found != saved:
        raise BadCheckpoint(f"{path}: SHA-256 {found[:12]}; {saved[:12]} was saved: it was changed")


def _fill(tensor: Tensor, file: IO[bytes], digest: Any) -> None:
    lies = tensor.is_contiguous() and not is_part(tensor)
    whole = tensor if lies else torch.empty(tensor.shape, dtype=tensor.dtype)
    for part in _parts(whole):
        landed = part if part.device.type == "cpu" else torch.zeros(part.shape, dtype=part.dtype)
        view = landed.numpy().data
        file.readinto(view)  # type: ignore[attr-defined]  # of every file that is opened for bytes
        digest.update(view)
        if landed is not part:
            part.copy_(landed)
    if whole is not tensor:
        put_part(tensor, whole)


def _replace(made: Path, folder: Path) -> None:
    """``made`` in the place of ``folder``. A folder cannot be renamed over another one: the old one steps aside."""
    aside = made.with_suffix(".old")
    with suppress(FileNotFoundError):
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        with suppress(FileNotFoundError):
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _settle(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
