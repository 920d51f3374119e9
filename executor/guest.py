"""A user's own code behind the door: which file it is, and whatever it raises told in one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from planner.door import BadWorkload

_HOME = Path(__file__).resolve().parent.parent
# Where the code is nobody's own: Dormouse's rooms and Python's library; what is installed is told by its folder's name.
_NOT_OWN = (*(str(_HOME / room) + os.sep for room in ("executor", "planner", "schemas")),
            sysconfig.get_paths()["stdlib"] + os.sep)  # fmt: skip
_INSTALLED = frozenset({"site-packages", "dist-packages"})

# To set the allocator, which the plan does itself: another setting is refused.
_ADVICE = re.compile(r"\s*\b(If reserved but unallocated|See documentation for Memory Management).*")


def told(error: BaseException) -> str:
    """Type and text of ``error`` in one line, with file and line where a user's own code raised it."""
    place = _raised_at(error)
    return named(error) + (f" ({place})" if place else "")


def named(error: BaseException) -> str:
    """Type and text of ``error`` in one line; of a device that is out of memory torch's numbers without its advice."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    name = type(error).__name__
    return f"{name}: {_ADVICE.sub('', text) if name == 'OutOfMemoryError' else text}"


def _raised_at(error: BaseException) -> str | None:
    """The innermost place in a user's own code that ``error`` passed through."""
    if isinstance(error, SyntaxError):
        return None  # its text names file and line
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}, line {line}" for file, line in places if _is_own(file)]
    return own[-1] if own else None


def _is_own(file: str) -> bool:
    return not (file.startswith(("<", *_NOT_OWN)) or _INSTALLED.intersection(Path(file).parts))


@contextmanager
def guarded(label: str, ours: bool = False) -> Iterator[None]:
    """Run a user's code: it finds modules of the working folder, and what it raises is one BadWorkload that begins with
    ``label``. What Dormouse's own models raise (``ours``) is let through: it is a fault of Dormouse.
    """
    if ours:
        yield
        return
    with _working_folder_last():
        try:
            yield
        except SystemExit as error:  # it would end this process with the user's exit code, as if all were done
            raise BadWorkload(f"{label}: its code ended the process: {told(error)}") from error
        except BadWorkload:
            raise
        except Exception as error:  # the code is the user's: whatever it raises is told in one line
            raise BadWorkload(f"{label}: {told(error)}") from error


def load(name: str, label: str, say: Callable[[str], None] | None = None) -> ModuleType:
    """The user's module ``name``, from the import path or the working folder; ``say`` is told its file beforehand.

    Raises:
        BadWorkload: it is not there, or its code raised.
    """
    file = file_of(name)
    if say is not None and file is not None:
        say(f"{label} is imported from {file}")
    with guarded(f"{label}: cannot import {name!r}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that it imports itself
            raise BadWorkload(
                f"{label}: cannot import {name!r}: {told(error)}; it was looked for on Python's path and in "
                f"{os.getcwd()} (the working folder): start from the folder that holds it, or set PYTHONPATH to that"
            ) from error


def file_of(name: str) -> str | None:
    """The file that holds module ``name``, on the import path or in the working folder, found without running any of
    it; None where it is not found."""
    with _working_folder_last():
        return _file_of(name)


def _file_of(name: str) -> str | None:
    first, *rest = name.split(".")
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(first)
        for place in range(len(rest)):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = PathFinder.find_spec(".".join((first, *rest[: place + 1])), spec.submodule_search_locations)
    except (ImportError, ValueError):  # ValueError: a module without a spec, as __main__
        return None
    return None if spec is None else spec.origin


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """The working folder at the end of the import path, so that it can add modules but shadow none."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the user's code may have changed the path
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
