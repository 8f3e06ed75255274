"""Merging shards: which of them together, and their rows as one sorted stream, out of core."""

import heapq
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from operator import itemgetter

import pyarrow as pa
import pyarrow.parquet as pq

from draftkeep.errors import ShardError
from draftkeep.store.shard import decoding, note_encapsulations, open_shard
from draftkeep.store.shard_rows import ShardRow
from draftkeep.store.shard_writer import SortKey, is_full
from draftkeep.store.storage import Storage

_KEY = ("tenant", "domain", "created_s", "trace_id", "node")
# A merge holds a few row groups of every input; what is left over is for the next one.
_MERGE_INPUTS = 16
_MERGE_RATIO = 2
# A row: its key, the row group it is in, its place there, its share id, its size.
_Picked = tuple[SortKey, pa.Table, int, bytes, int]


def merge_groups(small: Sequence[ShardRow], target_bytes: int) -> list[list[ShardRow]]:
    """Runs of at least two shards, each run of about `target_bytes` at most, small ones first.

    Each is of one bucket and target.
    """
    families: dict[tuple[int, bytes], list[ShardRow]] = {}
    for shard in small:
        families.setdefault((shard.bucket_s, shard.target), []).append(shard)
    groups = []
    for family in families.values():
        group: list[ShardRow] = []
        for shard in sorted(family, key=lambda item: (item.size_bytes, item.id)):
            joined_bytes = sum(item.size_bytes for item in group)
            if group and (
                len(group) == _MERGE_INPUTS
                or joined_bytes + shard.size_bytes > target_bytes
                or shard.size_bytes > _MERGE_RATIO * joined_bytes
            ):
                groups.append(group)
                group = []
            group.append(shard)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def merge_tables(
    storage: Storage, names: Sequence[str], *, dead: Collection[tuple[bytes, str]]
) -> Iterator[pa.Table]:
    """The rows of shards in a shard's order, as tables that each make a row group.

    Left out are those whose trace id and node are in `dead`. Each share's encapsulation goes
    with the first of its rows that is left. Memory is bounded by a few row groups of
    each input, however long the inputs are. Raises like `read_shard`.
    """
    with ExitStack() as stack:
        gathered = _Gathered()
        files = [stack.enter_context(open_shard(storage, name)) for name in names]
        streams = [
            _rows(file, name, gathered.shares, dead)
            for file, name in zip(files, names, strict=True)
        ]
        for row in heapq.merge(*streams, key=itemgetter(0)):
            if gathered.is_full(row):
                yield gathered.take()
            gathered.add(row)
        if gathered.rows:
            yield gathered.take()


class _Shares:
    """Encapsulations that were read and not yet written, and which were written."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, bytes] = {}
        self._written: set[bytes] = set()

    def note(self, table: pa.Table) -> None:
        found: dict[bytes, bytes] = {}
        note_encapsulations(table, found)
        for share_id, encapsulation in found.items():
            if share_id not in self._written:
                self._waiting[share_id] = encapsulation

    def first_use(self, share_id: bytes) -> bytes | None:
        """The encapsulation where this is the share's first row in the output, else None."""
        if share_id in self._written:
            return None
        if share_id not in self._waiting:
            raise ShardError(
                "a shard has a row without its encapsulation; run draftkeep catalog check, and "
                "restore the shard that it names"
            )
        self._written.add(share_id)
        return self._waiting.pop(share_id)


class _Gathered:
    """Rows that wait until they are enough for a row group."""

    def __init__(self) -> None:
        self.rows: list[_Picked] = []
        self.shares = _Shares()
        self._size_bytes = 0

    def is_full(self, row: _Picked) -> bool:
        return bool(self.rows) and is_full(len(self.rows), self._size_bytes + row[4])

    def add(self, row: _Picked) -> None:
        self.rows.append(row)
        self._size_bytes += row[4]

    def take(self) -> pa.Table:
        """The rows as one table; nothing is left."""
        sources: dict[int, tuple[int, pa.Table]] = {}
        places, start = [], 0
        for _, table, row, _, _ in self.rows:
            if id(table) not in sources:
                sources[id(table)] = (start, table)
                start += table.num_rows
            places.append(sources[id(table)][0] + row)
        every = pa.concat_tables([table for _, table in sources.values()])
        taken = every.take(pa.array(places)).combine_chunks()
        encapsulations = [self.shares.first_use(share_id) for _, _, _, share_id, _ in self.rows]
        self.rows, self._size_bytes = [], 0
        column = taken.schema.get_field_index("encapsulation")
        return taken.set_column(
            column, taken.schema.field(column), pa.array(encapsulations, type=pa.binary())
        )


def _rows(
    file: pq.ParquetFile, name: str, shares: _Shares, dead: Collection[tuple[bytes, str]]
) -> Iterator[_Picked]:
    for group in range(file.num_row_groups):
        with decoding(name):
            table = file.read_row_group(group, use_threads=False)
            shares.note(table)
            columns = [table.column(key).to_pylist() for key in (*_KEY, "share_id", "body_bytes")]
        for place, (tenant, domain, created_s, trace_id, node, share_id, size) in enumerate(
            zip(*columns, strict=True)
        ):
            if (trace_id, node) not in dead:
                key = (tenant, domain or "", created_s, trace_id, node)
                yield key, table, place, share_id, size
