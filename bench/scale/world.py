"""The store behind one node, in one directory, on a clock that the bench moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.scale.traffic import PERIOD_S, START_S
from tests.clock import Clock
from tests.deployment import Deployment

TENANTS = ("tenant-0", "tenant-1", "tenant-2", "tenant-3")
_LOG_BYTES = 1 << 36


@contextmanager
def open_world(directory: Path) -> Iterator[Deployment]:
    """The world in a directory, made where there is none; its clock shows the newest trace's time.

    A run that was stopped finds in it what it left.
    """
    world = Deployment.open(
        directory,
        clock=Clock(START_S + 1.0),
        tenants=TENANTS,
        log_bytes=_LOG_BYTES,
        log_bucket_s=PERIOD_S,
    )
    try:
        yield world
    finally:
        world.close()
