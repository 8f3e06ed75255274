"""KeyDeadlines: expired keys are destroyed, whatever else a node does or waits for."""

import time
from collections.abc import Callable

from draftkeep.outage import Outage
from draftkeep.policies.keyring import Keyring
from draftkeep.serve.periodic import Periodic
from draftkeep.serve.problems import reason_of


class KeyDeadlines:
    """Destroys a keyring's expired keys every `every_s` seconds, from `start` to `stop`.

    In a thread of its own that needs the keyring alone: no database, broker or engine that gives no
    answer can hold it up. What fails is said at once, now and then, and when it works again. The
    keyring stays the caller's; `clock` is the wall clock.
    """

    def __init__(self, keyring: Keyring, *, clock: Callable[[], float], every_s: float) -> None:
        self._keyring = keyring
        self._clock = clock
        self._outage = Outage("destroying expired keys")
        self._rounds = Periodic("key deadlines", self.keep, every_s=every_s)

    def start(self) -> None:
        """Destroy what is past its deadline already, then begin."""
        self.keep()
        self._rounds.start()

    def stop(self) -> None:
        """Begin no further round."""
        self._rounds.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a round under way; False where it goes on after `timeout_s`."""
        return self._rounds.join(timeout_s)

    def keep(self) -> None:
        """One round. Never raises."""
        try:
            self._keyring.destroy_expired(self._clock())
        except Exception as error:
            self._outage.failed(reason_of(error), time.monotonic())
        else:
            self._outage.worked(time.monotonic())
