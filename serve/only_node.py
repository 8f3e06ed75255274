"""One serving node for a state directory. Imports nothing heavy: a refusal must come soon."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from draftkeep.errors import ConfigError


@contextlib.contextmanager
def only_node(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's node lock; a second node would serve and capture nothing.

    Raises ConfigError where another process holds it.
    """
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
