"""The commands. Each reads one configuration, calls one room and prints what came of it.

What needs torch is imported inside the commands: `draftkeep audit` must not wait for it.
"""

import hashlib
import logging
import secrets
from typing import Annotated

import typer
from rich.console import Console

from draftkeep.cli.catalog import catalog_app
from draftkeep.cli.demo.run import demo
from draftkeep.cli.doctor.run import doctor
from draftkeep.cli.nodes import nodes_app
from draftkeep.cli.options import ConfigOption, TenantOption
from draftkeep.cli.topics import topic_app
from draftkeep.config import Config, load_config
from draftkeep.errors import ConfigError, InputError

app = typer.Typer(
    name="draftkeep",
    help="Keeps a drafter matched to its traffic, and the traffic private.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
drafters_app = typer.Typer(
    help="List drafters, make the cold one, or go back to an earlier one.", no_args_is_help=True
)
app.add_typer(drafters_app, name="drafters")
app.add_typer(nodes_app, name="nodes")
app.add_typer(catalog_app, name="catalog")
app.add_typer(topic_app, name="topic")


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Serve the target model behind an OpenAI-compatible endpoint."""
    from draftkeep.serve.only_node import only_node

    settings = load_config(config)
    with only_node(settings.state_dir):
        from draftkeep.serve.logs import log_to_stderr

        log_to_stderr()
        logging.getLogger("draftkeep.serve").info("starting")
        # Seconds, for torch: after the lock, so that a second node hears at once that it is one.
        from draftkeep.serve.runserver import serve as run

        run(settings)


@app.command()
def forward(
    config: ConfigOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="End once the log is empty, or at the first failure.")
    ] = False,
) -> None:
    """Move a node's log into Kafka. A serving node does it itself; this is for one that is gone."""
    from draftkeep.cli.forwarding import forward_forever, forward_once

    settings = load_config(config)
    if once:
        Console().print_json(data=forward_once(settings))
    else:
        forward_forever(settings)


@app.command()
def compact(
    config: ConfigOption = None,
    every_s: Annotated[
        float | None, typer.Option("--every", min=0.1, help="Repeat every so many seconds.")
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
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Ask in SQL what is stored, until when, and what was erased. Content stays sealed."""
    from draftkeep.cli.auditing import ask, print_json, print_report, print_result
    from draftkeep.cli.tables import table_console
    from draftkeep.store.audit_views import REPORTS

    names = ", ".join(sorted(REPORTS))
    if (sql is None) == (report is None):
        raise InputError(f"give either one SELECT or --report; reports: {names}")
    if report is not None and report not in REPORTS:
        raise InputError(f"no report of that name; reports: {names}")
    question = sql or REPORTS[report or ""]
    result = ask(load_config(config), question)
    if json:
        print_json(result)
    else:
        show = print_result if report is None else print_report
        show(result, table_console())


@app.command()
def erase(
    subject: Annotated[str, typer.Option(help="The subject's name, as requests give it.")],
    config: ConfigOption = None,
    tenant: TenantOption = None,
) -> None:
    """Erase a subject: tombstones and quarantine, then keys. Bytes go at the next compaction.

    While a serving node runs, use its POST /admin/erase, which also refuses what it still holds.
    """
    from draftkeep.cli.erasing import erase_and_report

    settings = load_config(config)
    report = erase_and_report(settings, tenant=only_tenant(settings, tenant), subject=subject)
    Console().print_json(data=report)


@app.command()
def keygen() -> None:
    """Make an API key. It is shown once; the configuration holds its hash alone."""
    key = f"dk-{secrets.token_urlsafe(32)}"
    typer.echo(f"key    {key}\nsha256 {hashlib.sha256(key.encode()).hexdigest()}")


@drafters_app.command("list")
def drafters_list(config: ConfigOption = None) -> None:
    """List every drafter with its status, parent and measures."""
    from draftkeep.cli.drafters import list_table
    from draftkeep.cli.tables import table_console

    table_console().print(list_table(load_config(config)))


@drafters_app.command("cold")
def drafters_cold(config: ConfigOption = None) -> None:
    """Make the cold drafter from the target's own first layers; fill empty channels with it."""
    from draftkeep.cli.drafters import publish_cold

    Console().print(publish_cold(load_config(config)).hex(), highlight=False)


@drafters_app.command("use")
def drafters_use(
    drafter: Annotated[
        str, typer.Argument(help="8 or more digits of its digest; none: leave nodes to the floor.")
    ],
    config: ConfigOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose channel; the one of this node if left out.")
    ] = None,
) -> None:
    """Point a channel at an earlier drafter. Nodes follow, and the next job begins with it."""
    from draftkeep.cli.drafters import use_drafter
    from draftkeep.cli.tables import print_line

    settings = load_config(config)
    chosen = None if tenant is None else only_tenant(settings, tenant)
    print_line(use_drafter(settings, drafter, tenant=chosen))


def only_tenant(config: Config, name: str | None) -> str:
    """The tenant named, or the only one; ConfigError where that is not one."""
    names = [tenant.name for tenant in config.tenants]
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        given = "no tenant given" if name is None else "that tenant is not configured"
        raise ConfigError(f"{given}; configured: {', '.join(names) or 'none'}; use --tenant")
    return name


app.command()(doctor)
app.command()(demo)
