"""`draftkeep topic`: make the topic that carries the traces, look at it, delete it."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from draftkeep.cli.options import ConfigOption
from draftkeep.cli.tables import plain_table, print_line, table_console
from draftkeep.config import Config, load_config
from draftkeep.errors import ConfigError, InputError

if TYPE_CHECKING:
    from draftkeep.ingest.kafka_client import KafkaAccess

topic_app = typer.Typer(help="Make, show or delete the Kafka topic.", no_args_is_help=True)


@topic_app.command("create")
def create(
    config: ConfigOption = None,
    partitions: Annotated[int, typer.Option(min=1, help="As many can compact at once.")] = 8,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies; as many as brokers, at most 3, by default.")
    ] = None,
) -> None:
    """Make the topic with the settings that retention.ttl_s needs."""
    from draftkeep.ingest.kafka_retention import read_retention
    from draftkeep.ingest.kafka_topic import create_topic, default_replicas

    settings = _with_kafka(load_config(config))
    access, name = _access(settings), settings.kafka.topic
    ttl_s = settings.retention.ttl_s
    if replicas is None:
        with access.admin() as admin:
            replicas = default_replicas(admin)
    create_topic(access, name, partitions=partitions, replicas=replicas, ttl_s=ttl_s)
    retention = read_retention(access, name)
    print_line(f"{name}: partitions {partitions}, replicas {replicas}")
    print_line(f"a record gets {retention.worst_case_age_s:g} s old at most, of {ttl_s} s")
    for problem in retention.problems(ttl_s):
        print_line(f"{problem}")
    if retention.problems(ttl_s):
        raise typer.Exit(1)


@topic_app.command("show")
def show(config: ConfigOption = None) -> None:
    """Show partitions, what was compacted of each, and how old a record can get."""
    from draftkeep.ingest.kafka_retention import read_retention
    from draftkeep.ingest.kafka_topic_state import look_at_topic
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.offsets import committed_offsets

    settings = _with_kafka(load_config(config))
    access, name = _access(settings), settings.kafka.topic
    with access.admin() as admin:
        state = look_at_topic(admin, name)
    if state is None:
        raise InputError(f"there is no topic {name}; make it with draftkeep topic create")
    retention = read_retention(access, name)
    committed: Mapping[int, int] = {}
    catalog = Catalog.existing(settings)
    if catalog is not None:
        committed = committed_offsets(catalog, state)
        catalog.close()
    print_line(f"{name}: id {state.topic_id}, cluster {state.cluster}")
    print_line(
        f"retention.ms {retention.retention_ms}, segment.ms {retention.segment_ms}: a record gets "
        f"{retention.worst_case_age_s:g} s old at most, of {settings.retention.ttl_s} s"
    )
    unread = state.unread(committed)
    columns = ("partition", "leader", "replicas", "in sync", "first", "committed", "end", "lag")
    rows = [
        (
            number,
            partition.leader,
            ", ".join(map(str, partition.replicas)),
            "all" if partition.in_sync else "not all",
            partition.first,
            committed.get(number),
            partition.following,
            len(unread.get(number, ())),
        )
        for number, partition in sorted(state.partitions.items())
    ]
    table_console().print(plain_table(columns, rows))


@topic_app.command("delete")
def delete(
    config: ConfigOption = None,
    discard_unread: Annotated[
        bool, typer.Option("--discard-unread", help="Also where records are in no shard yet.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Needed: it cannot be undone.")] = False,
) -> None:
    """Delete the topic with every record in it, and forget how far it was read."""
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.topic_removal import remove_topic

    settings = _with_kafka(load_config(config))
    name = settings.kafka.topic
    if not yes:
        raise InputError(f"deleting {name} cannot be undone; stop its nodes, and give --yes")
    catalog = Catalog.configured(settings, create=False)
    try:
        removed = remove_topic(
            catalog,
            _access(settings),
            name,
            discard_unread=discard_unread,
            now_s=time.time(),
            patience_s=settings.kafka.deadline_s,
        )
    finally:
        catalog.close()
    if removed.topic_id is None:
        print_line(
            f"the catalog has forgotten {removed.offsets} offsets of an earlier {name}; nothing "
            "was deleted. To delete a topic of that name that is there, call this again"
        )
    else:
        print_line(f"{name} is deleted; {removed.discarded} records were in no shard")


def _with_kafka(config: Config) -> Config:
    if not config.kafka.servers:
        raise ConfigError(
            "kafka.servers is empty: compactors read the node's own log; set it first"
        )
    return config


def _access(config: Config) -> "KafkaAccess":
    from draftkeep.ingest.kafka_client import KafkaAccess

    return KafkaAccess.configured(config.kafka)
