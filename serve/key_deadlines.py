"""KeyDeadlines: expired keys are destroyed, whatever else a node does or waits for."""

from collections.abc import Callable

from draftkeep.policies.keyring import Keyring
from draftkeep.serve.chores import Chores


class KeyDeadlines(Chores):
    """Destroys a keyring's expired keys every `every_s` seconds, from `start` to `stop`.

    In a thread of its own that needs the keyring alone: no database, broker or engine that gives no
    answer can hold it up. The keyring stays the caller's; `clock` is the wall clock.
    """

    def __init__(self, keyring: Keyring, *, clock: Callable[[], float], every_s: float) -> None:
        chore = ("destroying expired keys", lambda: keyring.destroy_expired(clock()))
        super().__init__("key deadlines", [chore], every_s=every_s)

    def start(self) -> None:
        """Destroy what is past its deadline already, then begin."""
        self.keep()
        super().start()
