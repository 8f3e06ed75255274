"""The `draftkeep` command. Start at `commands`; the demo has a folder of its own."""

import sys

from rich.console import Console

from draftkeep.errors import DraftkeepError

EXIT_REFUSED = 2


def main() -> None:
    """Run the command line.

    An error raised on purpose, and one of the file system or the database, is one line and exit
    status 2.
    """
    from draftkeep.cli.commands import app

    try:
        app()
    except DraftkeepError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.strerror or type(error).__name__}: {error.filename or 'no path given'}")
    except Exception as error:
        # Only where a command has opened a database is the library there to compare with.
        database = sys.modules.get("sqlalchemy.exc")
        if database is None or not isinstance(error, database.SQLAlchemyError):
            raise
        _refuse(
            f"the catalog refused a statement ({type(error).__name__}); draftkeep catalog check "
            "tells whether its rows are in order"
        )


def _refuse(message: str) -> None:
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(f"draftkeep: {message}", style="red")
    sys.exit(EXIT_REFUSED)
