"""Text and tables on a terminal or in a file: coloured on a terminal, plain and never cut anywhere else.

A table that a terminal is too narrow for becomes blocks, a row each, so that no word and no pointer is ever broken.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.views.words import clean

Row = tuple[Sequence[str], str]
"""The cells of a row of a table, and the style of its first cell and verdicts ("" for none)."""

NARROW = 100  # columns; below it a table either fits as it is or becomes blocks
NOTHING = "-"  # what an empty cell of a table holds
_FILE_WIDTH = 240  # a file has no width; wide enough for the longest row that a plan makes
_GAP = 2


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with 1, which is the code of --fail-over: let the command decide instead."""
        raise


class Page:
    """What `show`, `diff` and the summary write on. Texts are shown as they are: no markup is read in them, and what is
    not printed is shown as its code."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        """``width`` in columns is the terminal's own where None; a file has none and takes lines of any length."""
        self._bounded = width is not None or stream.isatty()
        width = width if self._bounded else _FILE_WIDTH
        self._console = _Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)

    def line(self, text: str = "", style: str = "") -> None:
        """One line of text, wrapped between words on a terminal."""
        for part in self._wrapped(clean(text), ""):
            self._print(part, style)

    def title(self, text: str) -> None:
        """An empty line and a heading."""
        self._print("")
        self._print(text, "bold")

    def table(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        """A table with column ``names``: cells wrap between words, and nothing is left out."""
        rows = [([clean(cell) for cell in cells], style) for cells, style in rows]
        filled = [([cell or NOTHING for cell in cells], style) for cells, style in rows]
        columns = [[name, *(cells[place] for cells, _ in filled)] for place, name in enumerate(names)]
        widths = self._widths(columns)
        self._print("")
        if widths is None:
            self._blocks(names, rows)
            return
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for name, width in zip(names, widths, strict=True):
            table.add_column(name, width=width, overflow="fold")
        for cells, style in filled:
            table.add_row(*(Text(cell, style=style) for cell in cells))
        self._console.print(table, width=max(self._console.width, sum(widths) + _GAP * len(widths)))

    def _widths(self, columns: Sequence[Sequence[str]]) -> list[int] | None:
        """The width of each column; None where the table is for blocks: a word would break, or the terminal is narrow
        and cells would wrap."""
        widths = [max(cell_len(cell) for cell in column) for column in columns]
        least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
        room = self._console.width - _GAP * len(columns)
        narrow = self._bounded and self._console.width < NARROW
        if sum(widths) > room and (narrow or sum(least) > room):
            return None if self._bounded else least
        while sum(widths) > room:
            widest = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
            widths[widest] -= 1
        return widths

    def _blocks(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        """A row as its first cell and, beneath, the name and the text of each cell that holds something."""
        for cells, style in rows:
            self._print(cells[0] if cells[0].startswith("/") else f"{names[0]} {cells[0]}", style or "bold")
            for name, cell in zip(names[1:], cells[1:], strict=True):
                if cell:
                    for part in self._wrapped(f"{name}: {cell}", "  "):
                        self._print(part, style)

    def _wrapped(self, text: str, indent: str) -> list[str]:
        if not self._bounded:
            return [text]
        width = max(20, self._console.width)
        lines = textwrap.wrap(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=indent * 2 or "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        return lines or [text]

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)
