"""Logs are also known by name, so that a topic made again differs from another topic.

The name of a log that was read before is empty until it is read again.
"""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """One column."""
    op.add_column(
        "offsets", sa.Column("name", sa.Text, nullable=False, server_default=sa.text("''"))
    )
