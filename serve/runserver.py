"""Runs the app under uvicorn on a socket of its own, so that port 0 means a free one."""

import socket

import uvicorn

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.serve.api import build_app
from draftkeep.serve.node import Node, write_address

GRACE_S = 5


def run(node: Node, config: Config) -> None:
    """Start the node, serve until a signal, close the node."""
    listener = _listen(config.serve.host, config.serve.port)
    host, port = listener.getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(node),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    node.start()
    try:
        write_address(config, f"http://{host}:{port}")
        server.run(sockets=[listener])
    finally:
        listener.close()
        node.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another serve.port"
        ) from None
    listener.listen(128)
    return listener
