"""From the words of the command line to a workload and its configuration.

``resolve`` finds what stands behind ``--model``: an entry point of the group ``dormouse.workloads``, or
``module:attribute``. ``configure`` reads ``--set KEY=VALUE`` text into typed, range-checked values of two halves, the
model's keys and the runtime's. Every fault of the user is a BadWorkload that names the key and what is known.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from math import frexp, isfinite
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from executor.guest import guarded, load
from planner.door import BadWorkload, ConfigRow, KernelRow, Key, Kind, Sizes, Value, Workload
from schemas.form import Json

GROUP = "dormouse.workloads"
_KEY_NAME = re.compile(r"[a-z][a-z0-9_]*")
_KINDS: dict[type, Kind] = {int: "int", float: "float", str: "text"}
"""Kinds of the defaults that can be keys. Not bool, and no subclass: a plan could not give them back as they were."""

RUNTIME: tuple[Key, ...] = (
    Key("muon_lr", "float", 0.02, "peak learning rate of Muon", 0.0, 10.0),
    Key("adamw_lr", "float", 0.003, "peak learning rate of AdamW", 0.0, 10.0),
    Key("muon_momentum", "float", 0.95, "momentum of Muon", 0.0, 0.9999),
    Key("adamw", "choice", "auto", "how AdamW is computed", choices=("auto", "fused", "ieee")),
    Key("weight_decay", "float", 0.01, "decoupled, on tensors of two dimensions or more", 0.0, 10.0),
    Key("allocator", "choice", "auto", "how a card's memory grows", choices=("auto", "expandable", "segments", "none")),
    Key("ns_steps", "int", 5, "Newton-Schulz steps", 1, 20),
    Key("ns_dtype", "choice", "auto", "dtype of Newton-Schulz", choices=("auto", "fp32", "bf16")),
    Key("clip", "float", 1.0, "bound on the norm of the fleet's gradient; 0 is no bound", 0.0, 1e9),
    Key("warmup", "int", 5, "steps of linear warm-up", 0, 10**9),
    Key("final_lr", "float", 0.1, "fraction of the peak at the last step, by linear decay", 0.0, 1.0),
    Key("nonfinite", "choice", "stop", "what a gradient that is not finite does", choices=("stop", "skip")),
    Key("loss_scale", "float", 65536.0, "loss scale of fp16 at the start, a power of two", 1.0, 2.0**100),
    Key("loss_scale_growth", "int", 2000, "steps without an overflow that double the loss scale", 1, 10**9),
    Key("fingerprint_every", "int", 10, "steps between comparisons of the ranks' weights; 0 is never", 0, 10**9),
    Key("eval_every", "int", 0, "steps between evaluations; 0 is only at the end", 0, 10**9),
    Key("eval_windows", "int", 16, "held-out windows an evaluation reads", 1, 10**6),
    Key("log_every", "int", 10, "steps between log lines", 1, 10**9),
    Key("keep_model", "choice", "final", "what a finished run leaves of its model", choices=("final", "none")),
    Key("checkpoint_every", "int", 0, "steps between checkpoints; 0 is only where it is stopped", 0, 10**9),
    Key("keep_checkpoints", "int", 2, "newest checkpoints that are kept", 1, 10**6),
    Key("warmup_steps_unmeasured", "int", 2, "first steps outside the measuring window", 0, 10**6),
)


def resolve(spec: str, asked: str = "--model", say: Callable[[str], None] | None = None) -> Workload:
    """The workload of a preset's name or of ``module:attribute``. Raises BadWorkload.

    Args:
        asked: who names the model, in a message: an option, or the plan.
        say: told, in one line, which file is imported where that is not Dormouse's own; it is told before.
    """
    presets = {point.name: point for point in entry_points(group=GROUP)}
    label = f"{asked} {spec}"
    if spec in presets:
        found = _preset(presets[spec], label, say)
    elif ":" in spec:
        found = _attribute(spec, label, say)
    else:
        raise BadWorkload(f"no model {spec!r}{_hint(spec, presets)}; a model of your own is named module:attribute")
    if isinstance(found, Workload) and not isinstance(found, type):
        return found
    if isinstance(found, nn.Module):
        raise BadWorkload(f"{spec} is a module already; name its class, or a function: each rank makes its own")
    if callable(found):
        return Module(spec, found)
    raise BadWorkload(f"{spec} is a {type(found).__name__}; it must be a workload, or a callable that gives a module")


def _preset(point: EntryPoint, label: str, say: Callable[[str], None] | None) -> Any:
    if point.module.partition(".")[0] != "executor":
        load(point.module, label, say)
    with guarded(label, point.module.partition(".")[0] == "executor"):
        return point.load()


def _attribute(spec: str, label: str, say: Callable[[str], None] | None) -> Any:
    module_name, _, path = spec.partition(":")
    found: Any = load(module_name, label, say)
    for part in path.split("."):
        with guarded(label):
            if not hasattr(found, part):
                at = f" ({found.__file__})" if getattr(found, "__file__", None) else ""
                raise BadWorkload(f"{label}: {getattr(found, '__name__', found)!r}{at} has no attribute {part!r}")
            found = getattr(found, part)
    return found


def is_ours(workload: Workload) -> bool:
    """Whether the model is Dormouse's own."""
    return not isinstance(workload, Module) and type(workload).__module__.partition(".")[0] == "executor"


def build(workload: Workload, config: Mapping[str, Value], kernels: Mapping[str, str], label: str) -> nn.Module:
    """The module that ``workload`` builds; ``label`` begins the message of a BadWorkload."""
    with guarded(label, is_ours(workload)):
        missing = [key.name for key in workload.keys if key.name not in {*config, *kernels, *workload.kernels}]
        if missing:
            raise BadWorkload(f"{label} asks for the key {', '.join(missing)}, which the plan does not hold: plan anew")
        # A kernel that the plan chose no row of is not called under this configuration: any row stands for it.
        idle = {kernel: rows[-1]["name"] for kernel, rows in workload.kernels.items()}
        built = workload.build(config, {**idle, **kernels})
        if not isinstance(built, nn.Module):
            raise BadWorkload(f"{label}: gives a {type(built).__name__}; it must give a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in built.parameters()):
            raise BadWorkload(f"{label}: has no parameter to train")
        _require_masters(built, label)
        return built


def _require_masters(built: nn.Module, label: str) -> None:
    """Raise BadWorkload where a parameter has no shape yet, or is of another floating dtype: masters are fp32."""
    for name, parameter in built.named_parameters():
        if is_lazy(parameter):
            raise BadWorkload(f"{label}: its parameter {name} has no shape before a first forward; give it its sizes")
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise BadWorkload(
                f"{label}: its parameter {name} is {dtype}; parameters are fp32 masters, and --dtype says in what they "
                "compute: leave .half(), .bfloat16() or .double() out of the module"
            )


LATER = frozenset({"keep_model", "checkpoint_every", "keep_checkpoints", "allocator"})
"""Keys of the runtime that plans from before them need not hold: without one, a run does as it did then."""


def require_settled(workload: Workload, config: Mapping[str, Value], asked: str) -> None:
    """Raise BadWorkload where ``config``, of a plan, holds no value for a key, one that `configure` would not give, or
    one still to be decided. ``asked`` names the model in the message."""
    for key in (*workload.keys, *RUNTIME):
        if key.name in workload.kernels or (key.name in LATER and key.name not in config):
            continue
        if key.name not in config:
            raise BadWorkload(f"{asked} asks for the key {key.name}, which the plan does not hold: plan anew")
        value = config[key.name]
        if not _is_of(key, value):
            raise BadWorkload(f"{asked}: the plan holds {key.name}={value!r:.60}, which is no {key.kind} to run with")
        if isinstance(value, int | float):
            _require_within(key, value, str(value))


def _is_of(key: Key, value: Json) -> bool:
    if key.kind == "choice":
        return value in key.choices and not (key in RUNTIME and value == "auto")
    kinds: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "text": str}
    return isinstance(value, kinds[key.kind]) and not isinstance(value, bool)


def _default_sizes() -> Sizes:
    return {"batch": 4, "seq": 128, "steps": 60}


@dataclass(frozen=True)
class Module:
    """A user's own module behind the door: a class or function whose parameters with defaults are the keys."""

    name: str
    factory: Any
    sizes: Sizes = field(default_factory=_default_sizes)
    depth: str | None = None

    @property
    def keys(self) -> Sequence[Key]:
        """One key for each parameter, without ``*args`` and ``**kwargs``.

        Raises BadWorkload where a parameter has no int, float or str default, or a name that no key can have.
        """
        try:
            parameters = inspect.signature(self.factory).parameters.values()
        except (TypeError, ValueError):
            raise BadWorkload(f"{self.name}: Python does not tell its parameters; give a class or a function") from None
        return tuple(self._key(item) for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD))

    def _key(self, parameter: inspect.Parameter) -> Key:
        name, default = parameter.name, parameter.default
        kind = _KINDS.get(type(default))
        if kind is None or (isinstance(default, float) and not isfinite(default)):
            raise BadWorkload(f"{self.name}: parameter {name!r} needs a default that is an int, float or str")
        if not _KEY_NAME.fullmatch(name) or parameter.kind is parameter.POSITIONAL_ONLY:
            raise BadWorkload(
                f"{self.name}: parameter {name!r} cannot be set by --set: it must be a keyword of a-z, 0-9 and _"
            )
        return Key(name, kind, default, f"default of {self.name}")

    @property
    def kernels(self) -> Mapping[str, Sequence[KernelRow]]:
        """A plain module requires no kernel."""
        return {}

    def build(self, config: Mapping[str, Value], kernels: Mapping[str, str]) -> Any:
        """Call the factory with the model half of the configuration."""
        return self.factory(**{key.name: config[key.name] for key in self.keys})


def configure(workload: Workload, settings: Mapping[str, str]) -> dict[str, ConfigRow]:
    """Every key of both halves, resolved: model keys first, then the runtime's. Raises BadWorkload."""
    keys = {key.name: key for key in (*workload.keys, *RUNTIME)}
    if len(keys) != len(workload.keys) + len(RUNTIME):
        clash = sorted({key.name for key in workload.keys} & {key.name for key in RUNTIME})
        raise BadWorkload(f"{workload.name} names keys that belong to the runtime: {', '.join(clash)}")
    for name in settings:
        if name not in keys:
            raise BadWorkload(f"no key {name!r} to set{_hint(name, keys)}")
    rows: dict[str, ConfigRow] = {}
    for name, key in keys.items():
        asked = read(key, settings[name]) if name in settings else None
        if name == "loss_scale" and asked is not None and frexp(float(asked))[0] != 0.5:
            raise BadWorkload(f"loss_scale={settings[name]}: must be a power of two, so that scaling rounds nothing")
        why = f"--set {name}={settings[name]}" if asked is not None else key.why
        rows[name] = {"asked": asked, "chosen": key.default if asked is None else asked, "why": why}
    return rows


def values(rows: Mapping[str, ConfigRow]) -> dict[str, Value]:
    """The chosen value of each key."""
    return {name: row["chosen"] for name, row in rows.items()}


def read(key: Key, text: str) -> Value:
    """One value of its key's type and range. Raises BadWorkload naming the key, the text and what is allowed."""
    if key.kind == "text":
        return text
    if key.kind == "choice":
        if text not in key.choices:
            raise BadWorkload(f"{key.name}={text}: must be one of {', '.join(key.choices)}")
        return text
    try:
        # int() and float() take "1_0" and blanks, which no one means
        if "_" in text or text != text.strip():
            raise ValueError(text)
        value: int | float = int(text) if key.kind == "int" else float(text)
    except ValueError:
        kind = "a whole number" if key.kind == "int" else "a number"
        raise BadWorkload(f"{key.name}={text}: must be {kind}") from None
    _require_within(key, value, text)
    return value


def _require_within(key: Key, value: float, text: str) -> None:
    low, high = key.low, key.high
    if not isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        raise BadWorkload(f"{key.name}={text}: must be within {_bound(low, '-inf')} and {_bound(high, 'inf')}")


def _bound(limit: float | None, otherwise: str) -> str:
    return otherwise if limit is None else f"{limit:g}"


def _hint(word: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(word, known, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{meant}; known: {', '.join(sorted(known))}"
