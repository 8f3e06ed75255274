"""A `draftkeep serve` process of one's own: started, waited for, and stopped."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx
from rich.console import Console

from draftkeep.cli.demo.traffic import Endpoint
from draftkeep.errors import DraftkeepError

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


class ServerProcess:
    """A context manager around the serving process. Its output goes to `serve.log`."""

    def __init__(self, config_path: Path, state_dir: Path, console: Console) -> None:
        self._config_path = config_path
        self._state_dir = state_dir
        self._console = console
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint: Endpoint

    def __enter__(self) -> "ServerProcess":
        address = self._state_dir / "serve.json"
        earlier = _version(address)
        with (self._state_dir / "serve.log").open("ab") as log:
            process = self._process = subprocess.Popen(  # noqa: S603 (our own module, fixed arguments)
                [sys.executable, "-m", "draftkeep", "serve", "--config", str(self._config_path)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # Ctrl-C is the demo's to handle: it still reads the server's counters first.
                start_new_session=True,
            )
        try:
            with self._console.status("Starting the serving node"):
                self.endpoint = self._wait(process, address, earlier)
        except BaseException:
            self._stop()
            raise
        self._console.print(f"Serving on {self.endpoint.url}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _wait(
        self, process: subprocess.Popen[bytes], address: Path, earlier: tuple[int, int] | None
    ) -> Endpoint:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            # One that was there before is of a server that was killed, or of one that still runs.
            if _version(address) not in (None, earlier):
                url = json.loads(address.read_text())["url"]
                if _ready(url):
                    return self._endpoint(url)
            time.sleep(0.1)
        log = self._state_dir / "serve.log"
        ended = process.poll() is not None
        words = log.read_text(errors="replace").splitlines()[-1:] if ended else []
        raise DraftkeepError(
            ": ".join([f"the serving node did not become ready; see {log}", *words])
        )

    def _endpoint(self, url: str) -> Endpoint:
        folder = self._state_dir / "demo"
        api_key = (folder / "api.key").read_text()
        with httpx.Client(base_url=url, trust_env=False) as client:
            models = client.get("/v1/models", headers={"Authorization": f"Bearer {api_key}"}).json()
        return Endpoint(
            url=url,
            api_key=api_key,
            admin_key=(folder / "admin.key").read_text(),
            model=models["data"][0]["id"],
        )

    def _stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _version(path: Path) -> tuple[int, int] | None:
    """Tells one writing of a file from the next; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
