"""Text and tables on a terminal or in a file: coloured on a terminal, plain and never cut anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = tuple[Sequence[str], str]
"""The cells of a row of a table, and the style of its first cell and verdicts ("" for none)."""

_FILE_WIDTH = 240  # a file has no width; wide enough for the longest row that a plan makes


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with 1, which is the code of --fail-over: let the command decide instead."""
        raise


class Page:
    """What `show`, `diff` and the summary write on. Texts are shown as they are: no markup is read in them."""

    def __init__(self, stream: TextIO) -> None:
        width = None if stream.isatty() else _FILE_WIDTH
        self._console = _Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)

    def line(self, text: str = "", style: str = "") -> None:
        """One line of text, wrapped only on a terminal."""
        self._console.print(Text(text, style=style), soft_wrap=not self._console.is_terminal)

    def title(self, text: str) -> None:
        """An empty line and a heading."""
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def table(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        """A table with column ``names``; cells wrap on a narrow terminal, nothing is left out."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in names:
            table.add_column(name, overflow="fold")
        for cells, style in rows:
            table.add_row(*(Text(cell, style=style) for cell in cells))
        self._console.print()
        self._console.print(table)
