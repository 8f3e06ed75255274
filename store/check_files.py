"""What must hold between the catalog's shard rows and the files: there, whole, and all of them."""

import sqlalchemy as sa

from draftkeep.errors import ShardError
from draftkeep.store.catalog import Catalog
from draftkeep.store.check_rules import Repair, RuleResult, examples
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard import read_keys
from draftkeep.store.shard_rows import ShardRow, file_digest, list_shards
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import find_orphans

_MISSING = "every listed file is there"
_SIZE = "every file has the size it was listed with"
_DIGEST = "every file has the digest it was listed with"
_TRACES = "a file holds the traces that the catalog has for it"
_RESTORE = "restore the file from a backup; its row stays until then"
_FIND = f"check that shards.url (or state_dir) is the one it was written under, or {_RESTORE}"
_REMEDIES = {
    _MISSING: _FIND,
    _SIZE: _RESTORE,
    _DIGEST: _RESTORE,
    _TRACES: "restore catalog and shards from one backup",
}


def check_files(
    catalog: Catalog, storage: Storage, *, now_s: float, grace_s: float, digests: bool
) -> list[RuleResult]:
    """Compare every listed shard with its file, and every file with the list.

    `digests` reads all files; without it a file of the right size is taken for what it was.
    """
    rules = list(_REMEDIES) if digests else [_MISSING, _SIZE]
    broken: dict[str, list[str]] = {rule: [] for rule in rules}
    with catalog.read() as connection:
        # Of one past its deadline the catalog may have given up rows already.
        listed = list_shards(connection, shards.c.bucket_s > int(now_s))
    files = storage.list()
    sizes = {file.name: file.size_bytes for file in files}
    for shard in listed:
        rule = _broken_rule(catalog, storage, shard, sizes.get(shard.name), digests)
        # A shard that was replaced since it was listed breaks no rule.
        if rule is not None and _is_listed(catalog, shard):
            broken[rule].append(shard.name)
    found = [_finding(rule, names, _REMEDIES[rule], Repair.NONE) for rule, names in broken.items()]
    orphans = find_orphans(catalog, storage, files, before_s=now_s - grace_s)
    rule = "every file past its grace is listed"
    return [*found, _finding(rule, orphans, "run draftkeep compact, or repair", Repair.SWEEP)]


def _broken_rule(
    catalog: Catalog, storage: Storage, shard: ShardRow, size_bytes: int | None, digests: bool
) -> str | None:
    """The first rule that this shard's file breaks; the later ones say nothing of it then."""
    if size_bytes != shard.size_bytes:
        return _MISSING if size_bytes is None else _SIZE
    if not digests:
        return None
    try:
        if not _is_whole(storage, shard):
            return _DIGEST
        return None if read_keys(storage, shard.name) == _known(catalog, shard) else _TRACES
    except FileNotFoundError:
        return _MISSING
    except ShardError:
        # The bytes that were listed, and yet no shard of a format this version reads.
        return _TRACES


def _is_whole(storage: Storage, shard: ShardRow) -> bool:
    try:
        return file_digest(storage, shard.name) == shard.sha256
    except ShardError:
        return False


def _known(catalog: Catalog, shard: ShardRow) -> frozenset[tuple[bytes, str]]:
    row = trace_ids.c
    with catalog.read() as connection:
        query = sa.select(row.trace_id, row.node).where(row.shard == shard.id)
        return frozenset((found.trace_id, found.node) for found in connection.execute(query))


def _is_listed(catalog: Catalog, shard: ShardRow) -> bool:
    with catalog.read() as connection:
        return bool(list_shards(connection, shards.c.id == shard.id))


def _finding(rule: str, names: list[str], remedy: str, repair: Repair) -> RuleResult:
    return RuleResult(
        rule=rule, broken=len(names), examples=examples(names), remedy=remedy, repair=repair
    )
