"""The seal, the chain of runs, and documents on disk."""

from __future__ import annotations

import json
import os
import random
import re
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from schemas import store
from schemas.document import reading, tally
from schemas.form import Unfaithful, parse, render
from schemas.seal import append_run, canonical_digest, locator, seal, verify
from worlds import CASES, compiled, fleet, recorded_plan, run_of


@pytest.fixture(scope="module")
def plan() -> dict:
    base = compiled()
    return append_run(append_run(base, run_of(base)), run_of(base, id="run-2"))


def _message(data: bytes) -> str:
    with pytest.raises(Unfaithful) as caught:
        store.loads(data, "dormouse.plan", "plan.json")
    return str(caught.value)


def test_a_plan_with_runs_is_read_back_whole(plan: dict) -> None:
    assert store.loads(render(plan), "dormouse.plan", "plan.json") == parse(render(plan), "x")


def test_a_number_with_more_digits_than_are_kept_is_sealed_as_it_is_kept() -> None:
    curve = [[65536, 9.7920001e-06], [131072, 1 / 3]]
    body = {
        "format": "dormouse.record",
        "nodes": {"n": {"loopback_curve": reading(curve, "", "benchmarked", "w")}},
        "devices": {},
        "x": [2 / 3],
    }
    sealed = seal(body)
    assert parse(render(sealed), "x") == sealed
    verify(parse(render(sealed), "x"), "x")
    base = compiled()
    run = run_of(base, evaluations=[{"step": 1, "bits_per_byte": 1 / 3}], final_loss=2 / 3)
    store.loads(render(append_run(base, run)), "dormouse.plan", "plan.json")


def test_any_one_byte_changed_is_found_and_placed(plan: dict) -> None:
    data, draw = render(plan), random.Random(0)
    for place in draw.sample(range(len(data)), 250):
        other = draw.choice([byte for byte in b'07x "{,' if byte != data[place]])
        message = _message(data[:place] + bytes([other]) + data[place + 1 :])
        assert re.match(r"plan\.json: (line \d+|byte \d+|/)", message), message


def test_a_changed_digit_is_traced_to_its_line(plan: dict) -> None:
    lines = render(plan).decode().split("\n")
    number = next(place for place, line in enumerate(lines) if line.lstrip().startswith('"masters"'))
    lines[number] = re.sub(r'"value": \d', '"value": 9', lines[number])
    assert f"line {number + 1}: was changed after sealing" in _message("\n".join(lines).encode())


def test_a_changed_measurement_is_traced_to_its_run_and_line(plan: dict) -> None:
    lines = render(plan).decode().split("\n")
    number = [place for place, line in enumerate(lines) if '"instrument"' in line][-1]
    lines[number] = lines[number].replace('"samples": 18', '"samples": 19')
    assert f"/runs/1: line {number + 1}: was changed after recording" in _message("\n".join(lines).encode())


@pytest.mark.parametrize(
    ("pointer", "value", "says"),
    [
        ("/counts/fallbacks", 3, "/counts/fallbacks: says 3; the body holds 1"),
        ("/counts/dtype/bf16", 1, "/counts/dtype: says"),
        ("/ranks/0/step/compute/weakest", "probed", "/ranks/0/step/compute: says its weakest basis is probed"),
        ("/ranks/0/step/compute/inputs/0", "/ranks/9", "/ranks/0/step/compute: its input /ranks/9 names nothing"),
        ("/ranks/0/kernels/kda/inputs", ["/toolchain/none"], "/ranks/0/kernels/kda: its input /toolchain/none names"),
        ("/ranks/0/surprise", 1, "/ranks/0: Additional properties are not allowed"),
        ("/ranks/0/dtype/outcome", "hoped", "/ranks/0/dtype/outcome: 'hoped' is not one of"),
        ("/ranks/0/batch/chosen", "four", "/ranks/0/batch/chosen: 'four' is not of type 'integer'"),
        ("/workload/steps/chosen", -5, "/workload/steps/chosen: -5 is less than the minimum of 1"),
        ("/ranks/0/threads/chosen", 100000, "/ranks/0/threads/chosen: 100000 is greater than the maximum"),
        ("/ranks/0/dtype/chosen", "fp8", "/ranks/0/dtype/chosen: 'fp8' is not one of"),
        ("/exchange/bucket_bytes/chosen", 0, "/exchange/bucket_bytes/chosen: 0 is less than the minimum"),
        ("/exchange/owners/chosen", [5] * 48, "/exchange/owners: names no rank: 5"),
        ("/exchange/backend/chosen", "none", "/exchange/backend: 2 ranks on cpu have no none"),
        ("/exchange/backend/chosen", "nccl", "/exchange/backend: 2 ranks on cpu have no nccl"),
        ("/ranks/0/members", [0, 2], "/ranks: the members are not the ranks 0 to 1, each once"),
        ("/ranks/0/devices", ["cpu-0", "cpu-7"], "/ranks/0/devices: names no device of the fleet: cpu-7"),
        ("/ranks/0/devices", ["cpu-0"], "/ranks/0/devices: has not one device for each of the members"),
        ("/ranks/0/memory/peak/value", "much", "/ranks/0/memory/peak: much is not a number from 0"),
        ("/ranks/0/memory/peak/value", -1, "/ranks/0/memory/peak: -1 is not a number from 0"),
        ("/ranks/0/memory/peak/value", 1, "/ranks/0/memory/peak: is not within its own range, "),
        ("/ranks/0/memory/peak/low", 1e300, "/ranks/0/memory/peak: its range is not one of numbers from 1e-30 to"),
        ("/ranks/0/capability/bf16/value", 1, "/ranks/0/capability/bf16: 1 is not true or false"),
        ("/ranks/0/rates/products/value", 0, "/ranks/0/rates/products: 0 is not a number above 0"),
        ("/ranks/0/tokens/value", 0.5, "/ranks/0/tokens: 0.5 is not a whole number from 1"),
        ("/fleet/devices/cpu-0/cores/value", True, "/fleet/devices/cpu-0/cores: True is not a whole number from 1"),
        ("/fleet/devices/cpu-0/name/value", [], "/fleet/devices/cpu-0/name: [] is not a text"),
        ("/toolchain/torch/value", 2.13, "/toolchain/torch: 2.13 is not a text"),
        ("/format_version", 2, "/format_version: 2 is newer than this Dormouse reads (up to 1)"),
        ("/format_version", 0, "/format_version: 0 is no version"),
        ("/format", "dormouse.record", "/format: is a dormouse.record document; dormouse.plan was expected"),
        ("/format", "terraform", "/format: is not a Dormouse document"),
    ],
)
def test_a_lie_under_a_seal_of_its_own_is_still_found(pointer: str, value: object, says: str) -> None:
    """The liar seals his work: only what the seal itself does not compute is left to find."""
    forged = json.loads(render(compiled()))
    *folders, last = pointer.split("/")[1:]
    place = forged
    for key in folders:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    body = {key: item for key, item in forged.items() if key not in ("seal", "runs")}
    if not pointer.startswith(("/counts", "/format")):
        with suppress(Unfaithful, KeyError):
            body["counts"] = forged["counts"] = tally(body)
    forged["seal"] = {"digest": canonical_digest(body), "locator": locator(body)}
    assert says in _message(render(forged))


def test_a_run_that_quotes_another_prediction_is_found(plan: dict) -> None:
    base = compiled()
    run = run_of(base)
    run["measured"]["/step/seconds"]["predicted"] = 0.001
    message = _message(render(append_run(base, run)))
    assert "/runs/0/measured: /step/seconds: predicted 0.001, but the plan says" in message


@pytest.mark.parametrize(
    ("part", "label", "says"),
    [
        ("measured", "/ranks", "/ranks names nothing in the plan that a run could measure"),
        ("absent", "/step/nothing", "/step/nothing names nothing in the plan that a run could measure"),
        ("measured", "/ranks/0/step/compute @7", "/ranks/0/step/compute @7 is of no rank that the plan has there"),
        ("measured", "/ranks/0/step/compute", "/ranks/0/step/compute is of no rank that the plan has there"),
        ("absent", "/step/seconds @0", "/step/seconds @0 is of no rank that the plan has there"),
        ("measured", "/step/seconds", "/step/seconds: fast is not a number from 0"),
    ],
)
def test_a_run_measures_what_the_plan_has_on_the_rank_that_has_it(part: str, label: str, says: str) -> None:
    base = compiled()
    run = run_of(base)
    line = {**run["measured"]["/step/seconds"], "value": "fast"}
    run[part] = {label: line if part == "measured" else "not timed"}
    assert f"/runs/0/{part}: {says}" in _message(render(append_run(base, run)))


@pytest.mark.parametrize(
    ("pointer", "value", "says"),
    [
        ("/devices/GPU-0/rate_bf16", -1e12, "-1000000000000.0 is not a number above 0"),
        ("/devices/GPU-0/sm", "eight", "eight is not a compute capability, as in 8.6"),
        ("/devices/GPU-0/pcie_width_current", 1e6, "1000000.0 is not a whole number from 1 to 64"),
        ("/toolchain/arch_list", ["8.6", 9], "['8.6', 9] is not a list of compute capabilities"),
        ("/nodes/node-5bce98f7/loopback_curve", [[2, 1.0], [1, 2.0]], "is not a curve of two numbers a row"),
    ],
)
def test_a_record_whose_numbers_are_none_is_found(pointer: str, value: Any, says: str) -> None:
    made = fleet(1e14)
    (node,) = made["nodes"]
    *folders, last = pointer.replace("node-5bce98f7", node).split("/")[1:]
    place = made
    for key in folders:
        place = place[key]
    place[last] = reading(value, "", "declared", "made up")
    with pytest.raises(Unfaithful, match=re.escape(says)):
        verify(seal(made), "record.json")


def test_a_record_whose_devices_are_of_no_node_or_of_uneven_ones_is_found() -> None:
    made = fleet(1e14)
    made["devices"]["GPU-0"]["node"] = "node-00000000"
    with pytest.raises(Unfaithful, match="/devices/GPU-0/node: names no node: node-00000000"):
        verify(seal(made), "record.json")
    made = fleet(1e14)
    for node in made["nodes"].values():
        node["members"] = ["node-00000000", "node-00000001"]
    with pytest.raises(Unfaithful, match="/devices/GPU-0/ids: are not as many on each of the node's members"):
        verify(seal(made), "record.json")


def test_a_run_taken_out_of_the_middle_is_found(plan: dict) -> None:
    shortened = {**plan, "runs": plan["runs"][1:]}
    assert "/runs/0/previous: does not follow what stands before it" in _message(render(shortened))


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "binary"])
def test_what_is_no_document_on_disk_gets_one_message(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("empty", "binary"):
        path.write_bytes(b"" if kind == "empty" else os.urandom(1000))
    with pytest.raises(Unfaithful, match=re.escape(str(path))):
        store.load(path)


def test_recording_through_a_symbolic_link_keeps_the_link_and_the_file(plan: dict, tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "plan.json", tmp_path / "plan.json"
    real.parent.mkdir()
    base = compiled()
    store.write(real, base)
    real.chmod(0o640)
    link.symlink_to(real)
    store.record(link, base, run_of(base))
    assert link.is_symlink() and len(store.load(link)["runs"]) == 1
    assert real.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in real.parent.iterdir()] == ["plan.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, base = tmp_path / "plan.json", compiled()
    store.write(path, base)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.record(path, base, run_of(base))
    monkeypatch.undo()
    assert store.load(path)["runs"] == [] and list(tmp_path.iterdir()) == [path]


def test_a_run_that_could_not_be_read_back_is_not_written_over_the_plan(tmp_path: Path) -> None:
    path, base = tmp_path / "plan.json", compiled()
    store.write(path, base)
    with pytest.raises(Unfaithful, match=r"/runs/0/steps: 'many' is not of type"):
        store.record(path, base, run_of(base, steps="many"))
    assert store.load(path)["runs"] == []


def test_a_plan_replaced_meanwhile_is_not_recorded_into(tmp_path: Path) -> None:
    path, base = tmp_path / "plan.json", compiled()
    store.write(path, compiled(seed=1))
    with pytest.raises(Unfaithful, match="was replaced while its run went on"):
        store.record(path, base, run_of(base))


def _record(arguments: tuple[str, str]) -> None:
    path, identity = arguments
    base = store.load(path)
    store.record(path, base, run_of(base, id=identity))


def test_recorders_at_the_same_time_lose_no_run(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    store.write(path, compiled())
    with get_context("fork").Pool(4) as pool:
        pool.map(_record, [(str(path), f"run-{place}") for place in range(12)])
        pool.close()
        pool.join()  # of themselves: what another test left to hear signals may be deaf to that of a pool's end
    assert {run["id"] for run in store.load(path)["runs"]} == {f"run-{place}" for place in range(12)}


def test_a_run_adds_one_hunk_of_lines_to_the_file(plan: dict) -> None:
    before = render(recorded_plan()).decode().split("\n")
    after = render(recorded_plan(run_of(compiled()))).decode().split("\n")
    same = next(place for place, line in enumerate(before) if line != after[place])
    tail = len(before) - 1 - same
    assert before[same] == '  "runs": []' and before[-tail:] == after[-tail:]


def test_an_unwritable_place_is_found_before_the_run(tmp_path: Path) -> None:
    assert store.unwritable_reason(tmp_path / "plan.json") is None
    assert "takes no file" in (store.unwritable_reason(tmp_path / "nowhere" / "plan.json") or "")


def test_a_place_is_unwritable_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, sizes = compiled(), []

    def full(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "(No space left on device)" in (store.unrecordable_reason(tmp_path / "plan.json", base) or "")
    assert sizes == [len(render(base)) + 256 * 1024] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["immutable", "a folder"])
def test_a_plan_that_cannot_be_written_is_found_before_the_run(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.mkdir() if way == "a folder" else path.touch()
    opened = os.open

    def refuse(name: Any, flags: int, *more: Any, **named: Any) -> int:
        if way == "immutable" and flags & os.O_RDWR and str(name) == str(path):
            raise PermissionError(1, "Operation not permitted")
        return opened(name, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    said = {"immutable": "Operation not permitted", "a folder": "Is a directory"}[way]
    assert store.unwritable_reason(path) == f"{path} cannot be written ({said})"


def test_a_plan_that_is_a_mount_point_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my plan.json"
    path.touch()
    row = f"36 35 98:0 /x {tmp_path}/my\\040plan.json rw,noatime - ext4 /dev/sda rw"
    monkeypatch.setattr(store, "MOUNTS", tmp_path / "mountinfo")
    store.MOUNTS.write_text(f"{row}\n")
    assert "is a mount point" in (store.unwritable_reason(path) or "")
    assert store.unwritable_reason(tmp_path / "plan.json") is None


def test_another_plan_and_what_is_no_plan_are_found_before_the_run(tmp_path: Path) -> None:
    base, path = compiled(), tmp_path / "plan.json"
    assert store.unrecordable_reason(path, base) is None
    store.write(path, compiled(seed=1))
    assert "holds another plan (seal " in (store.unrecordable_reason(path, base) or "")
    store.write(path, append_run(base, run_of(base)))
    assert store.unrecordable_reason(path, base) is None
    path.write_text("{}")
    with pytest.raises(Unfaithful):
        store.unrecordable_reason(path, base)


def test_where_no_plan_lies_the_run_is_recorded_in_a_new_one(tmp_path: Path) -> None:
    path, base = tmp_path / "plan.json", compiled()
    store.record(path, append_run(base, run_of(base)), run_of(base, id="run-2"))
    assert [run["id"] for run in store.load(path)["runs"]] == ["run-1", "run-2"]


@pytest.mark.parametrize("version", [1, 2])
def test_an_account_of_an_earlier_version_is_still_read(version: int) -> None:
    read = store.load(CASES / "accounts" / f"tiny-{version}.json", "dormouse.account")
    assert read["format_version"] == version


@pytest.mark.parametrize("path", sorted((CASES.parent.parent / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_a_plan_that_was_kept_with_its_runs_is_still_read(path: Path) -> None:
    assert store.load(path)["runs"]
