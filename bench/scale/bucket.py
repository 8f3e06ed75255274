"""One large expiry bucket: half an hour of 1,000 traces a second.

What matters of it is its end: a sweep takes all of it at once, under the writers' lock.
"""

from bench.scale.catalog import Filling
from bench.scale.probes import Probes
from bench.scale.run import Run
from bench.scale.traffic import Traffic
from draftkeep.store.catalog import Catalog
from draftkeep.store.storage_local import LocalStorage

PHASE = "bucket"


def one_bucket(run: Run) -> None:
    """Fill the bucket, and one trace of the next, in SQLite; then let it expire."""
    directory = run.directory / PHASE
    size = run.sizes.bucket
    traffic = Traffic(per_bucket=size)
    storage = LocalStorage(directory / "shards")
    catalog = Catalog.open(directory / "catalog.db")
    try:
        Filling(run, PHASE, catalog, storage, traffic, readable=False).fill(size)
        if not run.points.has(PHASE, "expire", size):
            probes = Probes(run, PHASE, catalog, storage)
            probes.expire_oldest(size, traffic.expiry_s(1))
    finally:
        catalog.close()
