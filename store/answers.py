"""AnsweringConnection: to a PostgreSQL that gives no answer, nobody waits for ever.

A server that is frozen, or whose machine hangs, keeps its connections open: the kernel of its
machine still acknowledges what is sent, so no time-out of TCP notices.
"""

import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

# A statement that was silent for so long is not believed any more: the server is asked by another
# connection. Most that take longer wait for a lock or have much to do, and then it answers.
QUIET_S = 20.0


class UnansweredError(psycopg.OperationalError):
    """A statement was given up: the server answers nobody."""


class AnsweringConnection(psycopg.Connection[Any]):
    """A connection that is closed, with UnansweredError, once the server does not answer.

    Nothing limits how long a statement may take while the server answers others. A statement may be
    silent for `quiet_s` seconds; then another connection is made with `asking`, libpq's parameters,
    and has as long as connecting may take, and `quiet_s` again for an answer. Without `asking` the
    silence is enough.
    """

    quiet_s: float = QUIET_S
    asking: str | None = None

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """As psycopg's, for as long as the server answers."""
        try:
            return super().wait(self._heard(gen), *arguments, **options)
        except UnansweredError:
            # Without a word to the server, which would not read it.
            self.close()
            raise

    def _heard(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same steps, with a look at the clock whenever nothing came."""
        heard_s = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    heard_s = time.monotonic()
                elif (silent_s := time.monotonic() - heard_s) >= self.quiet_s:
                    if not self._answers():
                        raise UnansweredError(f"it did not answer for {silent_s:.0f} s")
                    heard_s = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    def _answers(self) -> bool:
        if self.asking is None:
            return False
        try:
            with AnsweringConnection.connect(self.asking, autocommit=True) as other:
                other.quiet_s = self.quiet_s
                other.execute("SELECT 1")
        except (UnansweredError, psycopg.errors.ConnectionTimeout):
            return False
        except psycopg.Error:
            # Refused, for whatever reason: that is an answer.
            return True
        return True


def connect(
    conninfo: str = "", *, quiet_s: float = QUIET_S, context: Any = None, **parameters: Any
) -> AnsweringConnection:
    """Connect as psycopg does; `parameters` are libpq's, `connect_timeout` among them."""
    asking = make_conninfo(conninfo, **parameters)
    connection = AnsweringConnection.connect(asking, context=context)
    connection.quiet_s = quiet_s
    connection.asking = make_conninfo(asking, **_place_of(connection))
    return connection


def _place_of(connection: AnsweringConnection) -> dict[str, str]:
    """Which of the servers that were named, or that a name stands for, the connection has.

    Another's answer, or its refusal, would say nothing of this one.
    """
    server = connection.pgconn
    found = {"host": server.host, "hostaddr": server.hostaddr, "port": server.port}
    return {name: value.decode() for name, value in found.items() if value}
