"""`draftkeep topic` on a real broker."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from draftkeep.cli.commands import app
from draftkeep.errors import DraftkeepError, StoreError
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic_state import topic_settings_of
from draftkeep.store import schema, topic_removal
from draftkeep.store.catalog import Catalog
from draftkeep.store.topic_removal import remove_topic
from tests.services.kafka import Kafka
from tests.store.deletions import House

DAY_S = 86_400
NOW_S = 1_800_000_000.0


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.open(tmp_path / "state" / "catalog.db")


@pytest.fixture
def house(kafka_broker: Kafka, kafka_topic: str, catalog: Catalog) -> House:
    return House(access=kafka_broker.access, name=kafka_topic, catalog=catalog)


def config_file(house: House, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        f'state_dir = "{tmp_path / "state"}"\n[retention]\nttl_s = {DAY_S}\n'
        f'[kafka]\nservers = ["{house.access.servers[0]}"]\ntopic = "{house.name}"\n'
    )
    return path


def run(*arguments: str, config: Path) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["topic", *arguments, "--config", str(config)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_a_topic_is_made_shown_compacted_and_deleted(house: House, tmp_path: Path) -> None:
    config = config_file(house, tmp_path)
    assert "partitions 3, replicas 1" in run("create", "--partitions", "3", config=config)
    with pytest.raises(StoreError, match="is there already; look at it with draftkeep topic show"):
        run("create", config=config)
    with house.access.admin() as admin:
        settings = topic_settings_of(admin, house.name)
    assert settings["message.timestamp.type"] == "LogAppendTime"
    house.logs = [KafkaLog(house.access, house.name)]
    house.append(0, 5)
    house.commit(0, 2)
    shown = run("show", config=config)
    assert settings["retention.ms"] in shown
    line = next(line for line in shown.splitlines() if line.strip("│ ").startswith("0 "))
    assert [cell.strip() for cell in line.strip("│").split("│")][4:] == ["0", "2", "5", "3"]
    with pytest.raises(DraftkeepError, match="give --yes"):
        run("delete", config=config)
    with pytest.raises(StoreError, match=r"up to 3 records in partitions \[0\]"):
        run("delete", "--yes", config=config)
    house.commit(0, 5)
    assert "0 records were in no shard" in run("delete", "--yes", config=config)
    with house.catalog.read() as connection:
        assert connection.execute(sa.select(schema.offsets)).all() == []
    with pytest.raises(DraftkeepError, match="there is no topic"):
        run("delete", "--yes", config=config)
    with pytest.raises(DraftkeepError, match="topic create"):
        run("show", config=config)
    house.close()


def test_what_is_discarded_unread_is_a_gap(house: House, tmp_path: Path) -> None:
    house.make()
    house.append(0, 5)
    house.append(1, 2)
    house.commit(0, 3)
    said = run("delete", "--yes", "--discard-unread", config=config_file(house, tmp_path))
    assert "4 records were in no shard" in said
    row = schema.gaps.c
    with house.catalog.read() as connection:
        gaps = connection.execute(
            sa.select(row.partition, row.first, row.next).order_by(row.partition)
        ).all()
        assert connection.execute(sa.select(schema.offsets)).all() == []
    assert gaps == [(0, 3, 5), (1, 0, 2)]
    house.close()


def test_killed_between_broker_and_catalog_the_next_call_finishes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make()
    house.append(0, 5)
    house.commit(0, 5)

    def remove(house: House) -> topic_removal.Removal:
        return remove_topic(
            house.catalog,
            house.access,
            house.name,
            discard_unread=False,
            now_s=NOW_S,
            patience_s=30,
        )

    with monkeypatch.context() as killed:
        killed.setattr(topic_removal, "forget_log", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remove(house)
    # Another topic of the name is there by then: it is not the one that was meant.
    house.make()
    house.append(0, 1)
    removed = remove(house)
    assert (removed.topic_id, removed.offsets) == (None, 1)
    assert house.logs[0].bounds() == (0, 1)
    with pytest.raises(StoreError, match="1 records"):
        remove(house)
    house.close()
