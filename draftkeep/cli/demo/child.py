"""Runs a `draftkeep` command as a process of its own, as an operator would."""

import subprocess
import sys

from draftkeep.errors import DraftkeepError

# A job that is interrupted writes a checkpoint before it goes.
INTERRUPT_GRACE_S = 60.0


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
    except KeyboardInterrupt:
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
