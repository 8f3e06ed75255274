"""A serving node for the stream bench, in a process of its own, with the bench's drafter in it.

    python -m bench.streams.server CONFIG DRAFTER_DIRECTORY

Prints its URL as the first line and serves until its standard input is closed.
"""

import sys
import threading
import time
from pathlib import Path

import uvicorn

from draftkeep.config import load_config
from draftkeep.serve.follow import load_draft_model
from draftkeep.serve.http.app import build_app
from draftkeep.serve.node import Node

_POLL_S = 0.05


def main(config_path: Path, drafter_dir: Path) -> None:
    """Build the node, hand it the drafter, serve."""
    node = Node.build(load_config(config_path))
    drafter = load_draft_model(drafter_dir, node.target, gate_public=None)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(node),
            host="127.0.0.1",
            port=0,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
        )
    )
    node.start()
    node.engine.swap(drafter)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(_POLL_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"http://127.0.0.1:{port}", flush=True)
        sys.stdin.read()
    finally:
        server.should_exit = True
        thread.join()
        node.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
