"""The command ``python -m executor.sample CHECKPOINT``: bytes that a trained model writes on, one after another.

The whole window is run anew for each byte, padded at its end to a multiple of 64, so that few shapes occur: models are
causal, and what follows a byte does not reach it. Plain, and quadratic in the bytes asked for.

Legend: T bytes of the window.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

_HERE, _HOME = os.path.realpath(os.getcwd()), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if __name__ == "__main__" and not sys.flags.safe_path and os.path.realpath(sys.path[0] or _HERE) == _HERE != _HOME:
    del sys.path[0]  # else any file of the working folder (json.py, torch.py) would stand before the module meant

import argparse
import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor import launch, voice

if TYPE_CHECKING:
    from torch import Tensor

    from planner.door import Workload
    from schemas.form import Json

GRANULE = 64
USAGE, REFUSED, FAILED, SIGPIPE = 2, 3, 4, 128 + 13


class Unserved(Exception):
    """This machine, or the user's word, does not allow it: exit code 3, one message with the way out."""


class NotFinite(Exception):
    """The model gave no distribution to draw from: exit code 4."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong usage or no such checkpoint, 3 refused, 4 failed or stopped."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    from planner.origin import Shadowed, check

    try:
        check(("schemas", "planner", "executor"), Path(_HOME))
    except Shadowed as error:
        return _said(str(error), USAGE)
    from executor.checkpoint import BadCheckpoint
    from planner.door import BadWorkload
    from planner.request import Usage

    try:
        _write(_bytes(options))
    except (BadCheckpoint, BadWorkload, Usage) as error:
        return _said(str(error), USAGE)
    except Unserved as error:
        return _said(f"refused: {error}", REFUSED)
    except NotFinite as error:
        return _said(f"failed: {error}", FAILED)
    except KeyboardInterrupt:
        return _said("stopped: SIGINT", FAILED)
    except BrokenPipeError:  # the reader went away, as head does; what is buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE
    return 0


def _options(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="executor.sample", description="Let a trained model write on; what it writes goes to stdout.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder that a run left: RUN_DIR/final")
    add("--prompt", default="\n", type=_prompt, metavar="TEXT", help="what it goes on from (default: a new line)")
    add("--bytes", default=256, type=_whole(0), metavar="N", help="how many bytes to write (default 256)")
    add("--temperature", default=1.0, type=_temperature, metavar="T", help="0 takes the likeliest byte (default 1)")
    add("--top-k", default=256, type=_whole(1, 256), metavar="K", help="draw from the K likeliest (default: all)")
    add("--seed", default=0, type=_whole(0, 2**32 - 1), metavar="S", help="of the draws (default 0)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: the first card, else the CPU")
    add("--model", metavar="MODULE:ATTRIBUTE", help="consent to import a model of your own, which the checkpoint names")
    return parser.parse_args(given)


def _prompt(text: str) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("must hold a byte to go on from")
    return text.encode("utf-8", "surrogateescape")  # as the bytes stood on the command line


def _whole(low: int, high: int = 10**9) -> Any:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number within {low} and {high}")
        return int(text)

    return read


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 0 or more")
    return value


def _write(pieces: Iterator[int]) -> None:
    """The bytes on stdout as they come; those that are no UTF-8 show as the replacement character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        sys.stdout.buffer.write(decoder.decode(bytes((piece,))).encode())
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(decoder.decode(b"", final=True).encode())
    sys.stdout.buffer.flush()


def _bytes(options: argparse.Namespace) -> Iterator[int]:
    """Everything up to the first byte, then the bytes. Raises as `main` catches."""
    from executor.checkpoint import read_facts

    facts = read_facts(options.checkpoint)
    _require_consent(facts, options)
    kind, capability, toolchain = _device(options.device)
    from executor import checkpoint, guest, workloads
    from executor.precision import compute_in

    label = f"the checkpoint's model {facts['model']}"
    workload = workloads.resolve(facts["model"], "the checkpoint's model", voice.say)
    dtype, kernels = _computing(facts, workload, kind, capability, toolchain)
    model = workloads.build(workload, facts["config"], kernels, label).float()
    if not callable(getattr(model, "logits", None)):
        raise checkpoint.BadCheckpoint(f"{label} has no logits(inputs [B, T]) -> [B, T, 256]: it cannot be sampled")
    checkpoint.put(model, checkpoint.load(options.checkpoint)[1], str(options.checkpoint))
    model = model.to(kind).eval()

    def logits(inputs: Tensor) -> Tensor:
        with guest.guarded(label, workloads.is_ours(workload)), compute_in(dtype, kind):
            found: Tensor = model.logits(inputs.to(kind))  # type: ignore[operator]  # torch's word for any attribute
            return found

    yield from stream(logits, options.prompt, options.bytes, Choice(options.temperature, options.top_k, options.seed))


def _require_consent(facts: Mapping[str, Json], options: argparse.Namespace) -> None:
    """A checkpoint may come from anywhere: the code that it names is not run on its word alone. Raises Unserved."""
    from executor.guest import file_of
    from planner.request import Usage

    name = facts.get("model")
    if not isinstance(name, str) or not isinstance(facts.get("config"), dict):
        raise Usage(f"{options.checkpoint}: names no model to build")
    if options.model not in (None, name):
        raise Usage(f"--model {options.model}: the checkpoint is of the model {name}")
    if ":" in name and options.model is None:
        file = file_of(name.partition(":")[0])
        lies = "which is not found from here" if file is None else f"which is the code of {file}"
        raise Unserved(f"the checkpoint names the model {name}, {lies}: read it, then say --model {name} to run it")


def _device(asked: str) -> tuple[str, str | None, Mapping[str, Json]]:
    """(kind, compute capability, toolchain) of the device asked for, which this process then sees alone."""
    from planner.machine import probe
    from planner.request import Usage

    try:
        body = probe.fleet("cpu:1" if asked == "cpu" else "auto")
    except Usage as error:
        raise Unserved(f"--device {asked}: {error}") from None
    device = next(iter(body["devices"].values()))
    if asked == "cuda" and device["kind"] != "cuda":
        raise Unserved("--device cuda: no card is visible here; give --device cpu or auto")
    launch.confine(device["ids"][0], device["kind"])
    return device["kind"], device["sm"]["value"] if "sm" in device else None, body["toolchain"]


def _computing(
    facts: Mapping[str, Json], workload: Workload, kind: str, capability: str | None, toolchain: Mapping[str, Json]
) -> tuple[str, dict[str, str]]:
    """(dtype, kernels) as the run had them; each that this device cannot run is replaced, and that is said.

    On a CPU the dtype is fp32, which is exact and no slower there. Raises Unserved where a kernel has no row that runs.
    """
    from planner.door import Shaped
    from planner.passes.legality import kernel_veto, legal

    planned = str(facts.get("dtype"))
    able = kind == "cuda" and planned in ("fp16", "bf16") and legal(planned, kind, capability)[0]
    dtype, kernels = planned if able else "fp32", {}
    config: Mapping[str, Json] = facts["config"]
    whole = all(key.name in {*config, *workload.kernels} for key in workload.keys)  # where not, building it tells
    shapes = workload.kernel_shapes(config) if whole and isinstance(workload, Shaped) else {}
    ran: Mapping[str, Json] = facts.get("kernels", {})
    for name in sorted(workload.kernels.keys() & ran.keys()):  # of the others none was called
        rows, shape, asked = workload.kernels[name], shapes.get(name, {}), str(ran[name])
        vetoes = {row["name"]: kernel_veto(row, kind, capability, dtype, toolchain, shape) for row in rows}
        chosen = next((row for row in (asked, *vetoes) if vetoes.get(row, "") is None), None)
        if chosen is None:
            reasons = "; ".join(f"{row} {why}" for row, why in vetoes.items())
            raise Unserved(f"no {name} kernel runs here in {dtype}: {reasons}; give another --device")
        if chosen != asked:
            voice.say(f"{name}: {chosen} in place of the run's {asked}, which {vetoes.get(asked, 'is not known')}")
        kernels[name] = chosen
    if dtype != planned:
        voice.say(f"computing in {dtype}; the run computed in {planned}")
    return dtype, kernels


class Choice:
    """Which byte follows: drawn from the K likeliest at a temperature, by a generator of its own; at 0 the likeliest.

    Drawn on the CPU in float64, so that a seed means the same on every device.
    """

    def __init__(self, temperature: float, top_k: int, seed: int) -> None:
        import torch

        self.temperature, self.top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """``logits`` [256] on the CPU. Raises NotFinite."""
        logits = logits.double()
        if not logits.isfinite().all():
            raise NotFinite("the model's logits are not finite")
        if self.temperature == 0:
            return int(logits.argmax())
        likeliest, places = logits.topk(self.top_k)
        # Against the largest: a small temperature would overflow otherwise.
        weights = ((likeliest - likeliest[0]) / self.temperature).exp()
        return int(places[weights.multinomial(1, generator=self._generator)])


def stream(logits: Callable[[Tensor], Tensor], prompt: bytes, count: int, choose: Choice) -> Iterator[int]:
    """``count`` bytes that follow ``prompt``, each chosen from the logits after all before it.

    Args:
        logits: of inputs int64 [1, T] on the CPU, [1, T, 256] on any device.
    """
    import torch

    from planner.door import BadWorkload

    window = list(prompt)
    for _ in range(count):
        inputs = torch.tensor([window + [0] * (-len(window) % GRANULE)])
        with torch.no_grad():
            found = logits(inputs)
        if not isinstance(found, torch.Tensor) or found.shape != (*inputs.shape, 256):
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise BadWorkload(f"logits of inputs {list(inputs.shape)} are {shape}: sampling needs [B, T, 256]")
        window.append(choose(found[0, len(window) - 1].cpu()))
        yield window[-1]


def _said(message: str, code: int) -> int:
    voice.say(message)
    return code


if __name__ == "__main__":
    sys.exit(main())
