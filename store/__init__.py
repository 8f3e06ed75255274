"""A trace at rest, and drafters at rest.

Start at `catalog` (what exists), `shard` (one Parquet file), `compactor` (log to shards),
`sweeper` (deadlines and orphans), `erasure`, `check` (do catalog and files agree), `audit` (SQL),
`registry` and `drafter` (drafters).
"""
