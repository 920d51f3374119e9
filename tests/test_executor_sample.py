"""Sampling: the bytes are those of the model, draws follow their distribution, and no strange code runs unasked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor import checkpoint, sample
from executor.models.presets import TINY
from executor.workloads import build, configure, values
from plans import SMALL
from processes import environment

CPU_KERNELS = {
    name: next(row["name"] for row in rows if "cpu" in row["devices"] and not row["toolchain"])
    for name, rows in TINY.kernels.items()
}
OWN = '''
import torch
from torch import nn

print("imported")


class Model(nn.Module):
    """Says the bytes of TEXT in turn: the successor of each."""

    def __init__(self, shape: str = "right") -> None:
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.zeros(1)), shape

    def logits(self, inputs):
        if self.shape == "raises":
            raise ValueError("no such byte")
        if self.shape == "nan":
            return torch.full((*inputs.shape, 256), float("nan"))
        if self.shape == "flat":
            return torch.zeros(inputs.shape)
        return nn.functional.one_hot((inputs + 1) % 256, 256).float()


class Mute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
'''


def tiny(**more: str) -> nn.Module:
    """A small model whose logits differ plainly from byte to byte; ``more`` are keys over `SMALL`."""
    torch.manual_seed(5)
    model = build(TINY, values(configure(TINY, {**SMALL, **more})), CPU_KERNELS, "here").float()
    with torch.no_grad():
        model.head.weight.mul_(50)
    return model


def saved(folder: Path, trained: nn.Module | None = None, **facts: Any) -> Path:
    about = {"model": "tiny", "config": values(configure(TINY, SMALL)), "kernels": CPU_KERNELS, "dtype": "fp32"}
    return checkpoint.save(folder / "final", trained or tiny(), {**about, **facts})


def own(folder: Path, name: str = "Model", **config: str) -> Path:
    """A checkpoint that names code lying in ``folder``."""
    (folder / "own_model.py").write_text(OWN)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    return saved(folder, model, model=f"own_model:{name}", config={"shape": "right", **config}, kernels={})


def command(folder: Path, *words: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "executor.sample", *map(str, words)], cwd=folder, capture_output=True, timeout=100,
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""), check=False,
    )  # fmt: skip


def called(capfdbinary: Any, *words: Any) -> tuple[int, bytes, str]:
    """(exit code, stdout, stderr) of the command in this process."""
    code = sample.main([str(word) for word in (*words, "--device", "cpu")])
    out, err = capfdbinary.readouterr()
    return code, out, err.decode()


WHOLE = {
    "experts": "4", "topk": "2", "expert_ffn": "16", "engram_rows": "50", "engram_heads": "1", "engram_dim": "4"
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, WHOLE], ids=["dense", "experts and Engram"])
@torch.no_grad()
def test_at_temperature_0_each_byte_is_the_likeliest_after_all_before_it(more: dict[str, str]) -> None:
    model, prompt = tiny(**more).eval(), b"def f(x):\n"
    window = list(prompt)
    for _ in range(70):  # past one granule
        window.append(int(model.logits(torch.tensor([window]))[0, -1].argmax()))
    found = list(sample.stream(model.logits, prompt, 70, sample.Choice(0.0, 256, 0)))
    assert found == window[len(prompt) :]
    assert len(set(found)) > 5


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 256), (0.5, 256), (2.0, 3), (1.0, 1)])
def test_draws_follow_the_softmax_at_a_temperature_among_the_likeliest(temperature: float, top_k: int) -> None:
    logits = torch.full((256,), -50.0)
    logits[[7, 99, 200, 255, 0]] = torch.tensor([1.0, 2.0, 0.5, -1.0, 1.9])
    wanted = (logits.double() / temperature).softmax(0)
    wanted[logits.argsort(descending=True)[top_k:]] = 0
    wanted /= wanted.sum()
    choose, count = sample.Choice(temperature, top_k, 3), 6_000
    found = torch.bincount(torch.tensor([choose(logits) for _ in range(count)]), minlength=256) / count
    assert (found - wanted).abs().max() < 4 * 0.5 / count**0.5  # four standard deviations of the widest


def test_a_seed_gives_the_same_draws_and_another_gives_others() -> None:
    logits = torch.zeros(256)
    draws = [[choose(logits) for _ in range(20)] for choose in (sample.Choice(1.0, 256, seed) for seed in (1, 1, 2))]
    assert draws[0] == draws[1] != draws[2]


def test_a_small_temperature_does_not_overflow_and_no_byte_is_drawn_of_nan() -> None:
    logits = torch.linspace(-500, 500, 256)
    assert sample.Choice(1e-300, 256, 0)(logits) == 255
    with pytest.raises(sample.NotFinite, match="the model's logits are not finite"):
        sample.Choice(1.0, 256, 0)(logits / 0)


def test_the_command_writes_what_the_model_says(tmp_path: Path) -> None:
    folder, model = saved(tmp_path), tiny()
    (tmp_path / "json.py").write_text("raise SystemExit('a stranger ran')\n")
    done = command(tmp_path, folder, "--prompt", "import ", "--bytes", 40, "--temperature", 0.7, "--seed", 4)
    assert (done.returncode, done.stderr) == (0, b"")
    with torch.no_grad():
        wanted = bytes(sample.stream(model.logits, b"import ", 40, sample.Choice(0.7, 256, 4)))
    assert done.stdout == wanted.decode("utf-8", "replace").encode()


def test_bytes_that_are_no_utf_8_show_as_replacements_and_split_characters_are_whole(
    tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = iter("aé€".encode() + b"\xff\xe2\x82")
    sample._write(said)
    assert capfdbinary.readouterr().out == "aé€\ufffd\ufffd".encode()


def test_code_that_a_checkpoint_names_is_not_run_without_consent(
    tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = called(capfdbinary, folder)
    assert (code, out) == (3, b"")
    assert f"which is the code of {tmp_path}/own_model.py: read it, then say --model own_model:Model" in err
    assert called(capfdbinary, folder, "--model", "own_model:Mute")[0] == 2
    done = command(tmp_path, folder, "--model", "own_model:Model", "--prompt", "A", "--bytes", 4)
    assert (done.returncode, done.stdout[:9]) == (0, b"imported\n"), done.stderr
    assert f"own_model:Model is imported from {tmp_path}/own_model.py" in done.stderr.decode()


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"shape": "raises"}, 2, "the checkpoint's model own_model:Model: ValueError: no such byte ("),
        ({"shape": "flat"}, 2, "logits of inputs [1, 64] are [1, 64]: sampling needs [B, T, 256]"),
        ({"shape": "nan"}, 4, "failed: the model's logits are not finite"),
        ({"name": "Mute"}, 2, "own_model:Mute has no logits(inputs [B, T]) -> [B, T, 256]"),
    ],
)
def test_what_a_models_own_code_does_wrong_is_told_in_one_line(
    tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, str], code: int, said: str
) -> None:
    folder = own(tmp_path, **config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    found, _, err = called(capfdbinary, folder, "--model", f"own_model:{config.get('name', 'Model')}")
    assert (found, said in err, "Traceback" in err) == (code, True, False), err


def test_of_a_kernel_that_the_run_did_not_call_nothing_is_said(tmp_path: Path, capfdbinary: Any) -> None:
    code, out, err = called(capfdbinary, saved(tmp_path, kernels={"kda": CPU_KERNELS["kda"]}), "--bytes", 1)
    assert code == 0 and out and not err


def test_a_kernel_that_does_not_run_here_is_replaced_and_that_is_said(tmp_path: Path, capfdbinary: Any) -> None:
    planned = {**CPU_KERNELS, "kda": "of_another_card"}
    code, out, err = called(capfdbinary, saved(tmp_path, kernels=planned, dtype="bf16"), "--bytes", 1)
    assert code == 0 and out
    assert "kda: chunk_torch in place of the run's of_another_card, which is not known" in err
    assert "computing in fp32; the run computed in bf16" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], 2, "nowhere/checkpoint.json: cannot be read: No such file or directory"),
        (["."], 2, "checkpoint.json: cannot be read: No such file or directory (a run leaves its model in "),
        (["final", "--device", "cuda"], 3, "refused: --device cuda: no card is visible here"),
        (["final", "--temperature", "-1"], 2, "'-1' must be a number of 0 or more"),
        (["final", "--top-k", "0"], 2, "'0' must be a whole number within 1 and 256"),
        (["final", "--prompt", ""], 2, "must hold a byte to go on from"),
    ],
)
def test_what_cannot_be_asked_is_told(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    saved(tmp_path)
    done = command(tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in done.stderr.decode() and b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "executor.sample", str(saved(tmp_path)), "--bytes", "100000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(3)
        running.stdout.close()
        assert (running.wait(60), running.stderr.read()) == (128 + 13, b"")
