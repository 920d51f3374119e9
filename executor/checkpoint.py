"""A model on disk, so that what was trained can be used: its tensors, and beside them what they are, as plain JSON.

    FOLDER/model.safetensors   the tensors, in the format of that name (github.com/huggingface/safetensors)
    FOLDER/checkpoint.json     model, configuration, kernels, seal of the plan; the rows and the digest of each file

Nothing is unpickled and nothing is mapped. A file of tensors is written, and read, in one pass that also makes its
digest, so that it never takes memory of its own: a host table may be larger than what is free. Its header follows from
the rows in checkpoint.json, which have a digest of their own: no byte of a file is taken on trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from schemas.form import Json, Unfaithful, parse, render
from schemas.seal import canonical_digest
from schemas.store import LARGEST_DOCUMENT_BYTES

FORMAT, VERSION = "dormouse.checkpoint", 1
DOCUMENT, MODEL = "checkpoint.json", "model.safetensors"
CHUNK_BYTES = 2**26
"""What is copied to the host, written and digested at a time."""
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}


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


def save(folder: Path, model: nn.Module, facts: Mapping[str, Json]) -> Path:
    """Put ``model`` into ``folder`` with ``facts`` beside it: written whole under another name, fsync, rename.

    A checkpoint that lies there already is replaced: until the new one is complete it stays as it is.

    Raises:
        BadCheckpoint: the model's state has something that a checkpoint cannot hold.
        OSError: the folder takes no file; nothing is left behind.
    """
    tensors = tensors_of(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    made.mkdir()
    try:
        files = {MODEL: _write_tensors(made / MODEL, tensors)}
        body = {"format": FORMAT, "format_version": VERSION, **facts, "files": files}
        with (made / DOCUMENT).open("xb") as file:
            file.write(render({**body, "digest": _digest(body)}))
            _settle(file)
        _sync(made)
        _replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _sync(folder.parent)
    return folder


def no_room_reason(folder: Path, model: nn.Module) -> str | None:
    """Why ``folder``, which need not exist yet, could not hold ``model``; None where there is room for it."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    needed = sum(tensor.nbytes for tensor in tensors_of(model).values())
    free = shutil.disk_usage(nearest).free
    return None if free >= needed else f"the trained model takes {needed} bytes; {free} are free there"


def load(folder: Path) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """(the facts, the tensors by name, on the CPU) of the checkpoint in ``folder``, every byte proved by its digest.

    Raises:
        BadCheckpoint: it cannot be read, or is not what it claims to be.
    """
    document = read_facts(folder)
    path, row = folder / MODEL, document["files"].get(MODEL)
    try:
        rows = [(item["name"], _DTYPES[item["dtype"]], tuple(map(int, item["shape"]))) for item in row["tensors"]]
        length, sha256 = int(row["length"]), str(row["sha256"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise BadCheckpoint(f"{folder / DOCUMENT}: /files/{MODEL} does not describe a file of tensors") from None
    try:
        return document, _read_tensors(path, rows, length, sha256)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None


def read_facts(folder: Path) -> dict[str, Json]:
    """checkpoint.json of ``folder``, proved by its own digest; no tensor is read. Raises BadCheckpoint."""
    path = folder / DOCUMENT
    try:
        if path.stat().st_size > LARGEST_DOCUMENT_BYTES:
            raise BadCheckpoint(f"{path}: is larger than {LARGEST_DOCUMENT_BYTES} bytes, which no document is")
        document = parse(path.read_bytes(), str(path))
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
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
    lacking, beside = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if lacking or beside:
        one = f"it lacks {lacking[0]}" if lacking else f"the model has no {beside[0]}"
        raise BadCheckpoint(f"{name}: is of another model: {one} ({len(lacking)} lacking, {len(beside)} beside)")
    for key, own in wanted.items():
        if (own.shape, own.dtype) != (tensors[key].shape, tensors[key].dtype):
            raise BadCheckpoint(f"{name}: is of another model: {key} is {_shown(tensors[key])}, not {_shown(own)}")
    for key, own in wanted.items():
        own.copy_(tensors[key])


def _shown(tensor: Tensor) -> str:
    return f"{CODES[tensor.dtype]} {list(tensor.shape)}"


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


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Json]:
    """Write ``tensors`` to ``path``; gives the file's row. The widest come first: so each lies on its own width."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    rows = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    header = _header(rows)
    sha256, length = hashlib.sha256(header), len(header)
    with path.open("xb") as file:
        file.write(header)
        for name in order:
            for part in _parts(tensors[name]):
                data = part.cpu().numpy().data
                file.write(data)
                sha256.update(data)
                length += len(data)
        _settle(file)
    described = [{"name": name, "dtype": CODES[dtype], "shape": list(shape)} for name, dtype, shape in rows]
    return {"length": length, "sha256": sha256.hexdigest(), "tensors": described}


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of ``tensor`` as uint8 pieces, where it lies."""
    flat = tensor.detach().contiguous().reshape(-1)
    return torch.split(flat.view(torch.uint8), CHUNK_BYTES) if len(flat) else ()


def _read_tensors(
    path: Path, rows: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], length: int, sha256: str
) -> dict[str, Tensor]:
    """Raises OSError, and BadCheckpoint before anything of a wrong size is allocated."""
    header = _header(rows)
    if any(size < 0 for _, _, shape in rows for size in shape) or len({name for name, *_ in rows}) < len(rows):
        raise BadCheckpoint(f"{path}: its rows in {DOCUMENT} contradict each other")
    described = len(header) + sum(prod(shape) * dtype.itemsize for _, dtype, shape in rows)
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if not found == length == described:
            raise BadCheckpoint(f"{path}: has {found} bytes; {length} were saved")
        if file.read(len(header)) != header:
            raise BadCheckpoint(f"{path}: its header is not what {DOCUMENT} describes")
        digest = hashlib.sha256(header)
        tensors = {name: _read_one(file, dtype, shape, digest) for name, dtype, shape in rows}
    if digest.hexdigest() != sha256:
        raise BadCheckpoint(f"{path}: SHA-256 {digest.hexdigest()[:12]}; {sha256[:12]} was saved: it was changed")
    return tensors


def _read_one(file: IO[bytes], dtype: torch.dtype, shape: tuple[int, ...], digest: Any) -> Tensor:
    tensor = torch.zeros(shape, dtype=dtype)  # a file that ends early leaves no memory as it was found
    for part in _parts(tensor):
        view = part.numpy().data
        file.readinto(view)  # type: ignore[attr-defined]  # of every file that is opened for bytes
        digest.update(view)
    return tensor


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


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
