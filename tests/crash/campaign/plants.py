"""Faults that a campaign must find: each breaks one promise of the production code in a child."""

import functools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from draftkeep.store.database import insert
from draftkeep.store.offsets import advance
from draftkeep.store.schema import trace_ids
from tests.crash.campaign.points import patch

_COMPACTOR = "draftkeep.store.compactor"


def free_early() -> None:
    """A forwarder that gives up records before Kafka has acknowledged them."""

    def wrap(read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def read_and_free(log: Any, *arguments: Any) -> Any:
            records = read(log, *arguments)
            if records:
                log.free(records[-1].offset + 1)
            return records

        return read_and_free

    patch("draftkeep.ingest.log_reader:LogReader.read", wrap)


def offset_early() -> None:
    """A compactor that moves its offset in a transaction of its own, before it writes."""

    def wrap(store: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(store)
        def move_and_store(
            compactor: Any, candidates: Any, unreadable: Any, offset: Any, gaps: Any, following: Any
        ) -> Any:
            with compactor._catalog.begin() as connection:
                advance(connection, offset, following, 0.0, gaps)
            return store(compactor, candidates, unreadable, offset, gaps, following)

        return move_and_store

    patch(f"{_COMPACTOR}:Compactor._store", wrap)
    patch(f"{_COMPACTOR}:advance", lambda _: lambda *_arguments: None)


class _Amnesia(dict[Any, Any]):
    """Has nothing, whatever it is given."""

    def __contains__(self, key: object) -> bool:
        return False


def forget_ids() -> None:
    """A compactor that trusts offsets alone and does not ask which traces it has."""

    def insert_new(connection: Any, table: sa.Table, rows: Any) -> None:
        connection.execute(insert(connection, table).on_conflict_do_nothing(), list(rows))

    def wrap(insert_many: Callable[..., Any]) -> Callable[..., Any]:
        return lambda connection, table, rows: (insert_new if table is trace_ids else insert_many)(
            connection, table, rows
        )

    patch(f"{_COMPACTOR}:known_digests", lambda _: lambda *_arguments: _Amnesia())
    patch(f"{_COMPACTOR}:insert_many", wrap)


PLANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "free_early": free_early,
    "offset_early": offset_early,
    "forget_ids": forget_ids,
}
