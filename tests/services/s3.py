"""An object store that speaks S3: moto's server, in a process of its own, in memory."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

from tests.services.processes import Service, free_port, listens


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket and how to reach it. `options` are pyarrow.fs.S3FileSystem's arguments."""

    name: str
    endpoint: str
    options: dict[str, Any]

    def filesystem(self) -> Any:
        """A pyarrow file system whose root is the bucket."""
        return fs.SubTreeFileSystem(self.name, fs.S3FileSystem(**self.options))


class S3:
    """One server on 127.0.0.1; what it holds ends with it."""

    def __init__(self, port: int, log: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.options: dict[str, Any] = {
            "endpoint_override": self.endpoint,
            "access_key": "draftkeep",
            "secret_key": "draftkeep",
            "region": "us-east-1",
        }
        self._names = (f"bucket-{number}" for number in itertools.count(1))
        # No environment but this: the process must find no real account.
        env = {"PATH": os.environ["PATH"], "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**26)}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self.service = Service(command, log=log, env=env)
        self.service.until(lambda: listens(port), "moto")

    def create_bucket(self) -> Bucket:
        """A fresh, empty bucket."""
        name = next(self._names)
        fs.S3FileSystem(allow_bucket_creation=True, **self.options).create_dir(name)
        return Bucket(name=name, endpoint=self.endpoint, options=self.options)


@contextlib.contextmanager
def running_s3(log: Path) -> Iterator[S3]:
    """A server that answers, ended at the end."""
    server = S3(free_port(), log)
    try:
        yield server
    finally:
        server.service.kill()
