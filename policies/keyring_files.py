"""Which files a keyring consists of, and whether they belong together."""

from draftkeep.errors import StoreError
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring_db import KeyringDb

PERIOD_KEK = "period.kek"
SUBJECT_KEK = "subject.kek"
ISSUER_KEY = "issuer.key"
ISSUER_PUBLIC = "issuer_public"
_CHECK_VALUE = b"draftkeep/v1/kek"


def check_kek(db: KeyringDb, name: str, kek: LocalKek) -> None:
    """StoreError unless `kek` is the one that keyring.db was made with.

    Without this, a lost KEK file would be replaced by a fresh one, silently.
    """
    stored = db.meta(name)
    context = _CHECK_VALUE + name.encode()
    if stored is None:
        raise StoreError(f"keyring.db was never opened with {name}; start the keyring once")
    if kek.unwrap(stored, context) != _CHECK_VALUE:
        raise StoreError(f"keyring.db holds a wrong check value for {name}; restore the file")


def claim_kek(db: KeyringDb, name: str, kek: LocalKek) -> None:
    """Bind keyring.db to `kek` on first use, and check it ever after."""
    if db.meta(name) is None:
        db.claim(name, kek.wrap(_CHECK_VALUE, _CHECK_VALUE + name.encode()))
    check_kek(db, name, kek)
