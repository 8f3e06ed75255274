"""Erasing a subject from the command line, with the keyring of this machine."""

import time
from dataclasses import asdict
from typing import Any

from draftkeep.cli.auditing import open_existing
from draftkeep.config import Config
from draftkeep.policies.keyring import Keyring
from draftkeep.store.erasure import erase_subject


def erase_and_report(config: Config, *, tenant: str, subject: str) -> dict[str, Any]:
    """Erase, and return the result as JSON values. Safe to repeat."""
    catalog = open_existing(config)
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    try:
        result = erase_subject(catalog, keyring, tenant=tenant, subject=subject, now_s=time.time())
    finally:
        keyring.close()
        catalog.close()
    return {**asdict(result), "erasure_id": result.erasure_id.hex()}
