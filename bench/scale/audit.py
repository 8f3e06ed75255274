"""What an auditor's queries take over many shards' clear columns."""

from functools import partial

from bench.scale.points import timed
from bench.scale.run import MS, PER_1000, Run
from bench.scale.traffic import PERIOD_S, Batch
from draftkeep.errors import InputError
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.storage import Storage

# No query is cut short here: the figure says what the session's own limit would have met.
_LIMIT_S = 600.0


def ask(run: Run, phase: str, at: int, catalog: Catalog, storage: Storage, last: Batch) -> None:
    """Open a session, then a tenant's last hour twice, then the inventory of everything.

    A query that the session refuses, for want of memory, leaves no point and says so.
    """
    tenant, until_s = last.columns["tenant"][0], max(last.columns["created_s"])
    # The values are the bench's own.
    hour = (
        "SELECT count(*), sum(positions) FROM traces "  # noqa: S608
        f"WHERE tenant = '{tenant}' AND created_s > {until_s - PERIOD_S}"
    )
    session, took = timed(
        lambda: AuditSession(catalog, storage, now_s=float(until_s), time_limit_s=_LIMIT_S)
    )
    run.add(phase, "audit_open", at, took, MS)
    with session:
        for step, query in (("audit_first", hour), ("audit_hour", hour)):
            answer, took = timed(partial(session.query, query))
            run.add(phase, step, at, took, MS)
            if not answer.rows[0][0]:
                raise InputError("the audit found none of the traces that were just stored")
        try:
            _, took = timed(lambda: session.report("inventory"))
        except InputError as error:
            run.console.print(f"inventory of {at:,} headers: {error}")
            return
        run.add(phase, "audit_inventory", at, took.over(at / 1000), PER_1000)
