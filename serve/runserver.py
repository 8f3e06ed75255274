"""Runs the app under uvicorn on a socket of its own, so that port 0 means a free one."""

import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

import uvicorn
from fastapi import FastAPI

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.files import write_file
from draftkeep.serve.catalog_wait import StoppedError, wait_for_catalog
from draftkeep.serve.http.app import build_app
from draftkeep.serve.node import END_TIMEOUT_S, Node

# What is still under way when the grace is over is cancelled; it has this long to notice.
CANCEL_S = 1
T = TypeVar("T")
_log = logging.getLogger(__name__)


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then return. The caller holds `only_node` and logs.

    The probes answer while the model is being loaded and while the catalog is waited for. The first
    signal makes the node unready and refuses new requests; those under way have `serve.grace_s` to
    finish, the rest is cancelled, and what was captured is delivered. A second signal ends the
    grace. The address is written to `serve.json` in the state directory once requests are taken.
    Raises ConfigError or ModelError where the node cannot start.
    """
    with contextlib.closing(_listen(config.serve.host, config.serve.port)) as listener:
        app = build_app()
        server = _Server(app, grace_s=config.serve.grace_s)
        loader = _Loader(config, app, server, listener)
        with _signals_stop(server):
            loader.start()
            try:
                server.run(sockets=[listener])
            finally:
                _log.info("stopping")
                loader.close()
    _log.info("stopped")


class _Server(uvicorn.Server):
    """Drains before it stops: the listener stays open, so that whoever asks is told why not."""

    def __init__(self, app: FastAPI, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=CANCEL_S,
            )
        )
        self._app = app
        self._grace_s = grace_s
        self._drain_until_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops."""
        node: Node | None = self._app.state.node
        if node is None or self._drain_until_s is not None:
            self.should_exit = True
        else:
            node.drain()
            self._drain_until_s = time.monotonic() + self._grace_s

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; stops once nothing is under way or the grace is over."""
        until_s, node = self._drain_until_s, self._app.state.node
        if until_s is not None and (not node.requests.in_flight or time.monotonic() >= until_s):
            self.should_exit = True
        return await super().on_tick(counter)


class _Loader(threading.Thread):
    """Loads the node beside the server, which answers meanwhile that it is not ready.

    A load that hangs ends with the process: nothing was captured yet.
    """

    def __init__(
        self, config: Config, app: FastAPI, server: _Server, listener: socket.socket
    ) -> None:
        super().__init__(name="loader", daemon=True)
        self._config = config
        self._app = app
        self._server = server
        self._listener = listener
        self._ending = threading.Event()
        self._node: Node | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        """Build and start the node; a failure stops the server."""
        _log.info("loading the model; /readyz is 200 once requests are taken")
        try:
            node = self._node = Node.build(self._config, patience=self._wait)
            node.start()
            self._app.state.node = node
            url = _write_address(self._config, self._listener)
        except StoppedError:
            return
        except Exception as error:
            self._failure = error
            self._server.should_exit = True
            return
        count = len(self._config.tenants)
        tenants = "1 tenant" if count == 1 else f"{count} tenants"
        _log.info("serving %s on %s for %s", node.model_id, url, tenants)

    def _wait(self, attempt: Callable[[], T]) -> T:
        self._app.state.waits_for = "the catalog cannot be reached yet"
        return wait_for_catalog(self._config, self._ending, attempt)

    def close(self) -> None:
        """Close what was built, and raise what kept the rest from being built."""
        self._ending.set()
        self.join(END_TIMEOUT_S)
        (self._config.state_dir / "serve.json").unlink(missing_ok=True)
        if self.is_alive():
            _log.warning("the node is still being loaded, and is left to the end of the process")
            return
        if self._node is not None:
            self._node.close()
        if self._failure is not None:
            raise self._failure


@contextlib.contextmanager
def _signals_stop(server: _Server) -> Iterator[None]:
    """SIGTERM and SIGINT end the server and nothing else, before, while and after it runs.

    The default handlers would end the process before captured traces are delivered.
    """
    before = {
        number: signal.signal(number, server.handle_exit)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another serve.host or "
            "serve.port"
        ) from None
    listener.listen(128)
    return listener


def _write_address(config: Config, listener: socket.socket) -> str:
    """Tell whoever waits for it where the node listens; returns the URL."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    write_file(config.state_dir / "serve.json", json.dumps({"url": url}).encode())
    return url
