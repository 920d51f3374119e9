"""The seal over a document's body, the chain over its runs, and the verification of both.

The digest proves that nothing changed. The locator, one 16-bit CRC a line, says where: a CRC-16 finds every burst of up
to 16 bits, so a changed byte is always traced to its line.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping

import rfc8785

from schemas.agreement import refuse_disagreement
from schemas.document import UNSEALED, is_decision, is_reading, resolve, settle, tally, walk, weakest_bases
from schemas.form import Json, Unfaithful, inner_lines, render, rounded
from schemas.kinds import refuse_other_value, refuse_other_values

_CHAIN = ("digest", "locator")
_RUN_LEVEL = 2  # a run is an entry of a list that is a value of the document


def canonical_digest(value: Json) -> str:
    """SHA-256, in hex, of the RFC 8785 canonical bytes of ``value``."""
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()


def seal(body: Mapping[str, Json]) -> dict[str, Json]:
    """``body`` with weakest bases, counts and seal set anew; a plan also gets its empty list of runs."""
    # What is sealed is what will be read back: floats as they are rendered.
    document: dict[str, Json] = rounded({key: value for key, value in body.items() if key not in (*UNSEALED, "counts")})
    document["counts"] = tally(settle(document))
    document["seal"] = {"digest": canonical_digest(document), "locator": locator(document)}
    if document.get("format") == "dormouse.plan":
        document["runs"] = []
    return document


def append_run(plan: Mapping[str, Json], run: Mapping[str, Json]) -> dict[str, Json]:
    """``plan`` with ``run`` chained on: its digest covers itself and, by ``previous``, all before it."""
    runs = list(plan["runs"])
    linked = {**rounded(dict(run)), "previous": runs[-1]["digest"] if runs else plan["seal"]["digest"]}
    linked |= {"digest": canonical_digest(linked), "locator": locator(linked, _RUN_LEVEL)}
    return {**plan, "runs": [*runs, linked]}


def verify(document: Mapping[str, Json], name: str) -> None:
    """Check the seal, the inputs, the counts, the values, the runs and (of a plan) the agreement of a document whose
    schema holds.

    Raises:
        Unfaithful: naming the pointer, the count or the line that does not hold.
    """
    body = {key: value for key, value in document.items() if key not in UNSEALED}
    if canonical_digest(body) != document["seal"]["digest"]:
        raise Unfaithful(f"{name}: {_where_sealed(body, document['seal'])}")
    if locator(body) != document["seal"]["locator"]:
        raise Unfaithful(f"{name}: /seal/locator: was changed; the sealed body is whole")
    _verify_bases(document, name)
    _verify_counts(document, name)
    refuse_other_values(document, name)
    if document.get("format") in ("dormouse.plan", "dormouse.record"):
        refuse_disagreement(document, name)
    _verify_runs(document, name)


def _where_sealed(body: Mapping[str, Json], stored: Mapping[str, str]) -> str:
    line = _changed_line(body, stored["locator"])
    if line is None:
        return "/seal/digest: was changed; no line of the sealed body was"
    return f"line {line + 2}: was changed after sealing (seal {stored['digest'][:12]})"  # line 1 is the opening brace


def _verify_bases(document: Mapping[str, Json], name: str) -> None:
    try:
        bases = weakest_bases(document)
    except Unfaithful as error:
        raise Unfaithful(f"{name}: {error}") from None
    for pointer, item in walk(document):
        for source in item.get("inputs", ()) if is_decision(item) else ():
            try:
                resolve(document, source)
            except KeyError:
                raise Unfaithful(f"{name}: {pointer}: its input {source} names nothing") from None
    for pointer, found in bases.items():
        stated = resolve(document, pointer)["weakest"]
        if stated != found:
            raise Unfaithful(f"{name}: {pointer}: says its weakest basis is {stated}; its inputs say {found}")


def _verify_counts(document: Mapping[str, Json], name: str) -> None:
    counted = tally(document)
    for key in sorted(counted.keys() | document["counts"].keys()):
        stated, found = document["counts"].get(key), counted.get(key)
        if stated != found:
            raise Unfaithful(f"{name}: /counts/{key}: says {stated}; the body holds {found}")


def _verify_runs(document: Mapping[str, Json], name: str) -> None:
    previous = document["seal"]["digest"]
    for place, run in enumerate(document.get("runs", ())):
        where = f"{name}: /runs/{place}"
        linked = {key: value for key, value in run.items() if key not in _CHAIN}
        if run["previous"] != previous:
            raise Unfaithful(f"{where}/previous: does not follow what stands before it ({previous[:12]}...)")
        if canonical_digest(linked) != run["digest"]:
            line = _changed_line(linked, run["locator"], _RUN_LEVEL)
            at = "/digest" if line is None else f": line {_first_line(document, place) + 1 + line}"
            raise Unfaithful(f"{where}{at}: was changed after recording")
        if locator(linked, _RUN_LEVEL) != run["locator"]:
            raise Unfaithful(f"{where}/locator: was changed; the run is whole")
        _verify_labels(document, run, where)
        _verify_predictions(document, run["measured"], where)
        previous = run["digest"]


def _verify_labels(document: Mapping[str, Json], run: Mapping[str, Json], where: str) -> None:
    """Each label of ``run`` is the pointer of a reading or decision, and of a rank's the rank it was measured on."""
    for part in ("measured", "absent"):
        for label in run[part]:
            pointer, _, rank = label.partition(" @")
            try:
                item = resolve(document, pointer)
            except KeyError:
                item = None
            if not (is_reading(item) or is_decision(item)):
                raise Unfaithful(f"{where}/{part}: {label} names nothing in the plan that a run could measure")
            place = pointer.split("/")[1:3]
            members = document["ranks"][int(place[1])]["members"] if place[0] == "ranks" else []
            if rank not in map(str, members or [""]):
                raise Unfaithful(f"{where}/{part}: {label} is of no rank that the plan has there")


def _verify_predictions(document: Mapping[str, Json], measured: Mapping[str, Json], where: str) -> None:
    for label, line in measured.items():
        pointer = label.split(" @")[0]
        item = resolve(document, pointer)
        planned = item["value"] if is_reading(item) else item["chosen"]
        if line["predicted"] != planned or any(line.get(end) != item.get(end) for end in ("low", "high")):
            raise Unfaithful(f"{where}/measured: {label}: predicted {line['predicted']}, but the plan says {planned}")
        if is_reading(item):
            refuse_other_value(line, pointer, f"{where}/measured")


def locator(block: Mapping[str, Json], level: int = 0) -> str:
    """A CRC-16, four hex digits, of each inner line of ``block`` as it stands ``level`` levels deep."""
    return "".join(f"{binascii.crc_hqx(line, 0xFFFF):04x}" for line in inner_lines(block, level))


def _changed_line(block: Mapping[str, Json], stored: str, level: int = 0) -> int | None:
    """The place of the first line of ``block`` that does not have its CRC in ``stored``; None when all have."""
    found = locator(block, level)
    for place in range(0, max(len(found), len(stored)), 4):
        if found[place : place + 4] != stored[place : place + 4]:
            return place // 4
    return None


def _first_line(document: Mapping[str, Json], place: int) -> int:
    """The line of the file on which run number ``place`` opens."""
    lines = render({**document, "runs": list(document["runs"][:place])}).count(b"\n")
    return lines if place == 0 else lines - 1
