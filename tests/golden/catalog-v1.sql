BEGIN TRANSACTION;
CREATE TABLE channels (
	scope TEXT NOT NULL, 
	name TEXT NOT NULL, 
	digest BLOB, 
	changed_s FLOAT NOT NULL, 
	PRIMARY KEY (scope, name), 
	FOREIGN KEY(digest) REFERENCES drafters (digest)
);
CREATE TABLE dead_letters (
	id INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	sha256 BLOB NOT NULL, 
	count INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	tenant TEXT, 
	alias BLOB, 
	cluster TEXT NOT NULL, 
	topic TEXT NOT NULL, 
	partition INTEGER NOT NULL, 
	"offset" BIGINT NOT NULL, 
	seen_s FLOAT NOT NULL, 
	expiry_s BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (reason, sha256)
);
CREATE TABLE drafters (
	digest BLOB NOT NULL, 
	parent BLOB, 
	scope TEXT NOT NULL, 
	status TEXT NOT NULL, 
	created_s FLOAT NOT NULL, 
	measures JSON NOT NULL, 
	signature BLOB, 
	job TEXT, 
	PRIMARY KEY (digest), 
	CONSTRAINT drafters_status CHECK (status IN ('registered', 'quarantined', 'retired')), 
	FOREIGN KEY(parent) REFERENCES drafters (digest)
);
INSERT INTO "drafters" VALUES(X'6464646464646464646464646464646464646464646464646464646464646464',NULL,'everyone','registered',1.0,'{"replay_acceptance": 0.5}',X'67676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767676767','j1');
CREATE TABLE drops (
	source TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	hour_s BIGINT NOT NULL, 
	count BIGINT NOT NULL, 
	PRIMARY KEY (source, reason, hour_s)
);
CREATE TABLE erasures (
	id BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	subject_ref BLOB NOT NULL, 
	state TEXT NOT NULL, 
	planned_s FLOAT NOT NULL, 
	keys_destroyed_s FLOAT, 
	aliases INTEGER NOT NULL, 
	traces BIGINT NOT NULL, 
	keys_destroyed INTEGER NOT NULL, 
	drafters_quarantined INTEGER NOT NULL, 
	channels_moved INTEGER NOT NULL, 
	jobs_contaminated INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT erasures_state CHECK (state IN ('planned', 'done'))
);
CREATE TABLE gaps (
	id INTEGER NOT NULL, 
	cluster TEXT NOT NULL, 
	topic TEXT NOT NULL, 
	partition INTEGER NOT NULL, 
	first BIGINT NOT NULL, 
	next BIGINT NOT NULL, 
	seen_s FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE job_inputs (
	job TEXT NOT NULL, 
	alias BLOB NOT NULL, 
	period_id BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	positions BIGINT NOT NULL, 
	PRIMARY KEY (job, alias, period_id), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
CREATE TABLE jobs (
	id TEXT NOT NULL, 
	scope TEXT NOT NULL, 
	state TEXT NOT NULL, 
	contaminated BOOLEAN NOT NULL, 
	parent BLOB, 
	drafter BLOB, 
	started_s FLOAT NOT NULL, 
	ended_s FLOAT, 
	record JSON NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT jobs_state CHECK (state IN ('running', 'done', 'failed'))
);
INSERT INTO "jobs" VALUES('j1','tenant:acme','done',0,NULL,X'6464646464646464646464646464646464646464646464646464646464646464',1.0,2.0,'{"steps": 7}');
CREATE TABLE lineage (
	drafter BLOB NOT NULL, 
	alias BLOB NOT NULL, 
	period_id BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	positions BIGINT NOT NULL, 
	PRIMARY KEY (drafter, alias, period_id), 
	FOREIGN KEY(drafter) REFERENCES drafters (digest)
);
CREATE TABLE node_tenants (
	node TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	PRIMARY KEY (node, tenant), 
	FOREIGN KEY(node) REFERENCES nodes (name)
);
INSERT INTO "node_tenants" VALUES('n1','acme');
CREATE TABLE nodes (
	name TEXT NOT NULL, 
	public_key BLOB NOT NULL, 
	enrolled_s FLOAT NOT NULL, 
	revoked_s FLOAT, 
	PRIMARY KEY (name)
);
INSERT INTO "nodes" VALUES('n1',X'6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B',1.0,NULL);
CREATE TABLE offsets (
	cluster TEXT NOT NULL, 
	topic TEXT NOT NULL, 
	partition INTEGER NOT NULL, 
	next BIGINT NOT NULL, 
	changed_s FLOAT NOT NULL, 
	PRIMARY KEY (cluster, topic, partition)
);
INSERT INTO "offsets" VALUES('c','t',0,7,1.5);
CREATE TABLE periods (
	period_id BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	start_s BIGINT NOT NULL, 
	destroy_at_s BIGINT NOT NULL, 
	issued_expiry_s BIGINT NOT NULL, 
	public_key BLOB NOT NULL, 
	signature BLOB NOT NULL, 
	PRIMARY KEY (period_id)
);
CREATE TABLE schema_version (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_version" VALUES(1);
CREATE TABLE shards (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	format INTEGER NOT NULL, 
	bucket_s BIGINT NOT NULL, 
	target BLOB NOT NULL, 
	rows BIGINT NOT NULL, 
	bytes BIGINT NOT NULL, 
	sha256 BLOB NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "shards" VALUES(1,'1800000000-54545454-a.parquet',1,1800000000,X'5454545454545454545454545454545454545454545454545454545454545454',2,4096,X'7373737373737373737373737373737373737373737373737373737373737373',1799990000.5);
CREATE TABLE tombstones (
	kind TEXT NOT NULL, 
	value BLOB NOT NULL, 
	period_id BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	erasure BLOB NOT NULL, 
	at_s FLOAT NOT NULL, 
	PRIMARY KEY (kind, value, period_id), 
	CONSTRAINT tombstones_kind CHECK (kind IN ('alias', 'trace', 'tenant')), 
	FOREIGN KEY(erasure) REFERENCES erasures (id)
);
CREATE TABLE trace_ids (
	bucket_s BIGINT NOT NULL, 
	trace_id BLOB NOT NULL, 
	node TEXT NOT NULL, 
	digest BLOB NOT NULL, 
	tenant TEXT NOT NULL, 
	alias BLOB NOT NULL, 
	period_id BLOB NOT NULL, 
	positions BIGINT NOT NULL, 
	shard INTEGER, 
	PRIMARY KEY (bucket_s, trace_id, node), 
	FOREIGN KEY(shard) REFERENCES shards (id)
);
INSERT INTO "trace_ids" VALUES(1800000000,X'01010101010101010101010101010101','n1',X'0101010101010101010101010101010101010101010101010101010101010101','acme',X'61616161616161616161616161616161',X'70707070707070707070707070707070',5,1);
INSERT INTO "trace_ids" VALUES(1800000000,X'02020202020202020202020202020202','n1',X'0202020202020202020202020202020202020202020202020202020202020202','acme',X'61616161616161616161616161616161',X'70707070707070707070707070707070',5,NULL);
CREATE INDEX shards_by_bucket ON shards (bucket_s, target);
CREATE INDEX periods_by_tenant ON periods (tenant, start_s);
CREATE INDEX erasures_by_subject ON erasures (tenant, subject_ref);
CREATE INDEX drafters_by_parent ON drafters (parent);
CREATE INDEX trace_ids_by_shard ON trace_ids (shard);
CREATE INDEX trace_ids_by_alias ON trace_ids (alias);
CREATE INDEX trace_ids_by_period ON trace_ids (period_id);
CREATE INDEX tombstones_by_value ON tombstones (value);
CREATE INDEX lineage_by_alias ON lineage (alias);
CREATE INDEX job_inputs_by_alias ON job_inputs (alias);
COMMIT;
