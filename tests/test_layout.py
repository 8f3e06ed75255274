"""The tree is what docs/architecture.md says: links, rooms, and imports that run one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("policies", "kernels", "ingest", "store", "distill", "serve")
# What each room may import besides itself. errors, files and config are everybody's; breaker and
# outage import nothing.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "breaker": set(),
    "outage": set(),
    "files": {"errors"},
    "config": {"errors", "files"},
    "policies": {"errors", "files", "config"},
    "kernels": {"errors", "files", "config"},
}
MAY_IMPORT["ingest"] = MAY_IMPORT["policies"] | {"breaker", "outage", "policies", "kernels"}
MAY_IMPORT["store"] = MAY_IMPORT["ingest"] | {"ingest"}
MAY_IMPORT["distill"] = MAY_IMPORT["store"] | {"store"}
MAY_IMPORT["serve"] = MAY_IMPORT["store"] | {"store"}
MAY_IMPORT["cli"] = MAY_IMPORT["store"] | {"store", "distill", "serve"}


def modules() -> list[tuple[str, Path]]:
    """(room, file) for every module of the package."""
    bottom = ("errors", "breaker", "outage", "files", "config")
    found = [(name, ROOT / f"draftkeep/{name}.py") for name in bottom]
    found += [(room, path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found += [("cli", path) for path in sorted((ROOT / "draftkeep/cli").rglob("*.py"))]
    return found


def imported_rooms(path: Path) -> set[str]:
    """The first name under `draftkeep` of everything a file imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("draftkeep.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: str(value)[-40:])
def test_imports_run_one_way(room: str, path: Path) -> None:
    assert imported_rooms(path) <= MAY_IMPORT[room] | {room}


def test_a_node_does_not_know_its_endpoint() -> None:
    """Only the process that serves puts the two together."""
    importers = {
        path.name
        for path in (ROOT / "serve").glob("*.py")
        if "draftkeep.serve.http" in path.read_text(encoding="utf-8")
    }
    assert importers == {"runserver.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "draftkeep" / room
    assert link.is_symlink()
    assert not Path(str(link.readlink())).is_absolute()
    assert link.resolve() == ROOT / room


def test_kernels_is_not_a_top_level_package() -> None:
    # A package of that name shadows the one transformers looks for.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def imports_of(path: Path) -> set[str]:
    """The modules that a file names after `from` or `import`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_what_benches_take_from_the_tests_needs_no_pytest() -> None:
    """They share services, campaigns and deployments: a figure and a check are of one set-up."""
    waiting = {
        name
        for path in (ROOT / "bench").rglob("*.py")
        for name in imports_of(path)
        if name.startswith("tests.")
    }
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        imported = imports_of(ROOT / f"{name.replace('.', '/')}.py")
        assert "pytest" not in imported, f"{name} imports pytest"
        waiting |= {other for other in imported if other.startswith("tests.")} - seen
    assert "tests.services.kafka" in seen


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: str(value)[-40:])
def test_files_and_functions_stay_short(room: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
