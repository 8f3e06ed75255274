"""The `draftkeep` command. Start at `commands`; the demo is `demo` with its neighbours."""

import sys

from rich.console import Console

from draftkeep.errors import DraftkeepError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line; an error raised on purpose is one line and exit status 2."""
    from draftkeep.cli.commands import app

    try:
        app()
    except DraftkeepError as error:
        Console(stderr=True, highlight=False, markup=False).print(
            f"draftkeep: {error}", style="red"
        )
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
