"""`python -m draftkeep` is the `draftkeep` command."""

from draftkeep.cli import main

main()
