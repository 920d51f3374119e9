"""A user's own module on the command line: it has an account by its own parts, mechanisms, a budget, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner.passes.cost import STATE
from processes import environment
from schemas.store import loads

MINE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Wide(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.wide = Attention(width), Wide(width)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.wide(x)

class Net(nn.Module):
    def __init__(self, width: int = 256):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

class Body(Net):
    # Most of it is not trained, and some is no parameter.
    def __init__(self, width: int = 64):
        super().__init__(width)
        self.layers.requires_grad_(False)
        self.register_buffer("kept", torch.zeros(2**20))

class Empty(Net):
    def __init__(self):
        super().__init__(64)
        self.nothing = nn.Parameter(torch.zeros(0))

made = nn.Linear(2, 2)
"""
SHAPE = ("--devices", "rtx-3060-12gb", "--model", "mine:Net", "--batch", "16", "--seq", "512")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("users")
    (folder / "mine.py").write_text(MINE)
    return folder


def planned(users: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    environ = environment(XDG_CACHE_HOME=str(users / "cache"))
    command = [sys.executable, "-m", "planner", *SHAPE, *options]
    return subprocess.run(command, cwd=users, env=environ, capture_output=True, check=False)


def test_what_is_not_trained_is_counted_and_is_what_a_run_measures(users: Path) -> None:
    asked = ["--devices", "cpu:1", "--model", "mine:Body", "--batch", "4", "--seq", "64", "--steps", "5"]
    for words in (["planner", *asked], ["executor", "body.json", "--model", "mine:Body"]):
        done = subprocess.run([sys.executable, "-m", *words], cwd=users, env=environment(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        if words[0] == "planner":
            (users / "body.json").write_bytes(done.stdout)
    made = loads((users / "body.json").read_bytes(), "dormouse.plan", "plan")
    memory, measured = made["ranks"][0]["memory"], made["runs"][-1]["measured"]
    assert memory["model_buffers"]["value"] == 4 * 2**20
    assert memory["masters"]["value"] > 4 * memory["gradients"]["value"] > 0
    for part in ("masters", "gradients", "model_buffers"):
        assert measured[f"/ranks/0/memory/{part} @0"]["value"] == memory[part]["value"], part
    assert measured["/ranks/0/memory/peak @0"]["value"] == pytest.approx(memory["peak"]["value"], rel=0.02)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("made", "mine:made is a module already; name its class, or a function: each rank makes its own"),
        ("Empty", "--model mine:Empty: its parameter nothing has no elements; leave it out"),
    ],
)
def test_what_cannot_be_planned_of_a_module_is_said_in_one_line(users: Path, model: str, told: str) -> None:
    words = [sys.executable, "-m", "planner", "--devices", "cpu:1", "--model", f"mine:{model}"]
    done = subprocess.run(words, cwd=users, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"dormouse-plan: {told}\n")


def test_a_users_own_module_fits_a_budget_by_mechanisms_or_is_refused_by_its_own_parts(users: Path) -> None:
    made = loads(planned(users, "--fit", "0.45").stdout, "dormouse.plan", "plan")
    rank, memory = made["ranks"][0], made["ranks"][0]["memory"]
    engaged = [*made["fit"]["mechanisms"]["chosen"], *rank["mechanisms"]["chosen"]]
    assert engaged and set(rank["worth"]) == set(engaged)
    assert {"layer", "embed", "head"} <= memory["alive"].keys()
    assert sum(item["value"] for item in memory["alive"].values()) == memory["activations"]["value"]
    held = sum(memory[name]["value"] for name in STATE if name in memory)
    assert memory["backward_peak"]["value"] == held + memory["activations"]["value"]
    assert memory["peak"]["value"] <= memory["limit"]["value"]
    (nothing,) = [row for row in rank["mechanisms"]["rejected"] if row["option"] == []]
    assert "over the limit" in nothing["why"] and nothing["saves_bytes"] < 0

    refused = planned(users, "--fit", "0.03")
    assert refused.returncode == 3 and refused.stdout == b""
    told = refused.stderr.decode()
    for part in ("does-not-fit", "masters", "gradients", "activations", "layer", "weights_cast", "to fix:"):
        assert part in told, told
