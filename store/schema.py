"""The catalog's tables.

    which it is   schema_version, identity
    what exists   shards, trace_ids, offsets, gaps, dead_letters, drops
    who may       nodes, node_tenants, periods
    what left     tombstones, erasures, log_deletions
    what learned  jobs, job_inputs, drafters, lineage, channels

Ids and digests are raw bytes. A column ending in `_s` is Unix time in seconds: a whole number
where it is a deadline, a float where it says when something happened. Nothing here is content: no
token, no subject's name, no key but public ones.
"""

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
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

# The last migration; a change here comes with one.
SCHEMA_VERSION = 8

# SQLite counts rows by itself only in a column declared exactly INTEGER.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

schema_version = Table(
    "schema_version",
    metadata,
    Column("version", Integer, primary_key=True),
)

# One row: 16 random bytes that name this catalog, and as many that name the place of its shards,
# null until there is one. See `ownership`.
identity = Table(
    "identity",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("place", LargeBinary, nullable=True),
)

# One immutable Parquet file. Every trace in it expires at `bucket_s` at the latest. No id is ever
# given twice: processes remember them from one transaction to the next.
shards = Table(
    "shards",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("format", Integer, nullable=False),
    Column("bucket_s", BigInteger, nullable=False),
    Column("target", LargeBinary, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("created_s", Float, nullable=False),
    Index("shards_by_bucket", "bucket_s", "target"),
    sqlite_autoincrement=True,
)

# Every trace that was ever stored, until its bucket expires. `shard` is null once its bytes were
# erased: the id stays so that a late duplicate cannot bring the trace back. It is no foreign key,
# which would be looked up for each row of a batch: a transaction names only a shard that it lists
# itself. `digest` is the SHA-256 of the log record.
trace_ids = Table(
    "trace_ids",
    metadata,
    Column("bucket_s", BigInteger, primary_key=True),
    Column("trace_id", LargeBinary, primary_key=True),
    Column("node", Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("alias", LargeBinary, nullable=False),
    Column("period_id", LargeBinary, nullable=False),
    Column("positions", BigInteger, nullable=False),
    Column("shard", _ROW_ID, nullable=True),
    Index("trace_ids_by_shard", "shard"),
    Index("trace_ids_by_subject", "period_id", "alias"),
)

# How far each log was read. `next` is the first offset not yet committed. `name` is what people
# call the topic, empty where a catalog of an earlier version did not say. Below `erased_to`
# arrived something that had been erased before it did; null where nothing did.
offsets = Table(
    "offsets",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True),
    Column("next", BigInteger, nullable=False),
    Column("changed_s", Float, nullable=False),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("erased_to", BigInteger, nullable=True),
)

# Offsets [first, next) that a log no longer had when they were due to be read.
gaps = Table(
    "gaps",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    Column("cluster", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("next", BigInteger, nullable=False),
    Column("seen_s", Float, nullable=False),
)

# Records that were refused, as they came, sealed. `count` is how often the same bytes came.
# `kept_bytes` is what a row takes of the bound on all of them.
dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
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
    Column("kept_bytes", BigInteger, nullable=False, server_default=text("0")),
    UniqueConstraint("reason", "sha256"),
    Index("dead_letters_by_size", "kept_bytes"),
)

# Traces that are counted and not kept, by who dropped them, why, and the hour it happened in.
drops = Table(
    "drops",
    metadata,
    Column("source", Text, primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("hour_s", BigInteger, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("public_key", LargeBinary, nullable=False),
    Column("enrolled_s", Float, nullable=False),
    Column("revoked_s", Float, nullable=True),
)

node_tenants = Table(
    "node_tenants",
    metadata,
    Column("node", ForeignKey("nodes.name"), primary_key=True),
    Column("tenant", Text, primary_key=True),
)

# Public period records as the issuer signed them. `issued_expiry_s` is the expiry that headers
# sealed before a shortening of the ttl carry; `destroy_at_s` is the deadline that holds.
periods = Table(
    "periods",
    metadata,
    Column("period_id", LargeBinary, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("start_s", BigInteger, nullable=False),
    Column("destroy_at_s", BigInteger, nullable=False),
    Column("issued_expiry_s", BigInteger, nullable=False),
    Column("public_key", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Index("periods_by_tenant", "tenant", "start_s"),
    Index("periods_by_deadline", "destroy_at_s"),
)

# `subject_ref` is a keyed hash of the subject's name that only a holder of the tenant's lookup
# key can link; it is how an interrupted erasure is found again.
erasures = Table(
    "erasures",
    metadata,
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
    Column("log_request", BigInteger, nullable=True),
    CheckConstraint("state IN ('planned', 'done')", name="erasures_state"),
    Index("erasures_by_subject", "tenant", "subject_ref"),
)

# What erasures ask of the broker: that the records below `up_to` of a partition are gone. One
# request is for all erasures that were done when it was made. `deleted_s` is since when they were
# seen gone without interruption, `attempts` how often they were deleted, and `settled_s` when
# nothing was owed any more. `topic` is the topic's id.
log_deletions = Table(
    "log_deletions",
    metadata,
    Column("request", BigInteger, primary_key=True),
    Column("cluster", Text, primary_key=True),
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("up_to", BigInteger, nullable=False),
    Column("requested_s", Float, nullable=False),
    Column("deleted_s", Float, nullable=True),
    Column("attempts", Integer, nullable=False),
    Column("settled_s", Float, nullable=True),
    Column("outcome", Text, nullable=True),
    CheckConstraint("outcome IN ('verified', 'topic gone')", name="log_deletions_outcome"),
    Index("log_deletions_by_state", "settled_s"),
)

# What must not be read, trained on or stored again. `value` is an alias (with its period), a
# trace id, or a tenant's name in UTF-8; `period_id` is empty where it does not apply.
tombstones = Table(
    "tombstones",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("value", LargeBinary, primary_key=True),
    Column("period_id", LargeBinary, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("erasure", ForeignKey("erasures.id"), nullable=False),
    Column("at_s", Float, nullable=False),
    CheckConstraint("kind IN ('alias', 'trace', 'tenant')", name="tombstones_kind"),
    Index("tombstones_by_value", "value"),
)

# A drafter is quarantined when something it learned from was erased, retired when replaced.
drafters = Table(
    "drafters",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("parent", ForeignKey("drafters.digest"), nullable=True),
    Column("scope", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("measures", JSON, nullable=False),
    Column("signature", LargeBinary, nullable=True),
    Column("job", Text, nullable=True),
    CheckConstraint("status IN ('registered', 'quarantined', 'retired')", name="drafters_status"),
    Index("drafters_by_parent", "parent"),
)

lineage = Table(
    "lineage",
    metadata,
    Column("drafter", ForeignKey("drafters.digest"), primary_key=True),
    Column("alias", LargeBinary, primary_key=True),
    Column("period_id", LargeBinary, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("positions", BigInteger, nullable=False),
    Index("lineage_by_alias", "alias"),
)

# A null digest is a cleared channel: nodes that follow it serve without a learned drafter.
channels = Table(
    "channels",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("digest", ForeignKey("drafters.digest"), nullable=True),
    Column("changed_s", Float, nullable=False),
)

# `record` holds the job's mixture, counts and measures: numbers and labels only.
jobs = Table(
    "jobs",
    metadata,
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

job_inputs = Table(
    "job_inputs",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("alias", LargeBinary, primary_key=True),
    Column("period_id", LargeBinary, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("positions", BigInteger, nullable=False),
    Index("job_inputs_by_alias", "alias"),
)
