"""Shards in a bucket of an object store that speaks S3."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyarrow import fs

from draftkeep.errors import StoreError
from draftkeep.store.stored_file import AWS_ERROR, MARK, StoredFile

_CONNECT_S = 10
_ATTEMPTS = 4
_REMOVERS = 8
_GONE = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")


class ObjectStorage:
    """A bucket, or a prefix in one, at `url` (s3://BUCKET/PREFIX), with the machine's credentials.

    An object appears whole when its upload completes and is never written over. One that is
    removed while it is read is a FileNotFoundError at the next read. `endpoint` is for a store
    that is not Amazon's, empty otherwise; an empty `region` is found as AWS tools find it.
    """

    def __init__(self, url: str, *, endpoint: str, region: str) -> None:
        self._root = url.removeprefix("s3://").strip("/")
        options: dict[str, Any] = {"endpoint_override": endpoint} if endpoint else {}
        if region:
            options["region"] = region
        self._filesystem = fs.S3FileSystem(
            connect_timeout=_CONNECT_S,
            # A small object is one request, and nothing is left of it where its writer is killed.
            allow_delayed_open=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
            **options,
        )

    @property
    def place(self) -> str:
        """The URL."""
        return f"s3://{self._root}"

    @property
    def mark_place(self) -> str:
        """The mark's URL, among the shards."""
        return f"{self.place}/{MARK}"

    @property
    def filesystem(self) -> fs.FileSystem:
        """The store, logged in."""
        return self._filesystem

    def path(self, name: str) -> str:
        """Bucket and key."""
        return f"{self._root}/{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A stream into an upload that completes on a clean exit."""
        with self._explained(name):
            stream = self._filesystem.open_output_stream(self.path(name))
            try:
                yield stream
                stream.close()
            except BaseException:
                # A stream that is let go completes the upload: half an object has to go again.
                with suppress(OSError):
                    stream.close()
                with suppress(OSError):
                    self._filesystem.delete_file(self.path(name))
                raise

    @contextmanager
    def open(self, name: str) -> Iterator[pa.NativeFile]:
        """The object, read in ranges as they are asked for."""
        with (
            self._explained(name),
            self._filesystem.open_input_file(self.path(name)) as file,
        ):
            yield file

    def exists(self, name: str) -> bool:
        """Whether the object is there."""
        with self._explained(name):
            (found,) = self._filesystem.get_file_info([self.path(name)])
        return bool(found.type == fs.FileType.File)

    def list(self) -> list[StoredFile]:
        """Every object under the prefix. `modified_s` of a large one is when its upload began."""
        with self._explained("the list of objects"):
            found = self._filesystem.get_file_info(
                fs.FileSelector(self._root, allow_not_found=True)
            )
        return [
            StoredFile(name=item.base_name, size_bytes=item.size, modified_s=item.mtime.timestamp())
            for item in found
            if item.type == fs.FileType.File and item.base_name != MARK
        ]

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects, several at a time."""
        with ThreadPoolExecutor(_REMOVERS) as pool:
            list(pool.map(self._remove, names))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError), self._explained(name):
            self._filesystem.delete_file(self.path(name))

    def read_mark(self) -> str | None:
        """The mark's text."""
        try:
            with self.open(MARK) as file:
                return bytes(file.read()).decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def write_mark(self, text: str) -> None:
        """Put the mark's object."""
        with self.create(MARK) as stream:
            stream.write(f"{text}\n".encode())

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Errors of the store as FileNotFoundError or StoreError; others are left as they are."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            _, found, reason = str(error).partition(AWS_ERROR)
            if not found:
                raise
            if reason.startswith(_GONE):
                raise FileNotFoundError(f"{name} is not in {self.place} any more") from None
            raise StoreError(
                f"{self.place} did not do what was asked for {name} ({reason:.200}); check the "
                "store, shards.endpoint, shards.region and the credentials' permissions"
            ) from None
