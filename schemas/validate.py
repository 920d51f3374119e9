"""Validation of an artifact against its JSON Schema (draft 2020-12, closed: unknown keys fail)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry, Resource

from schemas.form import Json, Unfaithful

# The format versions that this Dormouse reads, and the schema of each. A version is never dropped from here.
SCHEMAS: dict[str, dict[int, str]] = {
    "dormouse.plan": {1: "plan.schema.json"},
    "dormouse.record": {1: "record.schema.json"},
    "dormouse.account": {
        1: "account-1.schema.json",
        2: "account-2.schema.json",
        3: "account-3.schema.json",
        4: "account.schema.json",
    },
    "dormouse.diff": {1: "diff.schema.json"},
}
_SHARED = ("items.schema.json", "request.schema.json")


def refuse_other_kind(document: Json, kind: str, name: str) -> None:
    """Raise Unfaithful unless ``document`` is of format ``kind`` and of a version that this Dormouse reads.

    Identity comes before content: a document of another kind or age is never judged by this one's schema.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if found != kind:
        known = f"a {found} document" if isinstance(found, str) and found in SCHEMAS else "not a Dormouse document"
        raise Unfaithful(f"{name}: /format: is {known}; {kind} was expected")
    version, versions = document.get("format_version"), SCHEMAS[kind]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Unfaithful(f"{name}: /format_version: {json.dumps(version)} is no version (a whole number from 1)")
    if version > max(versions):
        raise Unfaithful(
            f"{name}: /format_version: {version} is newer than this Dormouse reads (up to {max(versions)}): update it"
        )
    if version not in versions:
        raise Unfaithful(f"{name}: /format_version: {version} is older than this Dormouse reads (from {min(versions)})")


def refuse_other_shape(document: Json, name: str) -> None:
    """Raise Unfaithful, naming the pointer, unless ``document`` holds its own format's schema."""
    filename = SCHEMAS[document["format"]][document["format_version"]]
    error = best_match(_validator(filename).iter_errors(document))
    if error is not None:
        raise Unfaithful(f"{name}: {_pointer(error)}: {_said(error)}")


def _pointer(error: ValidationError) -> str:
    return "/" + "/".join(str(token) for token in error.absolute_path)


def _said(error: ValidationError) -> str:
    return error.message if len(error.message) <= 200 else error.message[:197] + "..."


@cache
def _load(filename: str) -> Json:
    return _to_the_end(json.loads(files("schemas").joinpath(filename).read_text(encoding="utf-8")))


def _to_the_end(schema: Json) -> Json:
    """``schema`` with patterns that end where the text does: Python's $ lets a newline follow, JSON Schema's not."""
    if isinstance(schema, list):
        return [_to_the_end(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _to_the_end(part) for key, part in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = _ended(found["pattern"])
    if "patternProperties" in found:
        found["patternProperties"] = {_ended(key): part for key, part in found["patternProperties"].items()}
    return found


def _ended(pattern: str) -> str:
    return pattern.replace("$", r"\Z")  # no pattern here has a dollar sign that is meant as one


@cache
def _validator(filename: str) -> Draft202012Validator:
    shared = [(name, Resource.from_contents(_load(name))) for name in _SHARED]
    registry: Registry[Json] = Registry().with_resources(shared)
    extend: Any = validators.extend  # it is not typed
    remembering = extend(Draft202012Validator, {"$ref": _remembering()})
    validator: Draft202012Validator = remembering(_load(filename), registry=registry)
    return validator


def _remembering() -> Callable[..., Iterator[ValidationError]]:
    """The keyword $ref, but a reading that held once is not judged again: a large fleet repeats few of them often."""
    held: set[str] = set()
    plain = Draft202012Validator.VALIDATORS["$ref"]

    def judge(validator: Any, ref: str, instance: Json, schema: Json) -> Iterator[ValidationError]:
        if not ref.endswith("/$defs/reading"):
            yield from plain(validator, ref, instance, schema)
            return
        text = json.dumps(instance)
        if text not in held:
            errors = list(plain(validator, ref, instance, schema))
            yield from errors
            if not errors and len(held) < 2**16:
                held.add(text)

    return judge
