"""A trace at rest, and drafters at rest.

Start at `catalog` (what exists; `database` and `migrations` below it), `storage` (where files lie),
`shard` (one Parquet file), `compactor` (log to shards), `compactor_group` (several partitions),
`sweeper` (deadlines and orphans), `erasure`, `check` (do catalog and files agree), `audit` (SQL),
`registry` (which drafters exist and serve), `models` (targets and drafters themselves).
"""
