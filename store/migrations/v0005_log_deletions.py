"""What erasures ask of the broker, and where something erased arrived late."""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """One table, and a column each for what leads to its rows."""
    op.add_column("erasures", sa.Column("log_request", sa.BigInteger, nullable=True))
    op.add_column("offsets", sa.Column("erased_to", sa.BigInteger, nullable=True))
    op.create_table(
        "log_deletions",
        sa.Column("request", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("cluster", sa.Text, primary_key=True),
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("up_to", sa.BigInteger, nullable=False),
        sa.Column("requested_s", sa.Float, nullable=False),
        sa.Column("deleted_s", sa.Float, nullable=True),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("settled_s", sa.Float, nullable=True),
        sa.Column("outcome", sa.Text, nullable=True),
        sa.CheckConstraint("outcome IN ('verified', 'topic gone')", name="log_deletions_outcome"),
        sa.Index("log_deletions_by_state", "settled_s"),
    )
