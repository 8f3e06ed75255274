"""KeyDeadlines: expired keys go, from disk and from memory, whatever else a node waits for."""

from collections.abc import Callable

from draftkeep.policies.keyring import Keyring
from draftkeep.serve.chores import Chores


class KeyDeadlines(Chores):
    """Destroys a keyring's expired keys every `every_s` seconds, from `start` to `stop`, and has
    `forget` drop what the node holds in memory of periods that are over.

    In a thread of its own that needs the keyring alone: no database, broker or engine that gives no
    answer can hold it up. The keyring stays the caller's; `clock` is the wall clock.
    """

    def __init__(
        self,
        keyring: Keyring,
        *,
        forget: Callable[[], object],
        clock: Callable[[], float],
        every_s: float,
    ) -> None:
        chores = [
            ("destroying expired keys", lambda: keyring.destroy_expired(clock())),
            ("forgetting keys", forget),
        ]
        super().__init__("key deadlines", chores, every_s=every_s)

    def start(self) -> None:
        """Destroy what is past its deadline already, then begin."""
        self.keep()
        super().start()
