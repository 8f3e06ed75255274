"""What tests of erasure do and look at."""

import sqlalchemy as sa

from draftkeep.ingest.record import SealedTrace
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import ErasureResult, erase_subject
from draftkeep.store.jobs import JobInput
from tests.store.conftest import World


def erase(world: World, subject: str = "ann", *, catalog: Catalog | None = None) -> ErasureResult:
    return erase_subject(
        catalog or world.catalog,
        world.keyring,
        tenant="acme",
        subject=subject,
        now_s=world.clock(),
    )


def store(world: World, *sealed: SealedTrace) -> None:
    world.append(*sealed)
    world.compactor().run_once()


def input_of(sealed: SealedTrace) -> JobInput:
    header = sealed.parsed
    return JobInput(
        tenant=header.tenant,
        alias=header.alias,
        period_id=header.period_id,
        positions=header.positions,
    )


def add_drafter(
    world: World,
    digest: bytes,
    *,
    parent: bytes | None = None,
    learned: SealedTrace | None = None,
    status: str = "registered",
    signed: bool = True,
) -> bytes:
    with world.catalog.begin() as connection:
        connection.execute(
            sa.insert(schema.drafters).values(
                digest=digest,
                parent=parent,
                scope="acme",
                status=status,
                created_s=world.clock(),
                measures={},
                signature=b"s" * 64 if signed else None,
            )
        )
        if learned is not None:
            item = input_of(learned)
            connection.execute(
                sa.insert(schema.lineage).values(
                    drafter=digest,
                    alias=item.alias,
                    period_id=item.period_id,
                    tenant=item.tenant,
                    positions=item.positions,
                )
            )
    return digest


def set_channel(world: World, name: str, digest: bytes) -> None:
    with world.catalog.begin() as connection:
        connection.execute(
            sa.insert(schema.channels).values(scope="acme", name=name, digest=digest, changed_s=0.0)
        )


def statuses(world: World) -> dict[bytes, str]:
    row = schema.drafters.c
    with world.catalog.read() as connection:
        found = connection.execute(sa.select(row.digest, row.status)).all()
    return {digest[:2]: status for digest, status in found}


def pointed(world: World) -> dict[str, bytes | None]:
    row = schema.channels.c
    with world.catalog.read() as connection:
        return {
            found.name: found.digest
            for found in connection.execute(sa.select(row.name, row.digest))
        }
