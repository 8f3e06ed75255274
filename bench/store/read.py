"""The way back: traces selected from shards, opened with a job's keys, and unpacked."""

import time
from collections.abc import Callable
from itertools import islice

from bench.store.work import POSITIONS, Figure, Node
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.codec import decode_body
from draftkeep.ingest.record import SealedTrace, decode_record
from draftkeep.ingest.tables import only_identity
from draftkeep.store.reader import iter_sealed

# As a job does: so many are opened, then decoded.
_TOGETHER = 32


def read_positions_s(node: Node) -> list[Figure]:
    """Positions a CPU-second, from the catalog to arrays; and what each step takes by itself."""
    records = node.records(node.sizes.reads)
    with node.log() as log, node.catalog() as catalog:
        for at in range(0, len(records), 100):
            log.append(records[at : at + 100])
        compactor = node.compactor(log, catalog)
        while compactor.run_once().read:
            pass
        opener = node.opener(catalog)

        def select() -> list[SealedTrace]:
            return list(
                iter_sealed(
                    catalog, node.storage, tenants=None, target=None, not_after_s=node.clock()
                )
            )

        cpu_s = time.process_time()
        positions = 0
        selected = iter_sealed(
            catalog, node.storage, tenants=None, target=None, not_after_s=node.clock()
        )
        while group := list(islice(selected, _TOGETHER)):
            opened = [opener.open(sealed) for sealed in group]
            positions += sum(decode_body(body, only_identity).positions for body in opened)
        cpu_s = time.process_time() - cpu_s
        if positions != len(records) * POSITIONS:
            raise DraftkeepError(f"read {positions} positions of {len(records) * POSITIONS}")
        sealed = [decode_record(record) for record in records]
        bodies: list[bytes] = []
        steps = {
            "select": _cpu_s(select),
            "open": _cpu_s(lambda: bodies.extend(map(opener.open, sealed))),
            "decode": _cpu_s(lambda: [decode_body(body, only_identity) for body in bodies]),
        }
    conditions = {
        "record_bytes": len(records[0]),
        "traces": len(records),
        "positions_a_trace": POSITIONS,
    }
    return [
        Figure(
            metric="read_positions_s_core",
            value=positions / cpu_s,
            unit="positions/CPU-s",
            conditions=conditions,
        ),
        *(
            Figure(
                metric=f"read_{step}_us",
                value=1e6 * step_s / len(records),
                unit="CPU-us/trace",
                conditions=conditions,
            )
            for step, step_s in steps.items()
        ),
    ]


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s
