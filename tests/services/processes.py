"""Starting services so that none outlives the tests, and waiting until they answer.

The kernel ends a service when the process that started it dies, however it dies: `setpriv` sets
the parent-death signal and then becomes the service. A finalizer alone would leave brokers behind
after SIGKILL, and a watching process could itself be killed. Where there is no `setpriv` (not
Linux), only the finalizers of the fixtures end the services.
"""

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The parent-death signal follows the thread that forked, not its process: a service restarted
# from a test's short-lived thread would end with it. This thread lives as long as the process.
_LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="services")
# Below the ports that the kernel hands to outgoing connections. In that range a client that tries
# a dead service's port again and again can take the port itself, and the service cannot return.
_PORTS = range(15_000, 32_000)


def _share() -> Iterator[int]:
    """The ports that are this process's to give, in no order. Other workers have others."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = list(range(_PORTS.start + worker, _PORTS.stop, workers))
    # Not the shared generator, which a property test seeds.
    random.SystemRandom().shuffle(share)
    return itertools.cycle(share)


_share_left = _share()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on and nobody was given lately.

    Whoever asked binds it seconds later, so the same one must not be given twice.
    """
    for port in itertools.islice(_share_left, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


def listens(port: int) -> bool:
    """Whether somebody accepts connections on 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Service:
    """One process with a log file. Frozen or not, it ends with the process that started it.

    `user` is whom to run as, where the caller is root. `orphan_signal` is what the kernel sends
    when the caller is gone.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        user: str | None = None,
        orphan_signal: str = "KILL",
        env: Mapping[str, str] | None = None,
    ) -> None:
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", orphan_signal] if setpriv else []
        if user is not None:
            prefix += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
        self._log = log
        self._process = _LAUNCHER.submit(self._start, [*prefix, *map(str, command)], env).result()
        while setpriv and self.running and self._is_program(setpriv):
            time.sleep(0.002)

    def _start(
        self, command: Sequence[str], env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd="/",
                # Ctrl-C is for the caller, which ends its services in order.
                start_new_session=True,
            )

    def _is_program(self, path: str) -> bool:
        """Whether the process has not become the service yet: frozen now it would never do so."""
        try:
            return Path(f"/proc/{self.pid}/exe").samefile(path)
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """The process id of the service itself."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT. Harmless where it was not frozen."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def ask_to_end(self, ask: signal.Signals = signal.SIGTERM) -> None:
        """Send `ask` without waiting, to a frozen service too."""
        self._process.send_signal(ask)
        self.thaw()

    def stop(self, timeout_s: float = 30, ask: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and kill it after `timeout_s`."""
        self.ask_to_end(ask)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def until(self, answers: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        """Wait until `answers`; raises RuntimeError with the log's end where the service died."""
        deadline_s = time.monotonic() + timeout_s
        while not answers():
            if not self.running or time.monotonic() > deadline_s:
                state = "did not answer in time" if self.running else "ended"
                raise RuntimeError(f"{what} {state}; the end of its log:\n{self.log_end()}")
            time.sleep(0.05)

    def log_end(self, lines: int = 30) -> str:
        """The last lines that the service wrote."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])
