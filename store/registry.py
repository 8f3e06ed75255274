"""Registry: which drafters exist, which may serve, and which one each channel points at."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, DeniedError
from draftkeep.store.ancestry import clean_ancestor, is_clean
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert
from draftkeep.store.jobs import JobInput
from draftkeep.store.models.drafter_files import need, read_verified, sign_drafter
from draftkeep.store.models.manifest import MANIFEST_FILE, decode_manifest
from draftkeep.store.schema import channels, drafters, jobs, lineage

EVERYONE = "everyone"


def tenant_scope(name: str) -> str:
    """The scope of what learned from this tenant and serves it alone."""
    return f"tenant:{name}"


def scope_of(tenants: Sequence[str]) -> str:
    """The scope that serves these tenants: a single one's own, else everyone's.

    A drafter that learned from one tenant must never draft for another.
    """
    return tenant_scope(tenants[0]) if len(tenants) == 1 else EVERYONE


class Unchecked(Enum):
    """Says that a channel may be moved whatever it points at."""

    UNCHECKED = "unchecked"


UNCHECKED: Final = Unchecked.UNCHECKED


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredDrafter:
    """A drafter as the catalog knows it. `status`: registered, quarantined or retired."""

    digest: bytes
    parent: bytes | None
    scope: str
    status: str
    signed: bool
    created_s: float
    measures: Mapping[str, Any]
    job: str | None


class Registry:
    """Drafters over a catalog and the directory that holds theirs, each named by its hex digest.

    Every change re-checks lineage against tombstones inside its own transaction, so an erasure
    that commits first always wins.
    """

    def __init__(self, catalog: Catalog, drafters_dir: Path) -> None:
        self._catalog = catalog
        self._drafters_dir = drafters_dir

    def path(self, digest: bytes) -> Path:
        """Where the drafter's directory lies, or would."""
        return self._drafters_dir / digest.hex()

    def register(
        self,
        digest: bytes,
        *,
        scope: str,
        inputs: Iterable[JobInput],
        at_s: float,
        job: str | None = None,
    ) -> None:
        """Enter a saved drafter and what it learned from; it cannot serve before `admit`.

        Parent and measures come from its manifest. The same drafter again changes nothing. Raises
        ModelError for a directory that is not what its name says, ConflictError where it is known
        with another scope, and DeniedError where an input,
        the parent or the job was touched by an erasure: delete it and train from a clean ancestor.
        """
        _, files = read_verified(self.path(digest))
        manifest = decode_manifest(need(files, MANIFEST_FILE))
        parent = bytes.fromhex(manifest.parent) if manifest.parent else None
        with self._catalog.begin() as connection:
            if parent is not None:
                _must_be_clean(connection, parent, "its parent")
            if job is not None and _contaminated(connection, job):
                raise DeniedError(
                    f"job {job} learned from erased traces; delete its drafter and its checkpoint"
                )
            connection.execute(
                insert(connection, drafters)
                .values(
                    digest=digest,
                    parent=parent,
                    scope=scope,
                    status="registered",
                    created_s=at_s,
                    measures=dict(manifest.measures),
                    signature=None,
                    job=job,
                )
                .on_conflict_do_nothing()
            )
            _must_have_scope(connection, digest, scope)
            for item in inputs:
                _add_lineage(connection, digest, item)
            # After the rows are in, so that the check reads what erasure will read.
            _must_be_clean(connection, digest, "it")

    def admit(self, digest: bytes, sign: Callable[[bytes], bytes]) -> None:
        """Sign a registered drafter with the gate's key; only then may a channel point at it.

        Raises DeniedError unless it is registered and clean.
        """
        with self._catalog.begin() as connection:
            _must_be_registered(connection, digest)
            _must_be_clean(connection, digest, "it")
            # Signed under the writers' lock: no erasure can commit between check and signature.
            signature = sign_drafter(self.path(digest), sign)
            connection.execute(
                sa.update(drafters).where(drafters.c.digest == digest).values(signature=signature)
            )

    def set_channel(
        self,
        scope: str,
        name: str,
        digest: bytes | None,
        *,
        at_s: float,
        expected: bytes | Unchecked | None = UNCHECKED,
    ) -> None:
        """Point a channel at an admitted drafter of its scope (or of everyone's); None clears it.

        With `expected` the channel moves only from that digest (None: from unset). Raises
        ConflictError where it points elsewhere, DeniedError for a drafter that is unknown,
        unsigned, quarantined, retired, of another scope, or descends from erased data.
        """
        with self._catalog.begin() as connection:
            present = _channel(connection, scope, name)
            if not isinstance(expected, Unchecked) and present != expected:
                raise ConflictError(
                    f"channel {scope}/{name} points at {_short(present)}, expected "
                    f"{_short(expected)}; read it again and decide anew"
                )
            if digest is not None:
                _must_serve(connection, digest, scope)
            row = {"digest": digest, "changed_s": at_s}
            connection.execute(
                insert(connection, channels)
                .values(scope=scope, name=name, **row)
                .on_conflict_do_update(index_elements=["scope", "name"], set_=row)
            )

    def channel(self, scope: str, name: str) -> bytes | None:
        """The digest a channel points at; None where it is unset or its drafter may not serve."""
        with self._catalog.read() as connection:
            digest = _channel(connection, scope, name)
            if digest is None or _status(connection, digest) != "registered":
                return None
            return digest

    def status(self, digest: bytes) -> str | None:
        """`registered`, `quarantined`, `retired`, or None for a drafter nobody registered."""
        with self._catalog.read() as connection:
            return _status(connection, digest)

    def clean_ancestor(self, digest: bytes) -> bytes | None:
        """The nearest ancestor that may serve; None where there is none."""
        with self._catalog.read() as connection:
            return clean_ancestor(connection, digest)

    def list(self) -> tuple[RegisteredDrafter, ...]:
        """Every drafter, newest first."""
        query = sa.select(drafters).order_by(drafters.c.created_s.desc(), drafters.c.digest)
        with self._catalog.read() as connection:
            return tuple(
                RegisteredDrafter(
                    digest=row.digest,
                    parent=row.parent,
                    scope=row.scope,
                    status=row.status,
                    signed=row.signature is not None,
                    created_s=row.created_s,
                    measures=row.measures,
                    job=row.job,
                )
                for row in connection.execute(query)
            )


def _add_lineage(connection: Connection, digest: bytes, item: JobInput) -> None:
    connection.execute(
        insert(connection, lineage)
        .values(
            drafter=digest,
            alias=item.alias,
            period_id=item.period_id,
            tenant=item.tenant,
            positions=item.positions,
        )
        .on_conflict_do_nothing()
    )


def _must_have_scope(connection: Connection, digest: bytes, scope: str) -> None:
    known = connection.scalar(sa.select(drafters.c.scope).where(drafters.c.digest == digest))
    if known != scope:
        raise ConflictError(
            f"drafter {_short(digest)} is registered with scope {known}, got {scope}; a drafter's "
            "scope never changes"
        )


def _must_serve(connection: Connection, digest: bytes, scope: str) -> None:
    _must_be_registered(connection, digest)
    row = connection.execute(
        sa.select(drafters.c.scope, drafters.c.signature).where(drafters.c.digest == digest)
    ).one()
    if row.signature is None:
        raise DeniedError(f"drafter {_short(digest)} is not signed; the gate must admit it first")
    if row.scope not in (scope, EVERYONE):
        raise DeniedError(
            f"drafter {_short(digest)} has scope {row.scope}, the channel {scope}; a drafter "
            "serves only the scope it learned from"
        )
    _must_be_clean(connection, digest, "it")


def _must_be_registered(connection: Connection, digest: bytes) -> None:
    status = _status(connection, digest)
    if status != "registered":
        raise DeniedError(
            f"drafter {_short(digest)} is {status or 'not registered'}, expected registered"
        )


def _must_be_clean(connection: Connection, digest: bytes, which: str) -> None:
    if not is_clean(connection, digest):
        raise DeniedError(
            f"drafter {_short(digest)}: {which} is quarantined, unknown or descends from erased "
            "data; delete it and train again from a clean ancestor"
        )


def _status(connection: Connection, digest: bytes) -> str | None:
    return connection.scalar(sa.select(drafters.c.status).where(drafters.c.digest == digest))


def _channel(connection: Connection, scope: str, name: str) -> bytes | None:
    return connection.scalar(
        sa.select(channels.c.digest).where(channels.c.scope == scope, channels.c.name == name)
    )


def _contaminated(connection: Connection, job: str) -> bool:
    return bool(connection.scalar(sa.select(jobs.c.contaminated).where(jobs.c.id == job)))


def _short(digest: bytes | None) -> str:
    return "nothing" if digest is None else digest.hex()[:12]
