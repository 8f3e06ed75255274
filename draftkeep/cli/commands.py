"""The commands. Each reads one configuration, calls one room and prints what came of it.

Rooms are imported inside the commands: `draftkeep audit` must not wait for torch.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftkeep.cli.demo import demo
from draftkeep.cli.doctor import doctor
from draftkeep.config import Config, load_config
from draftkeep.errors import ConfigError, InputError

app = typer.Typer(
    name="draftkeep",
    help="Keeps a drafter matched to its traffic, and the traffic private.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
drafters_app = typer.Typer(help="List drafters, or make the cold one.", no_args_is_help=True)
app.add_typer(drafters_app, name="drafters")
app.command()(demo)
app.command()(doctor)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="DRAFTKEEP_CONFIG", help="Configuration file (TOML)."),
]
TenantOption = Annotated[str | None, typer.Option(help="Tenant; may be left out if there is one.")]


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Serve the target model behind an OpenAI-compatible endpoint."""
    from draftkeep.serve.node import serve as run

    run(load_config(config))


@app.command()
def compact(
    config: ConfigOption = None,
    every_s: Annotated[
        float | None, typer.Option("--every", help="Repeat every so many seconds.")
    ] = None,
) -> None:
    """Move sealed traces from the log into shards, rewrite erased rows, sweep. Holds no key."""
    from draftkeep.cli.compacting import compact_forever, compact_once

    settings = load_config(config)
    if every_s is None:
        Console().print_json(data=compact_once(settings))
    else:
        compact_forever(settings, every_s=every_s)


@app.command()
def distill(config: ConfigOption = None, tenant: TenantOption = None) -> None:
    """Train a drafter on a tenant's traces and publish it if the gate admits it."""
    from draftkeep.cli.distilling import distill_with_progress

    settings = load_config(config)
    distill_with_progress(settings, tenant=only_tenant(settings, tenant))


@app.command()
def audit(
    sql: Annotated[str | None, typer.Argument(help="One SELECT over the audit views.")] = None,
    config: ConfigOption = None,
    report: Annotated[str | None, typer.Option(help="A named report instead of SQL.")] = None,
) -> None:
    """Ask in SQL what is stored, until when, and what was erased. Content stays sealed."""
    from draftkeep.store.audit import REPORTS, AuditSession

    if (sql is None) == (report is None):
        raise InputError(f"give either SQL or --report; reports: {', '.join(sorted(REPORTS))}")
    if report is not None and report not in REPORTS:
        raise InputError(f"no report of that name; reports: {', '.join(sorted(REPORTS))}")
    query = REPORTS[report] if report is not None else sql
    assert query is not None
    settings = load_config(config)
    with AuditSession.open(settings.state_dir) as session:
        print_rows(session.query(query).to_pylist())


@app.command()
def erase(
    subject: Annotated[str, typer.Option(help="The subject's name, as requests give it.")],
    config: ConfigOption = None,
    tenant: TenantOption = None,
) -> None:
    """Erase a subject: tombstones and quarantine, then keys. Bytes go at the next compaction."""
    import time
    from dataclasses import asdict

    from draftkeep.policies.keyring import Keyring
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.erasure import erase_subject

    settings = load_config(config)
    name = only_tenant(settings, tenant)
    catalog = Catalog.open(settings.state_dir / "catalog.db")
    keyring = Keyring.open(settings.keys_path, retention=settings.retention, clock=time.time)
    result = erase_subject(catalog, keyring, tenant=name, subject=subject, now_s=int(time.time()))
    Console().print_json(data=asdict(result), default=_plain)


@drafters_app.command("list")
def drafters_list(config: ConfigOption = None) -> None:
    """List every drafter with its status, parent and measures."""
    from draftkeep.cli.drafters import list_rows

    print_rows(list_rows(load_config(config)))


@drafters_app.command("cold")
def drafters_cold(config: ConfigOption = None, tenant: TenantOption = None) -> None:
    """Make the cold drafter from the target's own first layers and put it on `stable`."""
    from draftkeep.cli.drafters import publish_cold

    settings = load_config(config)
    digest = publish_cold(settings, tenant=only_tenant(settings, tenant))
    Console().print(digest.hex(), highlight=False)


def only_tenant(config: Config, name: str | None) -> str:
    """The tenant named, or the only one; ConfigError where that is not one."""
    names = [tenant.name for tenant in config.tenants]
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        given = "no tenant given" if name is None else "that tenant is not configured"
        raise ConfigError(f"{given}; configured: {', '.join(names) or 'none'}; use --tenant")
    return name


def print_rows(rows: list[dict[str, object]]) -> None:
    """Print rows as a table; bytes as hexadecimal."""
    if not rows:
        Console().print("no rows")
        return
    table = Table(*rows[0].keys(), header_style="bold")
    for row in rows:
        table.add_row(*(str(_plain(value)) for value in row.values()))
    Console().print(table)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int | float | str) or value is None else str(value)
