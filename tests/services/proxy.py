"""A network that a test can cut and slow down: a TCP proxy in a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_CHUNK_BYTES = 64 * 1024


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target_port`. Made by `running_proxy`."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._ready = threading.Event()
        self._whole = asyncio.Event()
        self._whole.set()
        self._over = asyncio.Event()
        self._bytes_per_s: float | None = None
        self._delay_s = 0.0

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Close every connection and the port."""
        self._call(self._over.set)
        self._thread.join()

    def cut(self) -> None:
        """From here on not a byte passes in either direction, and nobody is told."""
        self._call(self._whole.clear)

    def heal(self) -> None:
        """Undo `cut` and `slow`; what was under way arrives."""
        self._bytes_per_s, self._delay_s = None, 0.0
        self._call(self._whole.set)

    def slow(self, *, bytes_per_s: float, delay_s: float) -> None:
        """Let each connection pass so much in each direction, and hold what it sends so long."""
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s

    def _call(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self._ready.set()
        await self._over.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(
                    "127.0.0.1", self._target_port
                )
            except OSError:
                return
            with contextlib.closing(far_writer):
                await _first(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if self._bytes_per_s is not None:
                    await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            await self._whole.wait()


async def _first(*directions: Coroutine[Any, Any, None]) -> None:
    """A connection is over as soon as one end closes it."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def running_proxy(port: int, target_port: int) -> Iterator[Proxy]:
    """A proxy that listens, ended at the end."""
    proxy = Proxy(port, target_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
