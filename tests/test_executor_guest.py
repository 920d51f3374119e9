"""A user's own module: whatever is wrong with it is one line that names it, what it raised, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import build, smoke
from executor.account import account
from executor.guest import told
from executor.slices import Source, WorkSlice
from executor.workloads import RUNTIME, configure, resolve
from planner.door import BadWorkload
from planner.refusals.of_runs import smoke_failed

USERS = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.head(self.embed(inputs)).flatten(0, 1), targets.flatten())

class Inherits(Net):
    pass

class Bare(nn.Module):
    pass

class Open(Net):
    def __init__(self, *parts, width: int = 8, **more):
        super().__init__(width)

class Lazy(Net):
    def __init__(self):
        import beside
        super().__init__()

class Exits(Net):
    def __init__(self):
        sys.exit(0)

class Raises(Net):
    def __init__(self):
        raise ValueError("no")

class Logits(Net):
    def forward(self, inputs, targets):
        return self.head(self.embed(inputs))

class Alone(Net):
    def forward(self, inputs):
        return inputs

class Unread(Net):
    def forward(self, inputs, targets):
        return super().forward(inputs, targets) * inputs.sum().item()

class Looks(Net):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

class Chooses(Net):
    def forward(self, inputs, targets):
        return super().forward(inputs[inputs.nonzero()[:, 0]], targets)

class Half(Net):
    def __init__(self):
        super().__init__()
        self.head.half()

class Unsized(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(256)

class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class PartlyFrozen(Net):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 8).requires_grad_(False)

class Unused(Net):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 8)

class NotANumber(Net):
    def forward(self, inputs, targets):
        return super().forward(inputs, targets) * float("nan")

class Falls(Net):
    def forward(self, inputs, targets):
        raise KeyError("never there")

class Upper(Net):
    def __init__(self, nHead: int = 2):
        super().__init__()

class Flag(Net):
    def __init__(self, bias: bool = True):
        super().__init__()

class Infinite(Net):
    def __init__(self, rate: float = float("inf")):
        super().__init__()

def number():
    return 3
"""
THERE = r"\(.*guests\.py, line \d+\); planning runs the module on tensors that have shapes and no values, so .*item\(\)"
NAMES = ("guests", "guest_folder", "guest_folder.deep", "leaving", "misspelt", "needing", "beside")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guests.py").write_text(USERS)
    (tmp_path / "beside.py").write_text("here = True")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('enough')")
    (tmp_path / "misspelt.py").write_text("def broken(:")
    (tmp_path / "needing.py").write_text("import not_installed")
    (tmp_path / "guest_folder").mkdir()
    (tmp_path / "guest_folder" / "__init__.py").write_text("")
    (tmp_path / "guest_folder" / "deep.py").write_text("from guests import Net")
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["guests:Inherits", "guests:Open", "guests:Lazy", "guest_folder.deep:Net"])
def test_a_module_without_an_init_of_its_own_with_open_parameters_or_in_a_package_can_be_counted(
    users: Path, name: str
) -> None:
    made = account({"model": name})
    assert made["parameters"]["adamw"] == 256 * 8 * 2 + 256


def test_a_frozen_parameter_is_no_part_of_what_is_trained_or_counted_as_gradients(users: Path) -> None:
    made = account({"model": "guests:PartlyFrozen"})
    assert made["parameters"]["adamw"] == 256 * 8 * 2 + 256
    assert made["digest"] == account({"model": "guests:Net"})["digest"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("guests:Bare", r"has no parameter to train"),
        ("guests:Frozen", r"has no parameter to train"),
        ("guests:Exits", r"its code ended the process: SystemExit: 0 \(.*guests\.py, line \d+\)"),
        ("guests:Raises", r"ValueError: no \(.*guests\.py, line \d+\)"),
        ("guests:Logits", r"gives a tensor of shape \[\d+, \d+, 256\]; it must give the mean cross-entropy, a scalar"),
        ("guests:Alone", r"TypeError: .*takes 2 positional arguments but 3 were given"),
        ("guests:Unread", rf"Tensor\.item\(\) cannot be called on meta tensors {THERE}"),
        ("guests:Looks", rf"Tensor\.item\(\) cannot be called on meta tensors {THERE}"),
        ("guests:Chooses", rf"nonzero.*{THERE}"),
        ("guests:Half", r"its parameter head\.weight is float16; parameters are fp32 masters, and --dtype says .*"),
        ("guests:Unsized", r"its parameter head\.weight has no shape before a first forward; give it its sizes"),
        ("guests:number", r"gives a int; it must give a torch\.nn\.Module"),
        ("guests:Nobody", r"'guests' \(.*guests\.py\) has no attribute 'Nobody'"),
        ("leaving:Net", r"cannot import 'leaving': its code ended the process: SystemExit: enough"),
        ("misspelt:Net", r"cannot import 'misspelt': SyntaxError: invalid syntax \(misspelt\.py, line 1\)"),
        ("needing:Net", r"ModuleNotFoundError: No module named 'not_installed' \(.*needing\.py, line 1\)$"),
        ("nowhere.deep:Net", r"cannot import 'nowhere\.deep': .* looked for .*\(the working folder\): .*PYTHONPATH"),
    ],
)
def test_what_is_wrong_with_a_users_module_is_one_line(users: Path, model: str, message: str) -> None:
    with pytest.raises(BadWorkload, match=message) as caught:
        account({"model": model})
    assert str(caught.value).startswith(f"--model {model}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Upper", "parameter 'nHead' cannot be set by --set"),
        ("Flag", "'bias' needs a default that is an int"),
        ("Infinite", "'rate' needs a default"),
    ],
)
def test_a_parameter_that_no_key_can_stand_for_is_told(users: Path, name: str, message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        configure(resolve(f"guests:{name}"), {})


def test_an_error_that_no_user_raised_has_no_place_and_one_without_words_says_so() -> None:
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        assert "test_executor_guest.py" in told(error)
    assert told(ValueError()) == "ValueError: no message"
    assert told(ValueError("\nfirst\nsecond")) == "ValueError: first"


# The runtime's keys as a plan holds them: nothing is left to be decided.
_SETTLED = {key.name: key.choices[-1] if key.default == "auto" else key.default for key in RUNTIME}


def _work(model: str, **config: Any) -> WorkSlice:
    return WorkSlice(model=model, opt="muon", steps=1, seed=0, config={**_SETTLED, **config})


def test_the_executor_says_which_file_a_plan_has_it_import_before_it_does(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.model(_work("guest_folder.deep:Net", width=8), {})
    said = capsys.readouterr().err.splitlines()
    file = users / "guest_folder" / "deep.py"
    assert said == [f"dormouse: the plan's model guest_folder.deep:Net is imported from {file}"]
    with pytest.raises(BadWorkload, match="ended the process"):
        build.model(_work("leaving:Net"), {})
    assert f"imported from {users / 'leaving.py'}" in capsys.readouterr().err


def test_other_ranks_and_models_of_dormouses_own_say_nothing(
    users: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    build.model(_work("guests:Net", width=8), {})
    monkeypatch.setenv("RANK", "0")
    resolve("tiny", say=pytest.fail)
    assert capsys.readouterr().err == ""


def test_a_module_that_the_plan_names_and_that_is_not_here_or_has_changed_is_told_as_the_plans(users: Path) -> None:
    with pytest.raises(BadWorkload, match=r"^the plan's model nowhere:Net: cannot import .* set PYTHONPATH"):
        build.model(_work("nowhere:Net"), {})
    with pytest.raises(BadWorkload, match=r"the plan's model guests:Net asks for the key width, .* plan anew"):
        build.model(_work("guests:Net"), {})


def _smoke(name: str) -> dict[str, Any]:
    model = resolve(f"guests:{name}").build({"width": 8}, {})
    return smoke.launch(0, model, torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64), "fp32")


def _refusal(row: dict[str, Any], dtype: str = "fp32", kernels: tuple[str, ...] = ()) -> str:
    entry = {"members": [0], "dtype": {"chosen": dtype}, "kernels": {name: {"chosen": "fast"} for name in kernels}}
    return "\n".join(refusal.text() for refusal in smoke_failed({"ranks": [entry]}, {"smoke": [row]}))


def test_a_first_step_names_what_got_no_gradient_what_is_not_finite_and_what_was_raised(users: Path) -> None:
    unused = _refusal(_smoke("Unused"))
    assert "no gradient reached extra.weight, extra.bias" in unused and "requires_grad_(False)" in unused
    infinite = _refusal(_smoke("NotANumber"))
    assert "not finite: loss, gradient of embed.weight" in infinite and "mend the model" in infinite
    raised = _refusal(_smoke("Falls"))
    assert "KeyError: 'never there' (" in raised and "guests.py, line" in raised
    for said in (unused, infinite, raised):
        assert "--dtype" not in said and "--set" not in said, "no option could help a plain model in fp32"
    assert _refusal(_smoke("PartlyFrozen")) == ""


def test_another_dtype_or_kernel_is_proposed_only_where_there_is_one() -> None:
    row: dict[str, Any] = {"rank": 0, "error": "RuntimeError: x", "nonfinite": [], "unused": []}
    assert "plan another dtype (--dtype fp32); or mend" in _refusal(row, "bf16")
    both = _refusal(row, "bf16", ("kda",))
    assert "bf16 with kda=fast" in both and "--dtype fp32" in both and "--set kda=NAME" in both
    many = {**row, "error": None, "nonfinite": [f"gradient of p{i}" for i in range(9)]}
    assert "gradient of p3 and 5 more" in _refusal(many)
    full = _refusal({**row, "error": "OutOfMemoryError: CUDA out of memory"}, "bf16")
    assert "--fit auto" in full and "--dtype" not in full


MEMORY = (  # as torch 2.11 said on an H200
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 126.92 GiB is "
    "free. Process 2696 has 1.86 GiB memory in use. Including non-PyTorch memory, this process has 2.10 GiB memory in "
    "use. 148.00 MiB allowed; Of the allocated memory 65.63 MiB is allocated by PyTorch, and 16.37 MiB is reserved by "
    "PyTorch but unallocated."
)
ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
    "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def test_of_memory_that_ran_out_torchs_numbers_are_told_and_not_how_to_set_what_the_plan_sets() -> None:
    assert told(torch.OutOfMemoryError(MEMORY + ADVICE)) == f"OutOfMemoryError: {MEMORY}"
    assert told(torch.OutOfMemoryError(MEMORY)) == f"OutOfMemoryError: {MEMORY}"
    assert told(RuntimeError(ADVICE)) == f"RuntimeError: {ADVICE.strip()}"


# --- where the data lies ---

STDLIB = Source("stdlib", 1, None, None)


def _source(name: str = "a.txt", length: int = 5) -> Source:
    return Source(name, 1, length, "ab" * 32)


def test_data_of_the_planned_name_and_length_in_the_working_folder_needs_no_option(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.txt"):
        (users / name).write_text("hello")
    found = build.open_corpora([_source(), _source("b.txt")], [])
    assert [corpus.name for corpus in found] == ["a.txt", "b.txt"]
    assert "no --data is given: reading a.txt, b.txt of the working folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sources", "places", "message"),
    [
        ([_source()], [], r"trains on a\.txt \(5 bytes, SHA-256 abababababab\), which is not .* --data PATH$"),
        ([_source()], [], r"which is not in the working folder \(a\.txt there has 18 bytes\): say"),
        ([_source("../up.txt")], [], r"which is not in the working folder: say"),
        ([_source(), _source("b.txt")], [], r"are not all in the .* \(a\.txt .*in this order: --data PATH,PATH$"),
        ([_source()], ["a", "b"], r"--data a,b: 2 places; the plan trains on a\.txt"),
        ([_source(), _source("b.txt")], ["a"], r"--data a: 1 place; the plan trains on a\.txt .*, b\.txt"),
        ([STDLIB], ["a"], r"--data a: the plan trains on the running Python's standard library and takes no --data"),
    ],
)  # fmt: skip
def test_where_data_lies_is_asked_with_what_the_plan_trains_on(
    users: Path, sources: list[Source], places: list[str], message: str
) -> None:
    (users / "a.txt").write_text("other than planned")
    (users.parent / "up.txt").write_text("hello")
    with pytest.raises(build.BadPlace, match=message):
        build.open_corpora(sources, [Path(place) for place in places])
