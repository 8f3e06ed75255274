"""A node that starts while PostgreSQL is away waits for it: it cannot capture or erase without."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from draftkeep.config import Config
from draftkeep.errors import PermanentError, StoreError
from draftkeep.outage import Outage

T = TypeVar("T")


class StoppedError(Exception):
    """The wait was to end before there was a catalog."""


def wait_for_catalog(config: Config, stop: threading.Event, attempt: Callable[[], T]) -> T:
    """What `attempt` returns, which opens the configured catalog and does what a start needs of it.

    Where PostgreSQL cannot be reached it is tried again after a growing pause until `stop`, which
    raises StoppedError. A SQLite catalog that cannot be opened, a newer schema and a wrong
    configuration are for an operator: StoreError or ConfigError.
    """
    outage = Outage("opening the catalog")
    while not stop.is_set():
        try:
            opened = attempt()
        except PermanentError:
            raise
        except StoreError as error:
            if not config.catalog.url:
                raise
            outage.failed(f"{error}. The node serves once it is open", time.monotonic())
            stop.wait(outage.pause_s)
        else:
            outage.worked(time.monotonic())
            return opened
    raise StoppedError
