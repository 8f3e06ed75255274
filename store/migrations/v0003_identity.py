"""A catalog gets a name of its own, which the shards it lists can be marked with."""

import os

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """One table with one row."""
    table = op.create_table("identity", sa.Column("id", sa.LargeBinary, primary_key=True))
    op.bulk_insert(table, [{"id": os.urandom(16)}])
