"""What an auditor can ask: views over the clear facts, and named reports over the views.

Names that begin with an underscore are the registered facts; the views give ids as lowercase hex
and codes as words. Times end in `_s` and are Unix seconds. `session.now_s` is the time of the
audit by the auditor's clock.
"""

VIEWS = {
    # One row a stored trace. `deadline_s` is the earlier of header and period record; an erased
    # row has no key any more and goes with the next rewrite.
    "traces": """
        SELECT lower(hex(row.trace_id)) AS trace_id,
               lower(hex(row.request_id)) AS request_id,
               row.tenant,
               lower(hex(row.period_id)) AS period_id,
               lower(hex(row.alias)) AS alias,
               ['anonymous', 'named'][row.subject_kind + 1] AS subject_kind,
               lower(hex(row.share_id)) AS share_id,
               lower(hex(row.target)) AS target,
               lower(hex(row.tokenizer)) AS tokenizer,
               row.node,
               row.created_s,
               row.expiry_s,
               least(row.expiry_s, period.destroy_at_s) AS deadline_s,
               ['tenant', 'pool', 'everyone'][row.consent + 1] AS consent,
               row.policy_version,
               ['served', 'relabelled', 'tap'][row.origin + 1] AS origin,
               row.domain,
               row.prompt_tokens,
               row.positions,
               row.body_bytes,
               (alias_stone.value IS NOT NULL
                OR row.trace_id IN (SELECT value FROM _tombstones WHERE kind = 'trace')
                OR row.tenant IN (SELECT decode(value) FROM _tombstones WHERE kind = 'tenant')
               ) AS erased
        FROM _shard_rows AS row
        LEFT JOIN _periods AS period ON period.period_id = row.period_id
        LEFT JOIN (SELECT value, period_id FROM _tombstones WHERE kind = 'alias') AS alias_stone
          ON alias_stone.value = row.alias AND alias_stone.period_id = row.period_id
    """,
    "shards": """
        SELECT name, format, bucket_s AS expiry_s, lower(hex(target)) AS target, rows, bytes,
               lower(hex(sha256)) AS sha256, created_s
        FROM _shards
    """,
    "tenants": """
        SELECT tenant,
               count(*) AS traces,
               sum(positions) AS positions,
               sum(body_bytes) AS body_bytes,
               count(DISTINCT share_id) AS shares,
               count(DISTINCT alias) AS aliases,
               count(*) FILTER (WHERE erased) AS erased,
               min(created_s) AS oldest_s,
               min(deadline_s) AS first_deadline_s,
               max(deadline_s) AS last_deadline_s
        FROM traces GROUP BY tenant
    """,
    # Public facts of periods only: whether a private key exists is the keyring's to say.
    "keys": """
        SELECT tenant, lower(hex(period_id)) AS period_id, start_s, destroy_at_s,
               issued_expiry_s, lower(sha256(public_key)) AS public_key_sha256,
               destroy_at_s <= (SELECT now_s FROM session) AS past_deadline
        FROM _periods
    """,
    "nodes": """
        SELECT name, lower(hex(public_key)) AS public_key, enrolled_s, revoked_s,
               (SELECT list(tenant ORDER BY tenant) FROM _node_tenants AS allowed
                WHERE allowed.node = node.name) AS tenants
        FROM _nodes AS node
    """,
    # `rows_left` counts stored rows that still wait for the rewrite.
    "erasures": """
        SELECT lower(hex(erasure.id)) AS id, erasure.tenant, state, planned_s, keys_destroyed_s,
               aliases, traces, keys_destroyed, drafters_quarantined, channels_moved,
               jobs_contaminated, coalesce(waiting.rows_left, 0) AS rows_left
        FROM _erasures AS erasure
        LEFT JOIN (
            SELECT stone.erasure, count(*) AS rows_left
            FROM _shard_rows AS row JOIN _tombstones AS stone
              ON stone.value = row.alias AND stone.period_id = row.period_id
            WHERE stone.kind = 'alias' GROUP BY stone.erasure
        ) AS waiting ON waiting.erasure = erasure.id
    """,
    # What the broker still has of erased subjects, by request and partition. `deleted`: gone, but
    # a crash of the brokers might still bring it back.
    "log_deletions": """
        SELECT request, cluster, name, topic, partition, up_to, requested_s, deleted_s, attempts,
               settled_s,
               coalesce(outcome, CASE WHEN deleted_s IS NULL THEN 'owed' ELSE 'deleted' END)
                 AS state
        FROM _log_deletions
    """,
    "tombstones": """
        SELECT kind, lower(hex(value)) AS value, lower(hex(period_id)) AS period_id, tenant,
               lower(hex(erasure)) AS erasure, at_s
        FROM _tombstones
    """,
    "jobs": """
        SELECT id, scope, state, contaminated, lower(hex(parent)) AS parent,
               lower(hex(drafter)) AS drafter, started_s, ended_s, record
        FROM _jobs
    """,
    "drafters": """
        SELECT lower(hex(digest)) AS digest, lower(hex(parent)) AS parent, scope, status,
               created_s, measures, signature IS NOT NULL AS signed, job
        FROM _drafters
    """,
    "lineage": """
        SELECT lower(hex(drafter)) AS drafter, tenant, lower(hex(alias)) AS alias,
               lower(hex(period_id)) AS period_id, positions
        FROM _lineage
    """,
    "channels": """
        SELECT scope, name, lower(hex(digest)) AS digest, changed_s FROM _channels
    """,
    "drops": "SELECT source, reason, hour_s, count FROM _drops",
    "gaps": "SELECT cluster, topic, partition, first, next, seen_s FROM _gaps",
    "offsets": "SELECT cluster, name, topic, partition, next, changed_s FROM _offsets",
    "dead_letters": """
        SELECT reason, detail, lower(hex(sha256)) AS sha256, count, tenant,
               lower(hex(alias)) AS alias, cluster, topic, partition, "offset", seen_s, expiry_s
        FROM _dead_letters
    """,
}

# Reports. `overdue` must be empty: a row is data past its deadline that a sweep should have taken.
REPORTS = {
    "inventory": """
        SELECT tenant, domain, count(*) AS traces, sum(positions) AS positions,
               sum(body_bytes) AS body_bytes, count(DISTINCT share_id) AS shares,
               count(DISTINCT node) AS nodes, count(*) FILTER (WHERE erased) AS erased,
               min(created_s) AS oldest_s, min(deadline_s) AS first_deadline_s
        FROM traces GROUP BY tenant, domain ORDER BY tenant, domain
    """,
    "erasures": "SELECT * FROM erasures ORDER BY planned_s, id",
    # One row an erasure, and one without an erasure for each request that traces made which came
    # from a node after theirs. `not asked`: no compactor has taken it up, or the policy is never.
    "log_deletions": """
        SELECT lower(hex(erasure.id)) AS erasure, erasure.tenant,
               CASE WHEN erasure.state = 'planned' THEN 'not done'
                    WHEN request IS NULL AND erasure.log_request IS NULL THEN 'not asked'
                    WHEN owed > 0 THEN 'owed' WHEN deleted > 0 THEN 'deleted' ELSE 'settled'
               END AS state,
               coalesce(owed, 0) AS owed, coalesce(deleted, 0) AS deleted,
               coalesce(verified, 0) AS verified, coalesce(topic_gone, 0) AS topic_gone,
               erasure.keys_destroyed_s, requested_s,
               CASE WHEN owed + deleted = 0 THEN settled_s END AS settled_s
        FROM _erasures AS erasure FULL JOIN (
            SELECT request, min(requested_s) AS requested_s, max(settled_s) AS settled_s,
                   count(*) FILTER (WHERE state = 'owed') AS owed,
                   count(*) FILTER (WHERE state = 'deleted') AS deleted,
                   count(*) FILTER (WHERE state = 'verified') AS verified,
                   count(*) FILTER (WHERE state = 'topic gone') AS topic_gone
            FROM log_deletions GROUP BY request
        ) AS asked ON asked.request = erasure.log_request
        ORDER BY coalesce(requested_s, erasure.planned_s), erasure
    """,
    "drafters": """
        SELECT drafter.digest, drafter.scope, drafter.status, drafter.signed, drafter.parent,
               count(DISTINCT lineage.alias) AS aliases,
               coalesce(sum(lineage.positions), 0) AS positions,
               (SELECT list(scope || '/' || name ORDER BY scope, name) FROM channels
                WHERE channels.digest = drafter.digest) AS channels
        FROM drafters AS drafter LEFT JOIN lineage ON lineage.drafter = drafter.digest
        GROUP BY ALL ORDER BY drafter.digest
    """,
    "losses": """
        SELECT 'drop' AS kind, source, reason, sum(count)::BIGINT AS traces
        FROM drops GROUP BY ALL
        UNION ALL SELECT 'dead letter', cluster, reason, sum(count)::BIGINT
        FROM dead_letters GROUP BY ALL
        UNION ALL SELECT 'gap', cluster, 'not in the log', sum(next - first)::BIGINT
        FROM gaps GROUP BY ALL
        ORDER BY kind, source, reason
    """,
    "overdue": """
        SELECT 'shard' AS kind, name, expiry_s FROM shards
        WHERE expiry_s <= (SELECT now_s FROM session)
        UNION ALL SELECT 'dead letter', sha256, expiry_s FROM dead_letters
        WHERE expiry_s <= (SELECT now_s FROM session)
        ORDER BY kind, name
    """,
}
