"""Runs a `draftkeep` command as a process of its own, as an operator would."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from draftkeep.errors import DraftkeepError

# A job that is interrupted writes a checkpoint before it goes.
INTERRUPT_GRACE_S = 60.0


class ToldToEnd(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that closes: as Ctrl-C, but the child may not have heard it.

    A child that has a terminal which closes ends by itself, at once.
    """


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Raises ToldToEnd on SIGTERM and SIGHUP, which would leave the processes of a demo behind.

    A signal that is ignored stays so: `nohup` means it.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise ToldToEnd

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_child(arguments: list[str], *, capture: bool) -> str:
    """Run `draftkeep ARGUMENTS` and return its output (empty unless `capture`).

    The child shares this terminal, so its progress bars show and Ctrl-C reaches it. Raises
    DraftkeepError when it fails; on KeyboardInterrupt it waits for the child's own clean end.
    """
    process = subprocess.Popen(  # noqa: S603 (our own module, arguments of our own making)
        [sys.executable, "-m", "draftkeep", *arguments],
        stdout=subprocess.PIPE if capture else None,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt as asked:
        if isinstance(asked, ToldToEnd):
            # A job writes its checkpoint on SIGINT, which a background shell makes others ignore.
            process.send_signal(signal.SIGINT if arguments[0] == "distill" else signal.SIGTERM)
        try:
            process.wait(INTERRUPT_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if process.returncode != 0:
        raise DraftkeepError(
            f"draftkeep {arguments[0]} ended with status {process.returncode}, expected 0; "
            "its own message stands above"
        )
    return output or ""
