"""Helper processes that answer JSON requests, a line each, within deadlines; none outlives its crew."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from types import TracebackType
from typing import IO, Any

from planner.request import Usage
from schemas.form import Json

_END_SECONDS = 10.0


_Word = tuple[str, str | None]  # a helper's name, and a line of it or None at its end


class Failed(Exception):
    """A helper ended, or gave no answer in time. The message says so in one line."""


class Late(Failed):
    """No answer in time."""


class Crew:
    """One helper a name, each started by ``command`` in its own environment, as a context manager.

    A helper first says one line of its own accord, when it is ready.
    """

    def __init__(self, command: Sequence[str], environs: Mapping[str, Mapping[str, str]]) -> None:
        self._command, self._environs = list(command), environs
        self._helpers: dict[str, subprocess.Popen[str]] = {}
        self._errors: dict[str, IO[bytes]] = {}
        self._heard: Queue[_Word] = Queue()
        self._aside: list[_Word] = []  # heard while another was waited for
        self._ended: set[str] = set()
        self.gone: dict[str, str] = {}  # name -> why no more is to be had from it

    def __enter__(self) -> Crew:
        try:
            for name, environ in self._environs.items():
                self._start(name, environ)
        except BaseException:
            self._end(list(self._helpers), 0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(list(self._helpers), _END_SECONDS if kind is None else 0.0)

    def _start(self, name: str, environ: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._errors[name] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its helper
        helper = subprocess.Popen(
            self._command, env=dict(environ), stdin=pipe, stdout=pipe, stderr=self._errors[name], text=True
        )
        self._helpers[name] = helper
        threading.Thread(target=self._listen, args=(name, helper.stdout), daemon=True).start()

    def _listen(self, name: str, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                self._heard.put((name, line))
        self._heard.put((name, None))

    def ready(self, deadline: float) -> None:
        """Wait until each helper has said that it is ready. One that does not is `gone`."""
        for name in self._helpers:
            try:
                self._gather([name], deadline)
            except Failed:
                continue  # noted in `gone`, and told when it is asked

    def ask(self, requests: Mapping[str, Mapping[str, Json]], deadline: float) -> dict[str, Json]:
        """The answer to each of ``requests`` by name; the first {"error"} or {"wrong"} ends the wait for the others.

        Raises:
            Failed: one is gone, ends now, or gives no answer within ``deadline`` seconds (Late). All that were asked
                are then ended too: who has answered may yet wait for the one that has not.
        """
        for name in requests:
            if name in self.gone:
                raise Failed(self.gone[name])
        for name, request in requests.items():
            try:
                print(json.dumps({**request, "deadline": deadline}), file=self._helpers[name].stdin, flush=True)
            except OSError:
                continue  # it has ended: what it leaves is heard below
        return self._gather(list(requests), deadline)

    def _gather(self, names: list[str], deadline: float) -> dict[str, Json]:
        found: dict[str, Json] = {}
        end = time.monotonic() + deadline
        try:
            while len(found) < len(names):
                name, line = self._next(names, end, f"no answer within {deadline:.3g} s")
                found[name] = self._answer(name, line)
                if {"error", "wrong"} & found[name].keys() and len(found) < len(names):
                    self._drop(names, found[name].get("error", "another's result was wrong"))
                    break
        except Failed as failure:
            self._drop(names, str(failure))
            raise
        return found

    def _next(self, names: Sequence[str], end: float, late: str) -> _Word:
        """The next word of one of ``names``; words of others wait for their turn."""
        for place, word in enumerate(self._aside):
            if word[0] in names:
                return self._aside.pop(place)
        while True:
            try:
                word = self._heard.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                raise Late(late) from None
            if word[0] in names:
                return word
            if word[0] not in self._ended:
                self._aside.append(word)

    def _answer(self, name: str, line: str | None) -> Json:
        if line is not None:
            return json.loads(line)
        helper = self._helpers[name]
        code = helper.wait(_END_SECONDS)
        self._errors[name].seek(0)
        said = self._errors[name].read().decode("utf-8", "replace").strip().splitlines()
        raise Failed(f"its process ended with {code}: {said[-1] if said else 'no message'}")

    def _drop(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self.gone.setdefault(name, why)
        self._end(names, 0.0)

    def release(self, names: Sequence[str]) -> None:
        """Let these end, and wait for it: a card may be open to one process alone."""
        self._end(names, _END_SECONDS)

    def _end(self, names: Sequence[str], patience: float) -> None:
        names = [name for name in names if name not in self._ended]
        self._ended.update(names)
        for name in names:
            stdin = self._helpers[name].stdin
            if stdin is not None and not stdin.closed:
                try:
                    stdin.close()
                except OSError:
                    continue  # nothing reads it any more
        stuck = [str(self._helpers[name].pid) for name in names if not _ended(self._helpers[name], patience)]
        for name in names:
            self._errors[name].close()
        if stuck:
            raise Usage(f"--benchmark: process {', '.join(stuck)} cannot be ended: it is stuck in the driver")


def _ended(helper: subprocess.Popen[Any], patience: float) -> bool:
    """Whether ``helper`` ended: by itself within ``patience`` seconds, or killed."""
    try:
        helper.wait(patience)
    except subprocess.TimeoutExpired:
        helper.kill()
        try:
            helper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return False
    return True
