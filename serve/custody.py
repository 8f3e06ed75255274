"""The parts of a node that it can serve without: keyring, published deadlines, outbox.

Whatever fails here is logged and costs capture, never a start.
"""

import logging
from collections.abc import Callable

from draftkeep.config import Config
from draftkeep.policies.keyring import Keyring
from draftkeep.serve.outbox import Outbox
from draftkeep.serve.problems import reason_of
from draftkeep.serve.sealing import publish_periods
from draftkeep.store.catalog import Catalog

_log = logging.getLogger(__name__)


def open_keyring(config: Config, *, clock: Callable[[], float]) -> Keyring | None:
    """None where it cannot be used. Erasure and deadlines need it without capture, too."""
    try:
        return Keyring.open(config.keys_path, retention=config.retention, clock=clock)
    except Exception as error:
        _log.error("serving without a keyring, so without capture: %s", reason_of(error))
        return None


def publish_deadlines(catalog: Catalog, keyring: Keyring | None) -> None:
    """A shorter ttl must reach readers that hold no key, with capture or without."""
    if keyring is None:
        return
    try:
        publish_periods(catalog, keyring)
    except Exception as error:
        _log.error("the catalog's deadlines are not up to date: %s", reason_of(error))


def open_outbox(
    config: Config,
    keyring: Keyring | None,
    catalog: Catalog,
    *,
    clock: Callable[[], float],
    on_drop: Callable[[str], None],
) -> Outbox | None:
    """None where nothing is to be captured, or nothing can be. `on_drop` is the emitter's."""
    if not config.capture.enabled or keyring is None:
        return None
    try:
        return Outbox.build(config, keyring=keyring, catalog=catalog, clock=clock, on_drop=on_drop)
    except Exception as error:
        _log.error("serving without capture: %s", reason_of(error))
        return None
