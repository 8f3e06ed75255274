"""KafkaAccess: how to reach a cluster, and clients of kafka-python that are closed to the end."""

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kafka import KafkaAdminClient
from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from draftkeep.config import KafkaConfig
from draftkeep.errors import StoreError

# The library's own bound is 30 s, and it grows its pause between attempts to as much: a broker
# that is back would wait for us instead of we for it.
RECONNECT_MAX_MS = 1000
_PATIENCE_S = 10.0
_CONNECTION = re.compile(r"<Kafka(?:Connection|TCPTransport) [^>]*>:? ?")
# The library reads the first four bytes of an answer as its length.
_FRAME_LENGTH = re.compile(r"Invalid frame length: (-?\d+)")
_TLS_ALERT = 0x15  # the content type that a TLS record begins with: RFC 8446, 5.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaAccess:
    """Where the brokers are and how to log in.

    `servers` are host:port. With `ca_file` (PEM) the connection is TLS and the brokers' names are
    checked; with `username` the login is SCRAM-SHA-512, over TLS only. A client that no broker
    lets in gives up after about `patience_s`.
    """

    servers: tuple[str, ...]
    ca_file: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    patience_s: float = _PATIENCE_S

    def __post_init__(self) -> None:
        """Raises StoreError for a login that would cross the network in the open."""
        if self.username is not None and (self.ca_file is None or self.password is None):
            raise StoreError("a Kafka username needs a password and ca_file: SCRAM goes over TLS")

    @classmethod
    def configured(cls, config: KafkaConfig) -> Self:
        """As the operator says. Raises ConfigError where the password's file cannot be read."""
        return cls(
            servers=config.servers,
            ca_file=config.ca_file,
            username=config.username,
            password=config.read_password(),
            patience_s=min(_PATIENCE_S, config.deadline_s),
        )

    def options(self) -> dict[str, Any]:
        """The keyword arguments that every kafka-python client takes."""
        options: dict[str, Any] = {
            "bootstrap_servers": list(self.servers),
            "bootstrap_timeout_ms": int(800 * self.patience_s),
            "reconnect_backoff_max_ms": RECONNECT_MAX_MS,
            "security_protocol": "PLAINTEXT" if self.ca_file is None else "SSL",
        }
        if self.ca_file is not None:
            options["ssl_cafile"] = os.fspath(self.ca_file)
        if self.username is not None:
            options |= {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "SCRAM-SHA-512",
                "sasl_plain_username": self.username,
                "sasl_plain_password": _Unshown(self.password),
            }
        return options

    def connect(self, kind: Any, **options: Any) -> Any:
        """Make a client of class `kind` (producer, consumer, admin); the caller closes it.

        Raises StoreError with the library's own reason where no broker lets it in, after about
        `patience_s`. Never blocks for longer: producer and consumer wait for as long as a broker
        that hangs in the TLS handshake, so an admin client, which can be stopped, goes first and
        tells them the broker's version, which is all that their constructors ask for.
        """
        is_admin = kind is KafkaAdminClient
        admin, version = self._admit({**self.options(), **(options if is_admin else {})})
        if is_admin:
            return admin
        admin.close()
        return kind(**{**self.options(), "api_version": version, **options})

    def _admit(self, options: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
        """An admin client and the version of the broker that let it in."""
        made: list[KafkaNetClient] = []

        def network(**configs: Any) -> KafkaNetClient:
            made.append(KafkaNetClient(**configs))
            return made[-1]

        def give_up() -> None:
            # A constructor that fails leaves a thread and its sockets behind.
            for client in made:
                client.close()

        alarm = threading.Timer(self.patience_s, give_up)
        alarm.start()
        with _first_words(made) as words:
            try:
                admin = KafkaAdminClient(kafka_client=network, **options)
                return admin, made[0].get_broker_version()
            except KafkaError as error:
                give_up()
                raise StoreError(
                    f"no Kafka broker at {', '.join(self.servers)} lets us in: "
                    f"{words_of(self._reason(words) or error)}; check that it runs, its address, "
                    "and the TLS and login settings of both sides"
                ) from error
            finally:
                alarm.cancel()

    def _reason(self, words: list[str]) -> str | None:
        """A refused login, where it was said: a broker mostly just hangs up."""
        said = next((line for line in words if "uthentication" in line), None)
        if said is not None or not words:
            return said
        frame = _FRAME_LENGTH.search(words[0])
        if frame is not None and int(frame[1]) >> 24 == _TLS_ALERT:
            return "it answers with a TLS alert, as one does that wants TLS"
        if "socket disconnected" not in words[0]:
            return words[0]
        # The library learns the version right before the login.
        if not any("broker_version=(" in line for line in words):
            return "it hangs up before its first answer, as one does that wants TLS"
        if self.username is None:
            return "it hangs up after its first answer, as one does that wants a login"
        return (
            "it hangs up during the login, as one does that does not know this user, this password "
            "or the mechanism SCRAM-SHA-512"
        )

    @contextmanager
    def admin(self) -> Iterator[Any]:
        """An admin client, closed at the end. Raises StoreError as `connect` does."""
        client = self.connect(KafkaAdminClient)
        try:
            yield client
        finally:
            client.close()


def require_process(pid: int) -> None:
    """Raise StoreError in a child that was forked from process `pid`.

    A client's connections would carry the words of both processes, and its threads are not here.
    """
    if os.getpid() != pid:
        raise StoreError(
            f"this Kafka client belongs to process {pid}, and process {os.getpid()} was forked "
            "from it; open one of its own after the fork"
        )


def words_of(reason: object) -> str:
    """The library's words without its connection objects, which say nothing to an operator."""
    return _CONNECTION.sub("", str(reason))


def keep_library_quiet() -> None:
    """Leave the library's own lines out of this process's log: a broker that is away is worth one
    line of ours, not one of its every second. `KafkaAccess.connect` still tells its reasons.
    """
    logger = logging.getLogger("kafka")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


class _Unshown(str):
    """A password that is none in a dump of options: the library writes one into its debug log."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


@contextmanager
def _first_words(clients: Sequence[KafkaNetClient]) -> Iterator[list[str]]:
    """What the library logs meanwhile of `clients`: a failure's reason stands nowhere else."""
    words: list[str] = []
    caller = threading.get_ident()

    def emit(record: logging.LogRecord) -> None:
        # The loop complains of itself there when the machine is busy.
        if record.name == "kafka.net.selector":
            return
        # Other clients of this process speak through the same logger, from threads of their own.
        speaker = threading.current_thread()
        if speaker.ident == caller or any(speaker is one._net._io_thread for one in clients):
            words.append(record.getMessage())

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("kafka.net")
    logger.addHandler(handler)
    try:
        yield words
    finally:
        logger.removeHandler(handler)
