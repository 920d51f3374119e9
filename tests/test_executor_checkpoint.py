"""Checkpoints: every bit comes back, the format is the one that others read, and whatever was changed is told in a
line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import plans
from executor import checkpoint
from executor.checkpoint import BadCheckpoint, load, put, save
from executor.fingerprints import fingerprint
from executor.models.engram import Engram
from executor.run import Places, execute
from executor.workloads import build, resolve
from schemas.form import render
from test_executor_command import command, written

DTYPES = list(checkpoint.CODES)
FACTS = {"model": "mine:Model", "config": {"width": 8, "lr": 0.1234567}, "kernels": {}, "steps": 3}


class Holder(nn.Module):
    """Tensors of every dtype as buffers: scalars, empty ones, transposed ones, and a parameter that is tied."""

    def __init__(self, fill: bool = True) -> None:
        super().__init__()
        for dtype in DTYPES:
            name = checkpoint.CODES[dtype]
            # Any bits will do, NaN's too; only a bool must be 0 or 1.
            bits = torch.randint(0, 256 if dtype != torch.bool else 2, (5, 3 * dtype.itemsize), dtype=torch.uint8)
            self.register_buffer(name, (bits if fill else bits * 0).view(dtype))
        self.register_buffer("scalar", torch.tensor(1.5 * fill))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("turned", (torch.randn(3, 4) * fill).T)
        self.weight = nn.Parameter(torch.randn(7) * fill)
        self.tied = self.weight


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        (found[name].dtype, found[name].shape, bits(found[name])) == (item.dtype, item.shape, bits(item))
        for name, item in wanted.items()
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "runs" / "final", Holder(), FACTS)


def test_every_bit_of_every_dtype_comes_back(tmp_path: Path) -> None:
    model = Holder()
    folder = save(tmp_path / "runs" / "final", model, FACTS)
    facts, tensors = load(folder)
    assert equal(tensors, model.state_dict())
    other = Holder(fill=False)
    assert not equal(dict(other.state_dict()), model.state_dict())
    put(other, tensors, "here")
    assert equal(dict(other.state_dict()), model.state_dict())
    assert {key: facts[key] for key in FACTS} == {**FACTS, "config": {"width": 8, "lr": 0.123457}}
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "model.safetensors"]
    assert os.listdir(folder.parent) == ["final"]


def test_a_tensor_of_many_chunks_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 10)
    model = Holder()
    assert equal(load(save(tmp_path / "final", model, FACTS))[1], model.state_dict())


def test_the_safetensors_library_reads_every_tensor(tmp_path: Path) -> None:
    model = Holder()
    folder = save(tmp_path / "final", model, FACTS)
    assert equal(safetensors.torch.load_file(folder / checkpoint.MODEL), model.state_dict())


def test_of_tensors_of_one_dtype_the_file_is_byte_for_byte_the_librarys(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Embedding(7, 2))
    folder = save(tmp_path / "final", model, FACTS)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (folder / checkpoint.MODEL).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_table_in_host_memory_is_saved_under_its_name_on_the_device(tmp_path: Path) -> None:
    inside, outside = (nn.Sequential(Engram(width=8, rows=11, heads=1, dim=4)) for _ in range(2))
    for model in (inside, outside):
        model[0].reset(1.0)
    outside[0].to_host()
    put(inside, load(save(tmp_path / "a", outside, FACTS))[1], "a")
    assert torch.equal(inside[0].table, outside[0].host.weight)
    inside[0].table.data.add_(1)
    put(outside, load(save(tmp_path / "b", inside, FACTS))[1], "b")
    assert torch.equal(inside[0].table, outside[0].host.weight)


def test_a_new_checkpoint_replaces_the_old_one_whole(tmp_path: Path) -> None:
    first, second = Holder(), Holder()
    save(tmp_path / "final", first, FACTS)
    (tmp_path / "final" / "more").write_text("of the old one")
    save(tmp_path / "final", second, {**FACTS, "steps": 4})
    facts, tensors = load(tmp_path / "final")
    assert facts["steps"] == 4 and equal(tensors, second.state_dict())
    assert os.listdir(tmp_path) == ["final"] and not (tmp_path / "final" / "more").exists()


@pytest.mark.parametrize("place", ["write", "_replace"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(
    saved: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = load(saved)[1]
    monkeypatch.setattr(checkpoint, place, full)
    with pytest.raises(OSError, match="No space left"):
        save(saved, Holder(), FACTS)
    assert os.listdir(saved.parent) == ["final"] and equal(load(saved)[1], before)


def _edited(change: Callable[[dict[str, Any]], None], *, honest: bool = False) -> Callable[[Path], None]:
    """A hand in checkpoint.json; ``honest``: with a digest that fits."""

    def edit(folder: Path) -> None:
        path = folder / checkpoint.DOCUMENT
        document = json.loads(path.read_text())
        change(document)
        if honest:
            del document["digest"]
            document["digest"] = checkpoint._digest(document)
        path.write_bytes(render(document))

    return edit


def _flip(place: int) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        path = folder / checkpoint.MODEL
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return flip


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    return document["files"][checkpoint.MODEL]["tensors"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "checkpoint.json: cannot be read: No such file"),
        (lambda folder: (folder / checkpoint.MODEL).unlink(), "model.safetensors: cannot be read: No such file"),
        (lambda folder: os.truncate(folder / checkpoint.MODEL, 900), "has 900 bytes; "),
        (_flip(-1), "it was changed"),
        (_flip(40), "its header is not what checkpoint.json describes"),
        (lambda folder: (folder / checkpoint.DOCUMENT).write_text("{"), "not JSON"),
        (lambda folder: (folder / checkpoint.DOCUMENT).write_text("[]"), "is not a checkpoint"),
        (_edited(lambda it: it.update(format="dormouse.plan")), "is not a checkpoint"),
        (_edited(lambda it: it.update(format_version=2)), "format_version 2; this Dormouse reads 1"),
        (_edited(lambda it: it["config"].update(width=16)), "was changed after it was saved"),
        (_edited(lambda it: it.update(files=[]), honest=True), "was changed after it was saved"),
        (_edited(lambda it: it["files"].clear(), honest=True), "does not describe a file of tensors"),
        (_edited(lambda it: _rows(it)[0].update(dtype="F128"), honest=True), "does not describe a file of tensors"),
        (_edited(lambda it: _rows(it)[0].update(shape=[2**40, 2**10]), honest=True), " bytes; "),
        (_edited(lambda it: _rows(it)[0].update(shape=[-5, -3]), honest=True), "contradict each other"),
        (_edited(lambda it: _rows(it)[1].update(name=_rows(it)[0]["name"]), honest=True), "contradict each other"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_what_it_was_is_refused_in_one_line(
    saved: Path, damage: Callable[[Path], None], said: str
) -> None:
    load(saved)
    damage(saved)
    with pytest.raises(BadCheckpoint, match=said) as caught:
        load(saved)
    assert "\n" not in str(caught.value) and str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it.pop("I8"), "it lacks I8 (1 lacking, 0 beside)"),
        (lambda it: it.update(other=torch.zeros(1)), "the model has no other (0 lacking, 1 beside)"),
        (lambda it: it.update(I8=it["I8"].view(torch.uint8)), "I8 is U8 [5, 3], not I8 [5, 3]"),
        (lambda it: it.update(weight=it["weight"][:1]), "weight is F32 [1], not F32 [7]"),
    ],
)
def test_tensors_of_another_model_are_refused_and_none_is_copied(change: Callable[[Any], None], said: str) -> None:
    model = Holder()
    before = {name: item.clone() for name, item in model.state_dict().items()}
    tensors = {name: torch.zeros_like(item) for name, item in before.items()}
    change(tensors)
    with pytest.raises(BadCheckpoint) as caught:
        put(model, tensors, "here")
    assert str(caught.value) == f"here: is of another model: {said}"
    assert equal(dict(model.state_dict()), before)


def test_state_that_the_format_cannot_hold_is_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(BadCheckpoint, match=r"the model's state phase is torch\.complex128"):
        save(tmp_path / "final", model, FACTS)
    assert os.listdir(tmp_path) == []


def test_a_finished_run_leaves_the_model_that_its_fingerprint_is_of(tmp_path: Path) -> None:
    data = plans.corpus(tmp_path)
    plan = plans.plan(data)
    done = execute(plan, Places(None, tmp_path / "run", (data,)))
    assert (done.outcome, done.notice) == ("finished", None)
    facts, tensors = load(tmp_path / "run" / "final")
    config = {key: item["chosen"] for key, item in plan["workload"]["config"].items()}
    assert (facts["model"], facts["config"], facts["steps"]) == ("tiny", config, 6)
    kernels = {name: item["chosen"] for name, item in plan["ranks"][0]["kernels"].items()}
    assert (facts["plan"], facts["kernels"]) == (plan["seal"]["digest"], kernels)
    model = build(resolve("tiny"), facts["config"], facts["kernels"], "here")
    put(model, tensors, "here")
    assert done.entry is not None and fingerprint(model) == done.entry["fingerprint"]


def test_of_several_ranks_one_leaves_the_model(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2, steps=2)
    done = command(tmp_path, path, "--data", data, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the model is in run/final") == 1
    assert load(tmp_path / "run" / "final")[0]["steps"] == 2


def test_a_run_whose_model_cannot_be_kept_is_recorded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    data = plans.corpus(tmp_path)
    plan = plans.plan(data)
    monkeypatch.setattr(checkpoint, "write", full)
    done = execute(plan, Places(tmp_path / "plan.json", tmp_path / "run", (data,)))
    assert done.outcome == "finished"
    assert done.notice == f"left no model in {tmp_path}/run/final (OSError: [Errno 28] No space left on device)"
    assert json.loads((tmp_path / "plan.json").read_text())["runs"][0]["outcome"] == "finished"


def test_a_run_is_refused_where_its_model_would_find_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.honour import BadRank

    data = plans.corpus(tmp_path)
    plan = plans.plan(data)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(BadRank, match=r"--run-dir .*: the trained model takes \d+ bytes; 1000 are free there"):
        execute(plan, Places(None, tmp_path / "run", (data,)))


def test_a_run_that_is_to_leave_no_model_leaves_none_and_needs_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plans.corpus(tmp_path)
    plan = plans.plan(data, settings={"keep_model": "none"}, steps=2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    done = execute(plan, Places(None, tmp_path / "run", (data,)))
    assert (done.outcome, done.notice) == ("finished", None)
    assert os.listdir(tmp_path / "run") == ["metrics.jsonl"]
