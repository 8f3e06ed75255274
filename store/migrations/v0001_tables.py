"""The first catalog: the tables that draftkeep made before there were migrations."""

from alembic.operations import Operations
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Text,
    UniqueConstraint,
)

ROW_ID = BigInteger().with_variant(Integer, "sqlite")


def upgrade(op: Operations) -> None:
    """Make every table."""
    op.create_table("schema_version", Column("version", Integer, primary_key=True))
    _traces(op)
    _reading(op)
    _accepted(op)
    _erased(op)
    _learned(op)
    _jobs(op)


def _traces(op: Operations) -> None:
    op.create_table(
        "shards",
        Column("id", ROW_ID, primary_key=True),
        Column("name", Text, nullable=False, unique=True),
        Column("format", Integer, nullable=False),
        Column("bucket_s", BigInteger, nullable=False),
        Column("target", LargeBinary, nullable=False),
        Column("rows", BigInteger, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("sha256", LargeBinary, nullable=False),
        Column("created_s", Float, nullable=False),
        Index("shards_by_bucket", "bucket_s", "target"),
    )
    op.create_table(
        "trace_ids",
        Column("bucket_s", BigInteger, primary_key=True),
        Column("trace_id", LargeBinary, primary_key=True),
        Column("node", Text, primary_key=True),
        Column("digest", LargeBinary, nullable=False),
        Column("tenant", Text, nullable=False),
        Column("alias", LargeBinary, nullable=False),
        Column("period_id", LargeBinary, nullable=False),
        Column("positions", BigInteger, nullable=False),
        Column("shard", ROW_ID, ForeignKey("shards.id"), nullable=True),
        Index("trace_ids_by_shard", "shard"),
        Index("trace_ids_by_alias", "alias"),
        Index("trace_ids_by_period", "period_id"),
    )


def _reading(op: Operations) -> None:
    op.create_table(
        "offsets",
        Column("cluster", Text, primary_key=True),
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column("next", BigInteger, nullable=False),
        Column("changed_s", Float, nullable=False),
    )
    op.create_table(
        "gaps",
        Column("id", ROW_ID, primary_key=True),
        Column("cluster", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("partition", Integer, nullable=False),
        Column("first", BigInteger, nullable=False),
        Column("next", BigInteger, nullable=False),
        Column("seen_s", Float, nullable=False),
    )
    op.create_table(
        "dead_letters",
        Column("id", ROW_ID, primary_key=True),
        Column("reason", Text, nullable=False),
        Column("detail", Text, nullable=False),
        Column("sha256", LargeBinary, nullable=False),
        Column("count", Integer, nullable=False),
        Column("record", LargeBinary, nullable=False),
        Column("tenant", Text, nullable=True),
        Column("alias", LargeBinary, nullable=True),
        Column("cluster", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("partition", Integer, nullable=False),
        Column("offset", BigInteger, nullable=False),
        Column("seen_s", Float, nullable=False),
        Column("expiry_s", BigInteger, nullable=False),
        UniqueConstraint("reason", "sha256"),
    )
    op.create_table(
        "drops",
        Column("source", Text, primary_key=True),
        Column("reason", Text, primary_key=True),
        Column("hour_s", BigInteger, primary_key=True),
        Column("count", BigInteger, nullable=False),
    )


def _accepted(op: Operations) -> None:
    op.create_table(
        "nodes",
        Column("name", Text, primary_key=True),
        Column("public_key", LargeBinary, nullable=False),
        Column("enrolled_s", Float, nullable=False),
        Column("revoked_s", Float, nullable=True),
    )
    op.create_table(
        "node_tenants",
        Column("node", Text, ForeignKey("nodes.name"), primary_key=True),
        Column("tenant", Text, primary_key=True),
    )
    op.create_table(
        "periods",
        Column("period_id", LargeBinary, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("start_s", BigInteger, nullable=False),
        Column("destroy_at_s", BigInteger, nullable=False),
        Column("issued_expiry_s", BigInteger, nullable=False),
        Column("public_key", LargeBinary, nullable=False),
        Column("signature", LargeBinary, nullable=False),
        Index("periods_by_tenant", "tenant", "start_s"),
    )


def _erased(op: Operations) -> None:
    op.create_table(
        "erasures",
        Column("id", LargeBinary, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("subject_ref", LargeBinary, nullable=False),
        Column("state", Text, nullable=False),
        Column("planned_s", Float, nullable=False),
        Column("keys_destroyed_s", Float, nullable=True),
        Column("aliases", Integer, nullable=False),
        Column("traces", BigInteger, nullable=False),
        Column("keys_destroyed", Integer, nullable=False),
        Column("drafters_quarantined", Integer, nullable=False),
        Column("channels_moved", Integer, nullable=False),
        Column("jobs_contaminated", Integer, nullable=False),
        CheckConstraint("state IN ('planned', 'done')", name="erasures_state"),
        Index("erasures_by_subject", "tenant", "subject_ref"),
    )
    op.create_table(
        "tombstones",
        Column("kind", Text, primary_key=True),
        Column("value", LargeBinary, primary_key=True),
        Column("period_id", LargeBinary, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("erasure", LargeBinary, ForeignKey("erasures.id"), nullable=False),
        Column("at_s", Float, nullable=False),
        CheckConstraint("kind IN ('alias', 'trace', 'tenant')", name="tombstones_kind"),
        Index("tombstones_by_value", "value"),
    )


def _learned(op: Operations) -> None:
    op.create_table(
        "drafters",
        Column("digest", LargeBinary, primary_key=True),
        Column("parent", LargeBinary, ForeignKey("drafters.digest"), nullable=True),
        Column("scope", Text, nullable=False),
        Column("status", Text, nullable=False),
        Column("created_s", Float, nullable=False),
        Column("measures", JSON, nullable=False),
        Column("signature", LargeBinary, nullable=True),
        Column("job", Text, nullable=True),
        CheckConstraint(
            "status IN ('registered', 'quarantined', 'retired')", name="drafters_status"
        ),
        Index("drafters_by_parent", "parent"),
    )
    op.create_table(
        "lineage",
        Column("drafter", LargeBinary, ForeignKey("drafters.digest"), primary_key=True),
        Column("alias", LargeBinary, primary_key=True),
        Column("period_id", LargeBinary, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("positions", BigInteger, nullable=False),
        Index("lineage_by_alias", "alias"),
    )
    op.create_table(
        "channels",
        Column("scope", Text, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("digest", LargeBinary, ForeignKey("drafters.digest"), nullable=True),
        Column("changed_s", Float, nullable=False),
    )


def _jobs(op: Operations) -> None:
    op.create_table(
        "jobs",
        Column("id", Text, primary_key=True),
        Column("scope", Text, nullable=False),
        Column("state", Text, nullable=False),
        Column("contaminated", Boolean, nullable=False),
        Column("parent", LargeBinary, nullable=True),
        Column("drafter", LargeBinary, nullable=True),
        Column("started_s", Float, nullable=False),
        Column("ended_s", Float, nullable=True),
        Column("record", JSON, nullable=False),
        CheckConstraint("state IN ('running', 'done', 'failed')", name="jobs_state"),
    )
    op.create_table(
        "job_inputs",
        Column("job", Text, ForeignKey("jobs.id"), primary_key=True),
        Column("alias", LargeBinary, primary_key=True),
        Column("period_id", LargeBinary, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("positions", BigInteger, nullable=False),
        Index("job_inputs_by_alias", "alias"),
    )
