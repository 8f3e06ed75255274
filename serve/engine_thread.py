"""EngineThread: the engine's loop in a thread of its own, and whether it still comes round."""

import logging
import threading
import time
from collections.abc import Callable

from draftkeep.serve.engine.engine import Engine

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine until `stop`. Thread-safe.

    An engine that raises is closed, so that whoever waits is told. One whose loop has not come
    round for `stall_s` seconds is stalled until it does; 0 switches that off. An idle loop comes
    round twice a second. `clock` is the engine's own.
    """

    def __init__(
        self, engine: Engine, *, stall_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stalled = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the loop to end after the step that it is in."""
        self._stop.set()
        self._engine.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False where the engine is still at work after `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """True once the engine was asked to end, or died."""
        return self._stop.is_set()

    @property
    def alive(self) -> bool:
        """True while the loop runs and comes round; a change is logged by who asks first."""
        return self._thread.is_alive() and not self._stall()

    def _stall(self) -> bool:
        waited_s = self._clock() - self._engine.beat_s
        stalled = 0 < self._stall_s < waited_s
        with self._lock:
            changed, self._stalled = stalled != self._stalled, stalled
        if changed and stalled:
            _log.critical(
                "the engine's loop has not come round for %.1f s, over serve.stall_s of %g; "
                "restart the node if it does not recover",
                waited_s,
                self._stall_s,
            )
        elif changed:
            _log.warning("the engine has recovered: its loop comes round again")
        return stalled

    def _run(self) -> None:
        try:
            self._engine.run(self._stop)
        except Exception as error:
            _log.critical("the engine died with %s; restart the node", type(error).__name__)
            # Whoever waits is told, and nobody is taken on.
            self._stop.set()
            self._engine.close()
