"""Clients that no broker lets in: each says its own reason."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kafka import KafkaAdminClient

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess


@contextlib.contextmanager
def one_who_answers(words: bytes) -> Iterator[int]:
    """The port of one who says `words` to the first request of a connection, and hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                accepted, _ = server.accept()
            except OSError:
                return
            with accepted, contextlib.suppress(OSError):
                accepted.settimeout(0.5)
                # What is left unread would make it a reset.
                accepted.recv(1024)
                if words:
                    # A client that reads of both at once tells of the hang-up alone.
                    accepted.sendall(words)
                    accepted.recv(1024)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        answering.join()


def refusal(port: int) -> str:
    with pytest.raises(StoreError, match="lets us in") as caught:
        KafkaAccess(servers=(f"127.0.0.1:{port}",), patience_s=1.0).connect(KafkaAdminClient)
    return str(caught.value)


def test_clients_that_fail_at_once_do_not_mix_their_reasons() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]
    with one_who_answers(b"") as hangs_up:
        ports = [nobody, hangs_up] * 3
        with ThreadPoolExecutor(len(ports)) as pool:
            reasons = list(pool.map(refusal, ports))
    assert ["REFUSED" in said for said in reasons] == [True, False] * 3
    assert ["hangs up before its first answer" in said for said in reasons] == [False, True] * 3


def test_a_tls_alert_is_told_from_other_nonsense() -> None:
    unexpected_message = bytes.fromhex("15 0303 0002 02 0a")
    with one_who_answers(unexpected_message) as tls, one_who_answers(b"HTTP/1.1 400 ") as http:
        assert "as one does that wants TLS" in refusal(tls)
        assert "Invalid frame length" in refusal(http)
