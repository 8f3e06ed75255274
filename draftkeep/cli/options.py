"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="DRAFTKEEP_CONFIG", help="Configuration file (TOML)."),
]
TenantOption = Annotated[str | None, typer.Option(help="Tenant; may be left out if there is one.")]
