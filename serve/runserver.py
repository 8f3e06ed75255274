"""Runs the app under uvicorn on a socket of its own, so that port 0 means a free one."""

import contextlib
import fcntl
import json
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.files import write_file
from draftkeep.serve.app import build_app
from draftkeep.serve.logs import log_to_stderr
from draftkeep.serve.node import Node

GRACE_S = 5
_log = logging.getLogger(__name__)


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then return.

    Stops accepting, lets requests under way finish for `GRACE_S` seconds, cancels the rest, and
    delivers what was captured. The address is written to `serve.json` in the state directory once
    requests are taken. Raises ConfigError or ModelError where the node cannot start.
    """
    log_to_stderr()
    with (
        _only_node(config.state_dir),
        contextlib.closing(_listen(config.serve.host, config.serve.port)) as listener,
    ):
        node = Node.build(config)
        try:
            _run(node, config, listener)
        finally:
            node.close()


def _run(node: Node, config: Config, listener: socket.socket) -> None:
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(node),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    with _signals_stop(server):
        node.start()
        url = _write_address(config, listener)
        _log.info("serving %s on %s for %d tenants", node.model_id, url, len(config.tenants))
        try:
            server.run(sockets=[listener])
        finally:
            (config.state_dir / "serve.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """SIGTERM and SIGINT end the server and nothing else.

    uvicorn handles them while it runs and raises them again afterwards, when the default handlers
    would end the process before captured traces are delivered.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
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


@contextlib.contextmanager
def _only_node(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's node lock; a second node would serve and capture nothing."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "serve.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another serving node uses {state_dir}; stop it, or give this one a state_dir "
                "of its own"
            ) from None
        yield


def _write_address(config: Config, listener: socket.socket) -> str:
    """Tell whoever waits for it where the node listens; returns the URL."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    write_file(config.state_dir / "serve.json", json.dumps({"url": url}).encode())
    return url
