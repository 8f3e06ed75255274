"""`draftkeep nodes`: whose traces are accepted, and no longer."""

import time
from typing import Annotated

import typer

from draftkeep.cli.options import ConfigOption
from draftkeep.cli.tables import plain_table, print_line, table_console, utc
from draftkeep.config import load_config
from draftkeep.errors import InputError

nodes_app = typer.Typer(help="List serving nodes, or refuse one.", no_args_is_help=True)


@nodes_app.command("list")
def nodes_list(config: ConfigOption = None) -> None:
    """List every node that was ever enrolled, and for which tenants."""
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.nodes import load_nodes

    catalog = Catalog.configured(load_config(config), create=False, migrate=False)
    try:
        with catalog.read() as connection:
            nodes = load_nodes(connection)
    finally:
        catalog.close()
    columns = ("node", "tenants", "enrolled", "revoked", "public key")
    rows = (
        (
            node.name,
            ", ".join(sorted(node.tenants)),
            utc(node.enrolled_s),
            utc(node.revoked_s),
            node.public_key,
        )
        for _, node in sorted(nodes.items())
    )
    table_console().print(plain_table(columns, rows))


@nodes_app.command("revoke")
def nodes_revoke(
    name: Annotated[str, typer.Argument(help="The node's name, serve.node.")],
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Needed: it cannot be undone.")] = False,
) -> None:
    """Refuse all that arrives of a node from here on. What is stored of it stays."""
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.nodes import revoke_node

    if not yes:
        raise InputError(
            f"revoking {name} cannot be undone, and what it has under way is lost; give --yes"
        )
    catalog = Catalog.configured(load_config(config), create=False)
    try:
        revoke_node(catalog, name, time.time())
    finally:
        catalog.close()
    print_line(f"{name} is revoked: what arrives of it from here on becomes a dead letter")
