"""What a drafter descends from, and whether anything of it was erased."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.store.database import utf8
from draftkeep.store.schema import drafters, lineage, tombstones


def ancestors(connection: Connection, digest: bytes) -> list[bytes]:
    """The drafter's parent, its parent's parent and so on, nearest first."""
    found: list[bytes] = []
    parent = _parent(connection, digest)
    # A digest covers the manifest that names the parent, so the chain cannot close on itself;
    # a damaged catalog could.
    while parent is not None and parent not in found:
        found.append(parent)
        parent = _parent(connection, parent)
    return found


def learned_from_erased(connection: Connection, digest: bytes) -> bool:
    """Whether this drafter itself learned from an alias or a tenant that has a tombstone."""
    stone = tombstones.c
    covered = sa.or_(
        sa.and_(
            stone.kind == "alias",
            stone.value == lineage.c.alias,
            stone.period_id == lineage.c.period_id,
        ),
        sa.and_(stone.kind == "tenant", stone.value == utf8(lineage.c.tenant)),
    )
    query = sa.select(sa.exists().where(lineage.c.drafter == digest, covered))
    return bool(connection.scalar(query))


def is_clean(connection: Connection, digest: bytes) -> bool:
    """Whether neither the drafter nor any ancestor is quarantined or learned from erased data."""
    for one in (digest, *ancestors(connection, digest)):
        status = connection.scalar(sa.select(drafters.c.status).where(drafters.c.digest == one))
        if status in (None, "quarantined") or learned_from_erased(connection, one):
            return False
    return True


def clean_ancestor(connection: Connection, digest: bytes) -> bytes | None:
    """The nearest ancestor that is registered, signed and clean; None where there is none."""
    for one in ancestors(connection, digest):
        row = connection.execute(
            sa.select(drafters.c.status, drafters.c.signature).where(drafters.c.digest == one)
        ).one()
        if row.status == "registered" and row.signature is not None and is_clean(connection, one):
            return one
    return None


def _parent(connection: Connection, digest: bytes) -> bytes | None:
    return connection.scalar(sa.select(drafters.c.parent).where(drafters.c.digest == digest))
