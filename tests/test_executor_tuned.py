"""Configurations and timings that are kept of real cards, and the command that makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import tune
from executor.kernels import grouped, kda, tuned

CARD = "NVIDIA H200"
FOLDERS = sorted(path.parent for path in tuned.HERE.glob("*/*/head-*/index.json"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder with one set for 8 and 16 heads of 64 channels, and nothing kept with Dormouse."""
    monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(tuned, "HERE", tmp_path / "nowhere")
    monkeypatch.setattr(tuned, "toolchain", lambda: ("3.6.0", "0.6.0"))
    folder = tmp_path / tuned.folder_name(CARD) / "head-64"
    folder.mkdir(parents=True)
    index = {"card": CARD, "triton": "3.6.0", "fla": "0.6.0", "head": 64, "heads": [8, 16], "dtypes": ["bf16"]}
    (folder / "index.json").write_text(json.dumps(index))
    tuned.find.cache_clear()
    yield folder
    tuned.find.cache_clear()


def test_a_number_of_heads_that_was_tuned_for_is_exact_and_another_is_near(kept: Path) -> None:
    assert tuned.find(CARD, 16, 64) == ("exact", kept)
    assert tuned.find(CARD, 12, 64) == ("near", kept)


@pytest.mark.parametrize(("card", "channels", "versions"), [
    ("NVIDIA H100", 64, ("3.6.0", "0.6.0")),
    (CARD, 128, ("3.6.0", "0.6.0")),
    (CARD, 64, ("3.7.0", "0.6.0")),
    (CARD, 64, ("3.6.0", "none")),
])  # fmt: skip
def test_nothing_serves_another_card_head_size_or_toolchain(
    kept: Path, monkeypatch: pytest.MonkeyPatch, card: str, channels: int, versions: tuple[str, str]
) -> None:
    monkeypatch.setattr(tuned, "toolchain", lambda: versions)
    assert tuned.find(card, 16, channels) == ("none", None)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "/".join(path.parts[-3:]))
def test_what_is_kept_with_dormouse_is_what_fla_can_read(folder: Path) -> None:
    """Each file in FLA's own form, each entry found by FLA's own key; every number of heads and dtype is there."""
    cache = pytest.importorskip("fla.ops.utils.cache")
    index = json.loads((folder / "index.json").read_text())
    assert tuned.HERE / f"{folder.parts[-3]}/triton-{index['triton']}-fla-{index['fla']}/head-{index['head']}" == folder
    keys: list[Any] = []
    for path in sorted(folder.glob("*.json")):
        if path.name == "index.json":
            continue
        read = cache.KernelConfigFile.from_file(path)
        assert read is not None and read.autotune_entries, path
        for name, entry in read.autotune_entries.items():
            assert cache.AutotuneKey.key_hash(entry["autotune_key"]) == name
            assert {"kwargs", "num_warps", "num_stages", "num_ctas"} <= entry["config"].keys()
        keys += [entry["autotune_key"] for entry in read.autotune_entries.values() if path.stem.startswith("recompute")]
    assert {key[0] for key in keys} == set(index["heads"])
    assert {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.keys() <= {part for key in keys for part in key}


def test_rows_carry_what_is_kept_and_it_is_no_part_of_what_the_work_is() -> None:
    row = next(row for row in kda.ROWS if row["name"] == "chunk_fla")
    assert [item["card"] for item in row["tuned"]] == [
        json.loads((f / "index.json").read_text())["card"] for f in FOLDERS
    ]
    timed = {row["name"]: row["timed"] for row in grouped.ROWS if "timed" in row}
    assert timed.keys() == {"grouped_triton", "grouped_torch"}


@pytest.mark.parametrize(("arguments", "message"), [
    (["--dtypes", "fp32"], "--dtypes takes bf16 and fp16"),
    (["--set", "heads"], "--set takes KEY=VALUE"),
])  # fmt: skip
def test_wrong_arguments_end_with_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_without_a_card_there_is_nothing_to_tune(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tune.main([]) == 2
    assert capsys.readouterr().err == "dormouse: tuning needs a CUDA card, and this process sees none\n"
