"""The table of public faults claims nothing that is not there and misses no test beside it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
_ROW = re.compile(r"\| ([A-J]\d+) \| (.+?) \| (.+?) \| (.+) \|")
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_NOT_HERE = "not here: "


def rows() -> list[tuple[str, str, str]]:
    """(id, report, what replays it) of every line of the table."""
    page = (HERE / "README.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    found = [_ROW.fullmatch(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [(row[1], row[2], row[4]) for row in found if row is not None]


@cache
def defined(path: Path) -> dict[str, str]:
    """The docstring of every test of a file, by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize(("number", "report", "by"), rows(), ids=lambda value: str(value)[:4])
def test_what_replays_a_fault_exists(number: str, report: str, by: str) -> None:
    tests = _TEST.findall(by)
    assert bool(tests) or by.startswith(_NOT_HERE)
    for path, name in tests:
        assert name in defined(TESTS / path), f"{path} has no {name}"


def test_every_fault_is_listed_once() -> None:
    numbers = [number for number, _, _ in rows()]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers, key=lambda number: (number[0], int(number[1:])))
    assert {number[0] for number in numbers} == set("ABCDEFGHIJ")


def test_every_replay_is_in_the_table_and_names_a_report() -> None:
    """A docstring names its report by the project and the number the table has."""
    replayed = {test for _, _, by in rows() for test in _TEST.findall(by)}
    for path in sorted(HERE.glob("test_*.py")):
        if path == Path(__file__).resolve():
            continue
        for name, docstring in defined(path).items():
            assert (f"faults/{path.name}", name) in replayed, name
            reports = [report for _, report, by in rows() if f"{path.name}::{name}`" in by]
            numbers = re.findall(r"#\d+|found here|\d{4}\.\d{5}", " ".join(reports))
            assert any(number in docstring for number in numbers), name
