"""Nodes: whose traces are accepted, and for which tenants."""

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import DeniedError
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import node_tenants, nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An enrolled serving node. `public_key` is its raw Ed25519 public key, 32 bytes."""

    name: str
    public_key: bytes
    tenants: frozenset[str]
    enrolled_s: float
    revoked_s: float | None


def enrol_node(
    catalog: Catalog, name: str, public: bytes, tenants: Collection[str], at_s: float
) -> None:
    """Let a node write for `tenants`; repeating it replaces the tenants and keeps the date.

    A name belongs to one key for ever, since stored traces are verified by the node's name. Raises
    DeniedError for another key under a known name, and for a revoked node.
    """
    with catalog.begin() as connection:
        row = connection.execute(sa.select(nodes).where(nodes.c.name == name)).one_or_none()
        if row is None:
            connection.execute(
                sa.insert(nodes).values(name=name, public_key=public, enrolled_s=at_s)
            )
        elif row.public_key != public:
            raise DeniedError(f"node {name} is enrolled with another key; use another node name")
        elif row.revoked_s is not None:
            raise DeniedError(f"node {name} is revoked; enrol a fresh key under another node name")
        connection.execute(sa.delete(node_tenants).where(node_tenants.c.node == name))
        for tenant in sorted(set(tenants)):
            connection.execute(sa.insert(node_tenants).values(node=name, tenant=tenant))


def revoke_node(catalog: Catalog, name: str, at_s: float) -> None:
    """Refuse everything of this node that arrives from here on; raises DeniedError if unknown.

    It acts on arrival, whatever date a trace carries; what was stored before stays readable.
    """
    with catalog.begin() as connection:
        known = connection.scalar(sa.select(nodes.c.name).where(nodes.c.name == name))
        if known is None:
            raise DeniedError(f"node {name} is not enrolled; draftkeep nodes list has the names")
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.name == name, nodes.c.revoked_s.is_(None))
            .values(revoked_s=at_s)
        )


def load_nodes(connection: Connection) -> dict[str, Node]:
    """Every node ever enrolled, by name."""
    allowed: dict[str, set[str]] = {}
    for row in connection.execute(sa.select(node_tenants)):
        allowed.setdefault(row.node, set()).add(row.tenant)
    return {
        row.name: Node(
            name=row.name,
            public_key=row.public_key,
            tenants=frozenset(allowed.get(row.name, ())),
            enrolled_s=row.enrolled_s,
            revoked_s=row.revoked_s,
        )
        for row in connection.execute(sa.select(nodes))
    }


def node_public(catalog: Catalog, name: str) -> bytes | None:
    """The key that verifies a stored trace of this node, revoked or not; None if unknown."""
    with catalog.read() as connection:
        return connection.scalar(sa.select(nodes.c.public_key).where(nodes.c.name == name))


class NodePublicKeys:
    """`node_public` for whoever reads many traces: asks the catalog once for each node.

    What it found stays right, since a name belongs to one key for ever. Thread-safe.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._found: dict[str, bytes] = {}

    def __call__(self, name: str) -> bytes | None:
        """As `node_public`."""
        public = self._found.get(name)
        if public is None:
            public = node_public(self._catalog, name)
            if public is not None:
                self._found[name] = public
        return public
