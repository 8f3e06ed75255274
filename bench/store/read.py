"""The way back: traces selected from shards, opened with a job's keys, and unpacked."""

import time
from itertools import islice, pairwise

from bench.store.work import POSITIONS, Figure, Node
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.codec import decode_bodies
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.tables import only_identity
from draftkeep.ingest.trace import Trace
from draftkeep.store.catalog import Catalog
from draftkeep.store.reader import iter_sealed

# As a job does: so many go through the steps together.
_TOGETHER = 32
_STEPS = ("select", "open", "decode")
# Another tenant of the machine slows one pass by a fifth, seldom most of them.
_PASSES = 5


def read_positions_s(node: Node) -> list[Figure]:
    """Positions a CPU-second, from the catalog to arrays, and how the time divides by step.

    All of them are of one pass, the median of five.
    """
    records = node.records(node.sizes.reads)
    with node.log() as log, node.catalog() as catalog:
        for at in range(0, len(records), 100):
            log.append(records[at : at + 100])
        compactor = node.compactor(log, catalog)
        while compactor.run_once().read:
            pass
        opener = node.opener(catalog)
        expected = len(records) * POSITIONS
        passes = [_read(node, catalog, opener, expected) for _ in range(_PASSES)]
    steps_s = sorted(passes, key=sum)[_PASSES // 2]
    conditions = {
        "record_bytes": len(records[0]),
        "traces": len(records),
        "positions_a_trace": POSITIONS,
        "passes": _PASSES,
    }
    return [
        Figure(
            metric="read_positions_s_core",
            value=expected / sum(steps_s),
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
            for step, step_s in zip(_STEPS, steps_s, strict=True)
        ),
    ]


def _read(node: Node, catalog: Catalog, opener: Opener, expected: int) -> tuple[float, ...]:
    """CPU-seconds of each step in one pass over all traces."""
    spent_s = [0.0] * len(_STEPS)
    positions = 0
    selected = iter_sealed(
        catalog, node.storage, tenants=None, target=None, not_after_s=node.clock()
    )
    group = None
    while group != []:
        marks_s = [time.process_time()]
        group = list(islice(selected, _TOGETHER))
        marks_s.append(time.process_time())
        opened = opener.open_all(group)
        marks_s.append(time.process_time())
        traces = decode_bodies(opened, only_identity)
        positions += sum(trace.positions for trace in traces if isinstance(trace, Trace))
        marks_s.append(time.process_time())
        for step, (start_s, end_s) in enumerate(pairwise(marks_s)):
            spent_s[step] += end_s - start_s
    if positions != expected:
        raise DraftkeepError(f"read {positions} positions of {expected}")
    return tuple(spent_s)
