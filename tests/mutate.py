"""Documents changed at random, with a sense of what they hold, read by every command that reads them.

Each mutant is read unchanged in meaning, or ends with exit code 2 or 3 and one message: no traceback, no hang. By hand:
``python tests/mutate.py 10000``; a sample runs with the tests (test_mutations.py).

An account is not sealed anew: it never comes from others, but from a process that the command starts, or from the
user's own cache; its seal is held to be whole, and what is sealed is believed.

A mutant is made of a faithful document (a plan, a record or an account) by a few changes to its tree, and then mostly
sealed anew, since whoever can change a plan can seal it; or by a few changes to its bytes.
"""

from __future__ import annotations

import copy
import io
import json
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import handmade
import worlds
from executor import __main__ as runner
from executor import launch
from executor.models.presets import B1, MEDIUM, SMALL, TINY
from executor.slices import data_slice, exchange_slice, rank_slice, work_slice, world_size
from executor.workloads import require_settled
from executor.workloads import resolve as resolve_workload
from planner import __main__ as front
from planner.door import BadWorkload
from planner.refusals.of_runs import entry_of
from planner.refusals.rules import refuse
from schemas import store
from schemas.document import resolve, tally, weakest_bases
from schemas.form import Unfaithful, render
from schemas.seal import append_run, canonical_digest, locator
from schemas.store import load

PRESETS = {workload.name: workload for workload in (TINY, SMALL, MEDIUM, B1)}
HERE = Path(__file__).resolve().parent
DEADLINE_SECONDS = 30

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 4096, 2**31, 2**53 - 1, 2**53, -(2**53), 0.5, -0.5, 1e-320, 1e29, 1e308, -1e308,
    1e400, float("nan"), "", " ", "x", "0", "fp16", "auto", "cuda", "cpu", "9.9", "..", "../../etc/passwd", "os:system",
    "\x00", "\x1b[31m", "\n\n", "a" * 5000, "\u202e\u2066", "\ud800", "\U0001f42d", "[bold]", "~1", "/ranks/0", "/",
    "1e400", [], {}, [None], [[]], [0, 0], ["x"], [[1, 2], [3]], {"x": 1}, [True], [-1], [2**53] * 3, {"value": 1},
    {"": None},
)  # fmt: skip
"""What stands in the place of a value."""

SEALED_ANEW = ("plan", "record")

BYTES: tuple[bytes, ...] = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\n", b" ", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u",
    b"\\ud800", b"1e400", b"-", b"NaN", b"Infinity", b"9" * 400, b"9" * 5000, b"[" * 40, b"[" * 100_000, b'{"a":' * 40,
    b"0", b"1.", b"e", b'"format": "dormouse.record",', b'"runs": [],', b"null", b"//", b"\xed\xa0\x80", b"\xc0\x80",
    b"\xe2\x80\xa8",
)  # fmt: skip
"""What is put between bytes."""


@dataclass(frozen=True)
class Mutant:
    """The bytes of a changed document, and how it was changed."""

    kind: str
    data: bytes
    how: str


def originals() -> dict[str, tuple[dict[str, Any], ...]]:
    """Faithful documents by kind: recorded, measured on cards, made by hand; with runs and without."""
    plans = [load(path) for path in sorted((HERE / "cases" / "plans").glob("*.json"))]
    plans += [load(path) for path in sorted((HERE.parent / "plans").glob("*.json"))]
    base = worlds.compiled()
    plans += [handmade.plan(), append_run(append_run(base, worlds.run_of(base)), worlds.run_of(base, id="run-2"))]
    records = [load(path, "dormouse.record") for path in sorted((HERE / "cases" / "records").glob("*.json"))]
    records += [worlds.fleet(1e14, 2e13), worlds.cluster(2, 2)]
    accounts = [load(HERE / "cases" / "accounts" / name, "dormouse.account") for name in ("tiny.json", "b1.json")]
    return {"plan": tuple(plans), "record": tuple(records), "account": tuple(accounts)}


# --- changes to the tree ---


@cache
def _of_type(kind: type) -> tuple[Any, ...]:
    return tuple(value for value in NASTY if type(value) is kind)


def _alike(value: Any) -> tuple[Any, ...]:
    """What could stand in the place of ``value`` by its type."""
    return _of_type(type(value)) or NASTY


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in ``node``, from the outside in."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _set(holder: Any, key: Any, value: Any, _: st.DataObject) -> None:
    holder[key] = value


def _tweak(holder: Any, key: Any, value: Any, data: st.DataObject) -> None:
    old = holder[key]
    if isinstance(old, bool) or not isinstance(old, int | float):
        holder[key] = value
        return
    changed = data.draw(st.sampled_from((old + 1, old - 1, -old, old * 2, old * 10**9, old / 3, 1.0 * old, 0)))
    holder[key] = changed if abs(changed) < 2**53 or isinstance(changed, float) else float(changed)


def _remove(holder: Any, key: Any, value: Any, _: st.DataObject) -> None:
    del holder[key]


def _double(holder: Any, key: Any, value: Any, _: st.DataObject) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}_2"] = copy.deepcopy(holder[key])


def _rename(holder: Any, key: Any, value: Any, _: st.DataObject) -> None:
    if isinstance(holder, dict):
        holder[value if isinstance(value, str) else json.dumps(value)] = holder.pop(key)
    else:
        holder.reverse()


def _wrap(holder: Any, key: Any, value: Any, _: st.DataObject) -> None:
    holder[key] = [holder[key]]


def _from_elsewhere(holder: Any, key: Any, value: Any, data: st.DataObject, document: Any = None) -> None:
    others = list(places(document))
    holder[key] = copy.deepcopy(_at(document, data.draw(st.sampled_from(others))))


CHANGES: tuple[Callable[..., None], ...] = (_set, _tweak, _remove, _double, _rename, _wrap, _from_elsewhere)


_SEALED = ("format", "format_version", "counts", "seal")


def reseal(document: Any, rebase: bool) -> None:
    """Seal ``document`` anew as far as it still can be: counts, weakest bases where ``rebase``, seal, and runs."""
    with suppress(Exception):
        for pointer, basis in weakest_bases(document).items() if rebase else ():
            resolve(document, pointer)["weakest"] = basis
        body = {key: value for key, value in document.items() if key not in ("seal", "runs")}
        body["counts"] = document["counts"] = tally(body)
    with suppress(Exception):
        body = {key: value for key, value in document.items() if key not in ("seal", "runs")}
        document["seal"] = {"digest": canonical_digest(body), "locator": locator(body)}
    with suppress(Exception):
        runs, document["runs"] = document["runs"], []
        for run in runs:
            bare = {key: item for key, item in run.items() if key not in ("previous", "digest", "locator")}
            for label, line in bare["measured"].items():
                with suppress(Exception):
                    item = resolve(document, label.split(" @")[0])
                    line["predicted"] = item.get("value", item.get("chosen"))
                    line.update({end: item[end] for end in ("low", "high") if end in item})
            document["runs"] = append_run(document, bare)["runs"]


def _rendered(document: Any) -> bytes:
    """The one form; where the mutant has none (NaN, lone surrogates), what comes nearest."""
    try:
        return render(document)
    except Exception:
        return json.dumps(document, indent=2).encode("utf-8", "surrogatepass")


def changed_tree(kind: str, document: Any, data: st.DataObject) -> Mutant:
    """Up to three changes anywhere; mostly sealed anew."""
    mutant, told = copy.deepcopy(document), []
    for _ in range(data.draw(st.integers(1, 3))):
        change = data.draw(st.sampled_from(CHANGES))
        # A section first, so that the many lines of a large one do not draw all the changes.
        rarely = () if not data.draw(st.integers(0, 9)) else ("format", "format_version")
        sections = [key for key in mutant if key not in rarely]
        if not sections:
            break
        section = data.draw(st.sampled_from(sections))
        path = data.draw(st.sampled_from([(section,), *places(mutant[section], (section,))]))
        value = data.draw(st.sampled_from(_alike(_at(mutant, path)) if data.draw(st.booleans()) else NASTY))
        told.append(f"{change.__name__} /{'/'.join(map(str, path))} {value!r:.60}")
        extra = {"document": mutant} if change is _from_elsewhere else {}
        change(_at(mutant, path[:-1]), path[-1], copy.deepcopy(value), data, **extra)
    if kind in SEALED_ANEW and data.draw(st.integers(0, 9)):
        reseal(mutant, rebase=data.draw(st.booleans()))
    return Mutant(kind, _rendered(mutant), "; ".join(told))


def changed_values(kind: str, document: Any, data: st.DataObject) -> Mutant:
    """What readings and decisions say, and the plain values beside them: by another of their type, or another item of
    the document. Sealed anew, so that what the form and the seal cannot find is left to be found."""
    mutant, told = copy.deepcopy(document), []
    for _ in range(data.draw(st.integers(1, 3))):
        leaves = [path for path in places(mutant) if path[0] not in _SEALED and not isinstance(_at(mutant, path), dict)]
        items = [path for path in leaves if path[-1] in ("value", "chosen")]
        path = data.draw(st.sampled_from(items if data.draw(st.booleans()) else leaves))
        if path in items and not data.draw(st.integers(0, 3)):
            other = data.draw(st.sampled_from(items))
            _at(mutant, path[:-2])[path[-2]] = copy.deepcopy(_at(mutant, other[:-1]))
            told.append(f"/{'/'.join(map(str, path[:-1]))} as /{'/'.join(map(str, other[:-1]))}")
            continue
        value = data.draw(st.sampled_from(NASTY if not data.draw(st.integers(0, 3)) else _alike(_at(mutant, path))))
        _tweak(_at(mutant, path[:-1]), path[-1], copy.deepcopy(value), data)
        told.append(f"/{'/'.join(map(str, path))} := {value!r:.60}")
    if kind in SEALED_ANEW:
        reseal(mutant, rebase=True)
    return Mutant(kind, _rendered(mutant), "; ".join(told))


# --- changes to the bytes ---


def changed_bytes(kind: str, document: Any, data: st.DataObject) -> Mutant:
    text, told = bytearray(render(document)), []
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, max(0, len(text) - 1)))
        what = data.draw(st.sampled_from(("flip", "cut", "drop", "put", "repeat", "swap")))
        told.append(f"{what} at byte {where}")
        if what == "flip" and text:
            text[where] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del text[where:]
        elif what == "drop":
            del text[where : where + data.draw(st.integers(1, 40))]
        elif what == "put":
            text[where:where] = data.draw(st.sampled_from(BYTES))
        else:
            lines = text.split(b"\n")
            one, other = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            if what == "repeat":
                lines.insert(one, lines[other])
            else:
                lines[one], lines[other] = lines[other], lines[one]
            text = bytearray(b"\n".join(lines))
    return Mutant(kind, bytes(text), "; ".join(told))


_ORIGINALS: dict[str, tuple[dict[str, Any], ...]] = {}


def draw(data: st.DataObject, kinds: tuple[str, ...] = ("plan", "plan", "plan", "record", "account")) -> Mutant:
    """One mutant; plans are most of them."""
    if not _ORIGINALS:
        _ORIGINALS.update(originals())
    kind = data.draw(st.sampled_from(kinds))
    document = data.draw(st.sampled_from(_ORIGINALS[kind]))
    how = data.draw(st.sampled_from((changed_values, changed_values, changed_tree, changed_bytes)))
    return how(kind, document, data)


# --- what reads them ---


THOROUGH = settings(phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Fault(AssertionError):
    """A command that did not keep to its word about a mutant."""


@contextmanager
def _limited(what: str) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Fault(f"{what}: not done after {DEADLINE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ran(main: Callable[[list[str]], int], arguments: list[str], codes: tuple[int, ...]) -> tuple[int, str, str]:
    """(code, stdout, stderr) of a command run here, which ends with one of ``codes``: 0 and no message of a fault, or
    another and one message."""
    what = " ".join(arguments)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
    with _limited(what), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except Fault:
            raise
        except BaseException:
            raise Fault(f"{what}: {traceback.format_exc()}") from None
    out.flush(), err.flush()
    said, told = out.buffer.getvalue().decode("utf-8", "replace"), err.buffer.getvalue().decode("utf-8", "replace")
    told = re.sub(r"^dormouse: starting the plan's \d+ ranks\n", "", told)
    messages = [line for line in told.splitlines() if line.startswith(("dormouse", "refused"))]
    if code not in codes or "Traceback" in said + told:
        raise Fault(f"{what}: ended with {code}: {told or said}")
    if code == 2 and (len(messages) != 1 or len(told.splitlines()) != 1 or said or len(told) > 2000):
        raise Fault(f"{what}: {len(told.splitlines())} lines for one mistake, or one that is no message: {told[:3000]}")
    if code == 3 and ("refused (" not in told or "to fix:" not in told):
        raise Fault(f"{what}: no refusal in its words: {told}")
    return code, said, told


def read_plan(path: Path) -> None:
    """The plan at ``path`` by `verify`, `show`, `diff`, the executor's start, and as what to calibrate by."""
    text = str(path)
    code, _, told = _ran(front.main, ["verify", text], (0, 2))
    CODES[f"plan {code}"] += 1
    if code == 0 and render(load(path)) != path.read_bytes():
        raise Fault(f"verify {text}: what is read means something else than what is there")
    good = str(path.with_name("good.json"))
    several = [["show", text], ["diff", text], ["diff", text, "--format", "json"], ["diff", good, text],
               ["diff", text, good, "--format", "markdown"], ["diff", text, "--fail-over", "step=5"]]  # fmt: skip
    for arguments in several if code == 0 else several[:1]:
        found = _ran(front.main, arguments, (0, 1, 2) if "--fail-over" in arguments else (0,) if code == 0 else (2,))
        if code == 2 and found[2] != told:
            raise Fault(f"{arguments}: another message than verify's: {found[2]}")
    _ran(_executor, [text], (0, 2, 3) if code == 0 else (2,))
    if code == 0 and load(path)["runs"]:
        with _planning(None):
            _ran(front.main, ["--devices", "cpu:2", "--model", "tiny", "--calibrate", text], (0, 2, 3))


def read_record(path: Path) -> None:
    """The record at ``path`` as the machine to plan for, alone and beside another."""
    with _planning(None):
        code, said, _ = _ran(front.main, ["--devices", str(path), "--model", "tiny", "--fit", "16"], (0, 2, 3))
        if code == 0:
            path.with_name("made.json").write_text(said, encoding="utf-8")
            _ran(front.main, ["show", str(path.with_name("made.json"))], (0,))
        other = path.with_name("record.json")
        _ran(front.main, ["--devices", f"{other},{path}", "--model", "tiny"], (0, 2, 3))
    _ran(front.main, ["probe", "--devices", str(path)], (0, 2))


def read_account(path: Path) -> None:
    """The account at ``path`` as what a model's process gave."""
    with _planning(path.read_bytes()):
        code, said, _ = _ran(front.main, ["--devices", str(path.with_name("record.json")), "--fit", "16"], (0, 2, 3))
    if code == 0:
        path.with_name("made.json").write_text(said, encoding="utf-8")
        _ran(front.main, ["show", str(path.with_name("made.json"))], (0,))


@contextmanager
def _planning(account: bytes | None) -> Iterator[None]:
    """The command line plans by the ``account`` given, or by the recorded one of tiny, in a process without torch."""
    from planner import accounts

    data = account or (HERE / "cases" / "accounts" / "tiny.json").read_bytes()
    with mock.patch.object(accounts, "_cached_at", lambda *_: None), mock.patch.object(
        accounts, "_subprocess", lambda *_: data
    ):  # fmt: skip
        yield


def _executor(arguments: list[str]) -> int:
    """The executor's command to where a run would begin: what it is started for, and every fact judged at the start."""
    with mock.patch.object(runner, "_listen"), mock.patch.object(launch, "attach"), mock.patch.object(
        launch, "start", lambda ranks, threads, given, home: 0
    ), mock.patch.object(runner, "_run", _honoured), mock.patch.object(
        launch, "is_due", lambda ranks, environ: ranks <= 64
    ):  # fmt: skip
        code = runner.main(arguments)
        if code == 0:
            plan = load(arguments[0])
            code = _honoured(plan, None)
        return code


def _honoured(plan: dict[str, Any], options: Any) -> int:
    """Every rank's slices, and the judgement of facts that are as planned: what is found cannot be at fault here."""
    from planner.refusals.rules import Refused

    ranks, work = range(min(world_size(plan), 8)), work_slice(plan)
    exchange_slice(plan)
    try:
        if work.model in PRESETS:
            require_settled(PRESETS[work.model], work.config, work.model)
        elif ":" not in work.model:
            resolve_workload(work.model)
    except BadWorkload as error:
        print(f"dormouse: {error}", file=sys.stderr)
        return 2
    rows = []
    for rank in ranks:
        own, data = rank_slice(plan, rank), data_slice(plan, rank)
        assert data.offset + data.batch <= data.global_batch and 0 < data.token_weight <= 1
        device = plan["fleet"]["devices"][_key(plan, own.device)]
        facts = {key: item["value"] for key, item in device.items() if isinstance(item, dict)}
        found = {"id": own.device, "kind": own.kind, "memory_free": 2**33, "memory_total": 2**40, "cores": 8, **facts}
        chain = {name: item["value"] for name, item in plan["toolchain"].items()}
        sources = [
            {"name": row["name"], "length": row["length"]["value"] or 1, "sha256": row["sha256"]["value"] or "0" * 64}
            for row in plan["workload"]["data"]["sources"]
        ]
        row = {"rank": rank, "seal": plan["seal"]["digest"], "device": found, "toolchain": chain, "data": sources}
        row |= {"workload_digest": plan["workload"]["digest"], "room": {"at": "runs", "free": 0, "held": 0}}
        rows.append(row)
    facts = {"world_size": world_size(plan), "rank": 0, "ranks": rows, "record_unwritable": None}
    smoke = [_smoke(rank, entry_of(plan, rank)) for rank in ranks]
    try:
        refuse("start", plan, facts)
        refuse("running", plan, {"smoke": smoke})
    except Refused as error:
        print(error.text(), file=sys.stderr)
        return 3
    return 0


def _smoke(rank: int, entry: dict[str, Any]) -> dict[str, Any]:
    ran = {name: item["chosen"] for name, item in entry["kernels"].items()}
    row = {"rank": rank, "error": None, "unused": [], "nonfinite": [], "dtype": entry["dtype"]["chosen"]}
    return {**row, "kernels": ran}


def _key(plan: dict[str, Any], identity: str) -> str:
    return next(key for key, item in plan["fleet"]["devices"].items() if identity in item["ids"])


CODES: Counter[str] = Counter()
READERS: dict[str, Callable[[Path], None]] = {"plan": read_plan, "record": read_record, "account": read_account}


def _loaded_once() -> Callable[..., Any]:
    """`store.loads`, but what several commands are given is proved once."""
    plain, found = store.loads, {}

    def loads(data: bytes, kind: str, name: str) -> Any:
        if (data, kind, name) not in found:
            try:
                found[data, kind, name] = plain(data, kind, name)
            except Unfaithful as error:
                found[data, kind, name] = error
        if isinstance(found[data, kind, name], Unfaithful):
            raise Unfaithful(str(found[data, kind, name]))
        return found[data, kind, name]

    return loads


def judge(mutant: Mutant, folder: Path) -> None:
    """Raise Fault where a command does not keep to its word about ``mutant``."""
    good, record = folder / "good.json", folder / "record.json"
    if not good.exists():
        good.write_bytes(render(worlds.compiled()))
        record.write_bytes(render(worlds.fleet(1e14, 2e13)))
    path = folder / f"{mutant.kind}_mutant.json"
    path.write_bytes(mutant.data)
    try:
        with mock.patch.object(store, "loads", _loaded_once()):
            READERS[mutant.kind](path)
    except Fault as fault:
        raise Fault(f"{mutant.kind} ({mutant.how}): {fault}") from None
    except Unfaithful as error:
        raise Fault(f"{mutant.kind} ({mutant.how}): {error}") from None


def main(arguments: list[str]) -> int:
    """Judge so many mutants from a seed on, and tell each kind of fault once, keeping a mutant of it."""
    count, number = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    faults: dict[str, str] = {}
    judged: Counter[str] = Counter()
    kept = Path(tempfile.mkdtemp(prefix="mutants-"))

    @seed(number)
    @settings(THOROUGH, max_examples=count)
    @given(st.data())
    def all_of_them(data: st.DataObject) -> None:
        mutant = draw(data)
        judged[mutant.kind] += 1
        try:
            judge(mutant, Path(folder))
        except Fault as fault:
            name = _class(str(fault))
            if name not in faults:
                faults[name] = str(fault)
                (kept / f"{len(faults):03}-{mutant.kind}.json").write_bytes(mutant.data)
                print(f"--- {len(faults)}: {str(fault)[:300]}\n   ...{str(fault)[-700:]}", flush=True)
        if judged.total() % 500 == 0:
            print(f"{judged.total()} mutants, {len(faults)} kinds of fault", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        all_of_them()
    print(f"{judged.total()} mutants {dict(judged)}, of which plans were read {dict(CODES)}")
    print(f"{len(faults)} kinds of fault" + (f", kept in {kept}" if faults else ""))
    return bool(faults)


def _class(text: str) -> str:
    """What makes two faults alike: the last place of a traceback, or how the message begins."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else text.partition("): ")[2][:60]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
