"""Trace ids name their shard without a foreign key.

A transaction names only a shard that it lists itself, so no key can fail; looking it up for every
row was a third of what a batch's commit takes on PostgreSQL. `draftkeep catalog check` asks the
same question of all rows at once.
"""

from alembic.operations import Operations

_KEY = "trace_ids_shard_fkey"


def upgrade(op: Operations) -> None:
    """One reference less; SQLite makes the table anew."""
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint(_KEY, "trace_ids", type_="foreignkey")
        return
    # SQLite's key has no name of its own.
    names = {"fk": "%(table_name)s_%(column_0_name)s_fkey"}
    with op.batch_alter_table("trace_ids", naming_convention=names) as table:
        table.drop_constraint(_KEY, type_="foreignkey")
