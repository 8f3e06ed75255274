"""Audit questions from the command line, and rows printed as a table."""

import json
import time
from typing import Any

from rich.console import Console

from draftkeep.cli.tables import plain_table, utc
from draftkeep.config import Config
from draftkeep.store.audit import AuditResult, AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.storage import open_storage


def ask(config: Config, sql: str) -> AuditResult:
    """Run one SELECT over the audit views of a configuration's state directory."""
    catalog = Catalog.configured(config, create=False, migrate=False)
    try:
        with AuditSession(catalog, open_storage(config), now_s=time.time()) as session:
            return session.query(sql)
    finally:
        catalog.close()


def print_result(result: AuditResult, console: Console) -> None:
    """Print a table, and say so where rows were cut off."""
    console.print(plain_table(result.columns, result.rows))
    _say_if_cut(result, console)


def print_report(result: AuditResult, console: Console) -> None:
    """Print a report's table like any other, its times as UTC."""
    rows = (
        (
            utc(value) if name.endswith("_s") else value
            for name, value in zip(result.columns, row, strict=True)
        )
        for row in result.rows
    )
    console.print(plain_table(result.columns, rows))
    _say_if_cut(result, console)


def _say_if_cut(result: AuditResult, console: Console) -> None:
    if result.truncated:
        console.print(f"only the first {len(result.rows)} rows; narrow the question for the rest")


def print_json(result: AuditResult) -> None:
    """Print one JSON object a line; bytes as hexadecimal, times and lists as JSON has them.

    Where rows were cut off, stderr says so.
    """
    for row in result.rows:
        print(json.dumps(dict(zip(result.columns, row, strict=True)), default=_json))
    _say_if_cut(result, Console(stderr=True))


def _json(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)
