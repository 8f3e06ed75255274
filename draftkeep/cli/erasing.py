"""Erasing a subject from the command line, with the keyring of this machine."""

import time
from dataclasses import asdict
from typing import Any

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.policies.keyring import Keyring
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import erase_subject


def erase_and_report(config: Config, *, tenant: str, subject: str) -> dict[str, Any]:
    """Erase, and return the result as JSON values. Safe to repeat.

    `known` is False where no key of that subject exists: never seen, or expired.
    ConfigError where the keys directory holds no keyring, or not this state directory's: an
    erasure against another keyring would report success and destroy nothing.
    """
    if not (config.keys_path / "keyring.db").exists():
        raise ConfigError(
            f"no keyring in {config.keys_path}, so no key can be destroyed; check keys_dir"
        )
    catalog = Catalog.configured(config, create=False)
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    try:
        publish_anchor(config.state_dir, ISSUER, keyring.issuer_public)
        result = erase_subject(catalog, keyring, tenant=tenant, subject=subject, now_s=time.time())
    finally:
        keyring.close()
        catalog.close()
    return {**asdict(result), "erasure_id": result.erasure_id and result.erasure_id.hex()}
