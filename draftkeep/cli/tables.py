"""Tables and lines of plain values: nothing in them is markup, and a pipe is not cut to a width."""

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

PIPED_COLUMNS = 240


def table_console() -> Console:
    """A console as wide as the terminal, or wide enough for everything where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_COLUMNS)


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table of values as they are; bytes as hexadecimal, nothing for None."""
    # Folded where a terminal is too narrow: a name or a digest that is cut cannot be given again.
    heads = (Column(escape(column), overflow="fold") for column in columns)
    table = Table(*heads, header_style="bold")
    for row in rows:
        table.add_row(*(Text(_shown(value)) for value in row))
    return table


def print_line(line: str) -> None:
    """Print a line as it is, however long."""
    Console(highlight=False, markup=False, soft_wrap=True).print(line)


def utc(at_s: float | None) -> str | None:
    """Unix seconds as a date and time in UTC; None for None."""
    return None if at_s is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_s))


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else "" if value is None else str(value)
