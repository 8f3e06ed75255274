"""The one row of an erasure, for tests of what follows from it."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.store import schema


def insert_erasure(connection: Connection, erasure: bytes, **values: Any) -> None:
    """An erasure of tenant acme that is done and touched nothing, but for `values`."""
    counts = ("aliases", "traces", "keys_destroyed", "drafters_quarantined", "channels_moved")
    row = {
        "id": erasure,
        "tenant": "acme",
        "subject_ref": erasure,
        "state": "done",
        "planned_s": 1.0,
        "jobs_contaminated": 0,
        **dict.fromkeys(counts, 0),
    }
    connection.execute(sa.insert(schema.erasures).values(row | values))
