"""Refusing a node by command, down to what arrives of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftkeep.cli.commands import app
from draftkeep.errors import DeniedError, InputError, NoCatalogError
from draftkeep.store.nodes import Node, enrol_node, load_nodes
from tests.store.conftest import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    yield made
    made.close()


def run(root: Path, *arguments: str) -> Result:
    path = root / "config.toml"
    path.write_text(f'state_dir = "{root}"\n')
    return CliRunner().invoke(app, ["nodes", *arguments, "--config", str(path)])


def test_what_arrives_of_a_revoked_node_is_refused_and_what_is_stored_stays(world: World) -> None:
    world.append(world.seal())
    assert world.compactor().run_once().stored == 1
    (name,) = _nodes(world)
    done = run(world.root, "revoke", name, "--yes")
    assert done.exit_code == 0
    assert f"{name} is revoked" in done.output
    world.append(world.seal(), world.seal())
    report = world.compactor().run_once()
    assert (report.stored, report.dead) == (0, {"revoked_node": 2})
    assert len(world.stored()) == 1
    listed = run(world.root, "list").output
    (node,) = _nodes(world).values()
    assert node.revoked_s is not None
    assert all(text in listed for text in (name, "acme, birch", node.public_key.hex()))
    again = run(world.root, "revoke", name, "--yes")
    assert again.exit_code == 0
    assert _nodes(world)[name].revoked_s == node.revoked_s


def test_nothing_is_revoked_by_a_slip(world: World, tmp_path: Path) -> None:
    (name,) = _nodes(world)
    assert isinstance(run(world.root, "revoke", name).exception, InputError)
    assert isinstance(run(world.root, "revoke", "nobody", "--yes").exception, DeniedError)
    assert _nodes(world)[name].revoked_s is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert isinstance(run(elsewhere, "list").exception, NoCatalogError)
    assert isinstance(run(elsewhere, "revoke", name, "--yes").exception, NoCatalogError)


def _nodes(world: World) -> dict[str, Node]:
    with world.catalog.read() as connection:
        return load_nodes(connection)


def test_names_and_keys_can_be_copied_from_a_narrow_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is folded and never cut: what is listed is what the next command wants."""
    monkeypatch.setattr("draftkeep.cli.tables.PIPED_COLUMNS", 60)
    name = "node-" + "x" * 40
    enrol_node(world.catalog, name, b"k" * 32, ["acme"], 0.0)
    listed = run(world.root, "list").output
    cells = [[cell.strip() for cell in line.split("│")] for line in listed.splitlines()]
    columns = [
        "".join(parts) for parts in zip(*(row for row in cells if len(row) > 2), strict=True)
    ]
    assert any(name in column for column in columns)
    assert any((b"k" * 32).hex() in column for column in columns)
