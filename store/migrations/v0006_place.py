"""A catalog knows the one place where its shards are."""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """One column; what it holds is in the mark at that place, too."""
    op.add_column("identity", sa.Column("place", sa.LargeBinary, nullable=True))
