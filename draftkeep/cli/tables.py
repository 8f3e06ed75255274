"""Tables of plain values: no cell is markup, and a pipe is not cut to a screen's width."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 240


def table_console() -> Console:
    """A console as wide as the terminal, or wide enough for everything where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_COLUMNS)


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table of values as they are; bytes as hexadecimal, nothing for None."""
    table = Table(*(escape(column) for column in columns), header_style="bold")
    for row in rows:
        table.add_row(*(Text(_shown(value)) for value in row))
    return table


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else "" if value is None else str(value)
