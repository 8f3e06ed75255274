"""A shard's id is given once; dead letters are bounded, in bytes and by a period's lifetime.

Processes remember ids from one transaction to the next: of a shard that took the id of another
they would believe what they had learned of that one. PostgreSQL gives no id twice.
"""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """SQLite makes the table of shards anew, with a sequence that goes on from its last id."""
    op.add_column(
        "dead_letters",
        sa.Column("kept_bytes", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    )
    op.execute("UPDATE dead_letters SET kept_bytes = length(record) + 1024")
    op.create_index("dead_letters_by_size", "dead_letters", ["kept_bytes"])
    op.create_index("periods_by_deadline", "periods", ["destroy_at_s"])
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "shards", recreate="always", table_kwargs={"sqlite_autoincrement": True}
        ):
            pass
