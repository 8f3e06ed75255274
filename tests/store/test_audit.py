"""An auditor's SQL: what it answers, and what it cannot do."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from draftkeep.errors import InputError, StoreError
from draftkeep.store import audit, schema
from draftkeep.store.audit import AuditSession
from draftkeep.store.audit_views import REPORTS, VIEWS
from draftkeep.store.erasure import erase_subject
from draftkeep.store.shard import CLEAR_SCHEMA
from draftkeep.store.storage_local import LocalStorage
from tests.deployment import PERIOD_S, START_S, TTL_S
from tests.store.conftest import DATABASES, World, copies, make_world

# Many times what fits in the memory that one test leaves.
MANY_ROWS = 300_000


def fill(world: World) -> World:
    """Two tenants, a named subject with two traces, one refused record and one gap."""
    # What a log loses before it is met is no gap.
    world.compactor().run_once()
    world.append(world.seal())
    world.log.free(1)
    world.append(
        world.seal(b"x" * 10, subject="ann", domain="law"),
        world.seal(b"x" * 20, subject="ann", domain="law"),
        world.seal(b"x" * 30),
        world.seal(b"x" * 40, tenant="birch"),
    )
    world.log.append([b"poison"])
    world.compactor().run_once()
    world.clock.now_s += PERIOD_S
    world.append(world.seal(b"x" * 50, tenant="birch"))
    world.compactor().run_once()
    return world


@pytest.fixture
def filled(world: World) -> World:
    return fill(world)


@pytest.fixture(scope="module", params=DATABASES)
def untouched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A filled world that its tests only look at."""
    root = tmp_path_factory.mktemp("untouched")
    with ExitStack() as stack:
        url = f"sqlite:///{root / 'catalog.db'}"
        if request.param == "postgresql":
            template = request.getfixturevalue("catalog_template")
            url = stack.enter_context(copies(request.getfixturevalue("postgres"), template))()
        made = make_world(root, url)
        stack.callback(made.close)
        yield fill(made)


@pytest.fixture(scope="module")
def session(untouched: World) -> Iterator[AuditSession]:
    with AuditSession(untouched.catalog, untouched.storage, now_s=untouched.clock()) as opened:
        yield opened


def test_counts_bytes_and_deadlines_by_tenant(session: AuditSession) -> None:
    result = session.query(
        "SELECT tenant, traces, positions, body_bytes, shares, aliases, erased, first_deadline_s,"
        " last_deadline_s FROM tenants ORDER BY tenant"
    )
    first, second = START_S + TTL_S, START_S + PERIOD_S + TTL_S
    assert result.columns[0] == "tenant"
    assert result.rows == (
        ("acme", 3, 15, 60, 1, 2, 0, first, first),
        ("birch", 2, 10, 90, 2, 2, 0, first, second),
    )
    assert not result.truncated


def test_codes_are_words_and_ids_are_hex(session: AuditSession, untouched: World) -> None:
    (row,) = session.query(
        "SELECT trace_id, subject_kind, consent, origin, domain FROM traces WHERE body_bytes = 10"
    ).rows
    assert row[1:] == ("named", "tenant", "served", "law")
    assert bytes.fromhex(row[0]) in {item.parsed.trace_id for item in untouched.stored()}


def test_every_view_and_report_answers(session: AuditSession) -> None:
    for name in VIEWS:
        assert session.query(f"SELECT * FROM {name}").columns  # noqa: S608 - our own names
    for name in REPORTS:
        assert session.report(name).columns
    assert len(session.query("SELECT * FROM shards").rows) == 2
    assert session.query("SELECT first, next FROM gaps").rows == ((0, 1),)
    assert session.query("SELECT name, tenants FROM nodes").rows == (("n1", ["acme", "birch"]),)
    assert session.query("SELECT tenant, past_deadline FROM keys ORDER BY ALL").rows == (
        ("acme", False),
        ("birch", False),
        ("birch", False),
    )
    with pytest.raises(InputError, match="no report secrets; there are inventory"):
        session.report("secrets")


def test_the_inventory_names_what_each_tenant_has(session: AuditSession) -> None:
    result = session.report("inventory")
    wanted = ("tenant", "domain", "traces", "body_bytes", "shares", "erased")
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    assert [tuple(row[name] for name in wanted) for row in rows] == [
        ("acme", "law", 2, 30, 1, 0),
        ("acme", "unknown", 1, 30, 1, 0),
        ("birch", "unknown", 2, 90, 2, 0),
    ]


def test_the_losses_are_all_there(filled: World) -> None:
    filled.append(filled.seal(subject="ann"))
    erase_subject(
        filled.catalog, filled.keyring, tenant="acme", subject="ann", now_s=filled.clock()
    )
    filled.compactor().run_once()
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        rows = session.report("losses").rows
    assert [(kind, reason, traces) for kind, _, reason, traces in rows] == [
        ("dead letter", "unreadable", 1),
        ("drop", "erased", 1),
        ("gap", "not in the log", 1),
    ]


def test_an_erasure_is_visible_before_and_after_the_rewrite(filled: World) -> None:
    erase_subject(
        filled.catalog, filled.keyring, tenant="acme", subject="ann", now_s=filled.clock()
    )
    erased = "SELECT count(*) FROM traces WHERE erased"
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        assert session.query(erased).rows == ((2,),)
        result = session.report("erasures")
        (row,) = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    assert (row["tenant"], row["state"], row["aliases"], row["traces"]) == ("acme", "done", 1, 2)
    assert (row["keys_destroyed"], row["rows_left"]) == (1, 2)
    filled.rewrite_erased()
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        assert session.query(erased).rows == ((0,),)
        assert session.query("SELECT rows_left FROM erasures").rows == ((0,),)


def test_overdue_data_shows(filled: World) -> None:
    for now_s, kinds in (
        (START_S + TTL_S - 1, []),
        (START_S + TTL_S + 61, ["dead letter", "shard"]),
    ):
        with AuditSession(filled.catalog, filled.storage, now_s=now_s) as session:
            assert [row[0] for row in session.report("overdue").rows] == kinds


FORBIDDEN = [
    "SELECT 1; SELECT 2",
    "",
    "-- nothing",
    "INSERT INTO drops VALUES ('a', 'b', 1, 1)",
    "UPDATE traces SET tenant = 'x'",
    "DELETE FROM shards",
    "DROP VIEW traces",
    "CREATE TABLE t (a INT)",
    "CREATE OR REPLACE TEMP VIEW traces AS SELECT 1",
    "COPY (SELECT 1) TO '{dir}/out.csv'",
    "COPY traces TO '{shard}' (USE_TMP_FILE false)",
    "EXPORT DATABASE '{dir}/out'",
    "ATTACH '{dir}/catalog.db'",
    "INSTALL httpfs",
    "LOAD json",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET enable_external_access",
    "SET threads = 64",
    "SET VARIABLE x = 1",
    "BEGIN",
    "CHECKPOINT",
    "VACUUM",
    "USE memory",
    "PREPARE p AS SELECT 1",
    "EXPLAIN ANALYZE SELECT 1",
    "SELECT * FROM read_csv('{dir}/secret.csv')",
    "SELECT * FROM read_text('{dir}/secret.csv')",
    "SELECT * FROM read_blob('{shard}')",
    "SELECT * FROM read_parquet('{shard}')",
    "SELECT * FROM parquet_metadata('{shard}')",
    "SELECT * FROM '{dir}/secret.csv'",
    "SELECT * FROM glob('{dir}/*')",
    "SELECT * FROM sniff_csv('{dir}/secret.csv')",
    "SELECT * FROM sqlite_scan('{dir}/catalog.db', 'nodes')",
    "SELECT * FROM query('SELECT * FROM read_csv(''{dir}/secret.csv'')')",
    "SELECT * FROM query_table('{dir}/secret.csv')",
    "SELECT * FROM enable_logging('x')",
    "SELECT getenv('HOME')",
    "SELECT ciphertext FROM _shard_rows",
    "SELECT encapsulation FROM _shard_rows",
    "SELECT record FROM _dead_letters",
    "SELECT * FROM python_variable",
    "SELECT nonsense FROM traces",
    "SELEC 1",
    "SELECT $1",
]


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_everything_but_reading_the_views_is_refused(
    session: AuditSession, untouched: World, sql: str
) -> None:
    python_variable = [1]
    (untouched.root / "secret.csv").write_text("a,b\n1,2\n")
    shard = untouched.shards_dir / min(untouched.files())
    before = {path: path.read_bytes() for path in untouched.root.rglob("*.parquet")}
    names = {path.name for path in untouched.root.iterdir()}
    with pytest.raises(InputError):
        session.query(sql.format(dir=untouched.root, shard=shard))
    assert python_variable == [1]
    assert {path: path.read_bytes() for path in untouched.root.rglob("*.parquet")} == before
    assert {path.name for path in untouched.root.iterdir()} == names
    assert session.query("SELECT count(*) FROM traces").rows == ((5,),)


def test_settings_stay_locked_whatever_was_tried(session: AuditSession) -> None:
    result = session.query(
        "SELECT name, value FROM duckdb_settings() WHERE name IN ('enable_external_access',"
        " 'lock_configuration', 'python_enable_replacements', 'autoload_known_extensions')"
    )
    assert dict(result.rows) == {
        "enable_external_access": "false",
        "lock_configuration": "true",
        "python_enable_replacements": "false",
        "autoload_known_extensions": "false",
    }


def test_a_long_answer_is_cut_and_says_so(untouched: World) -> None:
    with AuditSession(
        untouched.catalog, untouched.storage, now_s=untouched.clock(), row_limit=3
    ) as session:
        result = session.query("SELECT * FROM range(100000000000)")
        assert (len(result.rows), result.truncated) == (3, True)
        assert not session.query("SELECT * FROM range(3)").truncated


def test_a_long_query_is_interrupted_and_the_session_goes_on(untouched: World) -> None:
    with AuditSession(
        untouched.catalog, untouched.storage, now_s=untouched.clock(), time_limit_s=2
    ) as session:
        with pytest.raises(InputError, match=r"ran over 2 s"):
            session.query("SELECT sum(a.i * b.i) FROM range(10000000) a(i), range(10000000) b(i)")
        assert session.query("SELECT count(*) FROM traces").rows == ((5,),)


def test_reports_need_no_memory_for_the_rows_that_they_count(
    filled: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget and many rows, for the session's own and ten million."""
    erase_subject(
        filled.catalog, filled.keyring, tenant="acme", subject="ann", now_s=filled.clock()
    )
    names = [file.name for file in filled.storage.list()]
    few = pa.concat_tables(
        [pq.read_table(filled.shards_dir / name, columns=CLEAR_SCHEMA.names) for name in names]
    )
    many = few.take(np.arange(MANY_ROWS) % len(few)).set_column(
        few.schema.get_field_index("trace_id"),
        CLEAR_SCHEMA.field("trace_id"),
        pa.array([number.to_bytes(16) for number in range(MANY_ROWS)], pa.binary(16)),
    )
    pq.write_table(many, tmp_path / "many.parquet", row_group_size=4096)
    settings = [
        "SET memory_limit = '48MB'" if "memory_limit" in setting else setting
        for setting in audit._LOCKDOWN
    ]
    assert "SET memory_limit = '48MB'" in settings
    monkeypatch.setattr(audit, "_LOCKDOWN", settings)
    monkeypatch.setattr(
        audit, "_shard_rows", lambda *_: ds.dataset(tmp_path / "many.parquet", schema=CLEAR_SCHEMA)
    )
    with AuditSession(
        filled.catalog, filled.storage, now_s=filled.clock(), time_limit_s=600.0
    ) as session:
        reports = {name: session.report(name) for name in REPORTS}
        assert session.query("SELECT count(*) FROM traces").rows == ((MANY_ROWS,),)
    assert sum(row[2] for row in reports["inventory"].rows) == MANY_ROWS
    (erasure,) = reports["erasures"].rows
    left = dict(zip(reports["erasures"].columns, erasure, strict=True))["rows_left"]
    assert left == 2 * MANY_ROWS // len(few)


def test_a_query_that_needs_too_much_memory_is_refused(session: AuditSession) -> None:
    with pytest.raises(InputError, match="Out of Memory"):
        session.query("SELECT list(i) FROM range(200000000) t(i)")


def test_a_session_outlives_a_merge(filled: World) -> None:
    filled.append(filled.seal(b"x" * 60, tenant="birch"))
    filled.compactor().run_once()
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        assert filled.merge(10**6).replaced == 2
        assert session.query("SELECT count(*) FROM traces").rows == ((6,),)


def test_a_listed_shard_without_a_file_is_an_error(filled: World) -> None:
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        for name in filled.files():
            (filled.shards_dir / name).unlink()
        with pytest.raises(
            StoreError,
            match=r"2 listed shards, .*\.parquet the first, are not in .*; check that shards.url",
        ):
            session.query("SELECT count(*) FROM traces WHERE positions > 1")


def test_an_empty_store_has_views_too(world: World) -> None:
    with AuditSession(world.catalog, LocalStorage(Path("nowhere")), now_s=1.0) as session:
        assert session.query("SELECT count(*) FROM traces").rows == ((0,),)
        assert session.report("inventory").rows == ()


def test_lineage_answers_who_taught_a_drafter(filled: World) -> None:
    header = next(item.parsed for item in filled.stored() if item.parsed.subject_kind)
    with filled.catalog.begin() as connection:
        connection.execute(
            sa.insert(schema.drafters).values(
                digest=b"d" * 32,
                scope="acme",
                status="registered",
                created_s=1.0,
                measures={"replay": 0.5},
            )
        )
        connection.execute(
            sa.insert(schema.lineage).values(
                drafter=b"d" * 32,
                alias=header.alias,
                period_id=header.period_id,
                tenant="acme",
                positions=10,
            )
        )
    with AuditSession(filled.catalog, filled.storage, now_s=filled.clock()) as session:
        assert session.query(
            "SELECT count(*) FROM lineage JOIN traces USING (alias, period_id)"
        ).rows == ((2,),)
        assert session.query("SELECT measures, signed FROM drafters").rows == (
            ('{"replay": 0.5}', False),
        )
        result = session.report("drafters")
    assert dict(zip(result.columns, result.rows[0], strict=True))["positions"] == 10
