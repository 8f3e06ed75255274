"""Two thousand clients that leave: no slot, no entry and no memory is left behind them."""

import contextlib
import gc
import json
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftkeep.ingest.trace import Provenance
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine.request import Request
from draftkeep.serve.engine.row import Row
from draftkeep.serve.http.generation import Choice, Generation
from draftkeep.serve.limits import Ticket
from draftkeep.serve.request_log import Entry

ABORTS = 2000
WARM_UP = 200
MAX_GROWTH_BYTES = 64 * 1024**2
# What a request is made of; none may outlive it.
KINDS = (Row, Request, Generation, Choice, Delivery, Ticket, Entry, Provenance)


def leave(station: Any, number: int) -> None:
    """Ask for a stream and go away: after its first bytes, before them, or without a goodbye."""
    fields = {"stream": number % 5 != 0, "n": 1 + number % 2, "max_tokens": 100, "ignore_eos": True}
    body = json.dumps({"model": "tiny", "prompt": "How many rows?", **fields})
    connection = socket.create_connection(("127.0.0.1", int(station.url.rsplit(":", 1)[1])))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-acme\r\n"
        b"Content-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    if number % 5 > 1:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    if number % 3 == 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def settle(station: Any, requests: int) -> None:
    """Wait until so many have come and nothing is under way, however long it lingers."""
    node, choices = station.node, sum(1 + number % 2 for number in range(requests))

    def ended() -> int:
        stats = node.engine.stats()
        return int(stats.finished + stats.cancelled)

    station.wait_for(lambda: ended() == choices)
    station.wait_for(lambda: not node.requests.in_flight and not station.server.server_state.tasks)
    station.wait_for(lambda: node.capture.pending == 0)
    node.requests.flush()


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_threads() -> int:
    """How many there are beside the web framework's idle workers, which it keeps for later."""
    return sum(not thread.name.startswith("AnyIO") for thread in threading.enumerate())


def open_sockets() -> int:
    """How many files are sockets; databases open more connections when several threads want one."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        # One is that of the listing itself.
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def alive() -> Counter[str]:
    """How many there are of each kind."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)


def test_two_thousand_clients_that_leave(stations: Callable[..., Any]) -> None:
    # Room for all of them: they may come and go faster than the engine makes a step.
    station = stations(serve={"max_context": 160, "floor": "ngram", "queue": 2 * ABORTS})
    node, engine = station.node, station.node.engine
    # Other tests of this process may still hold some.
    others = alive()
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: leave(station, number), range(WARM_UP)))
        settle(station, WARM_UP)
        threads, sockets = own_threads(), open_sockets()
        memory = rss_bytes()
        list(clients.map(lambda number: leave(station, number), range(WARM_UP, ABORTS)))
        settle(station, ABORTS)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.failed, stats.callback_failed) == (0, 0, 0, 0)
    # The engine's last step may still be at hand, and the clients' own threads be going.
    station.wait_for(lambda: max((alive() - others).values(), default=0) <= 2 * stats.slots)
    station.wait_for(lambda: own_threads() <= threads)
    station.wait_for(lambda: open_sockets() <= sockets)
    assert rss_bytes() - memory < MAX_GROWTH_BYTES
    assert stats.known == 0
    assert not node.requests._entries
    use = node.limits.usage()["acme"]
    assert (use["running"], use["requests"]) == (0, ABORTS)
    capture = station.capture_stats()
    ended = stats.finished + stats.cancelled
    assert capture["acknowledged"] + sum(capture["drops"].values()) == ended
    assert stats.cancelled > ABORTS / 2
    assert station.chat(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
