"""Going back to an earlier drafter by command, and what it refuses."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from draftkeep.cli.commands import app
from draftkeep.errors import ConfigError, DeniedError, InputError
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.registry import EVERYONE, Registry, tenant_scope
from tests.store.shop import Shop

Use = Callable[..., str]
ACME = tenant_scope("acme")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    catalog = Catalog.open(tmp_path / "catalog.db")
    yield Shop(tmp_path, catalog, Registry(catalog, tmp_path / "drafters"))
    catalog.close()


@pytest.fixture
def use(tmp_path: Path, shop: Shop) -> Use:
    """`draftkeep drafters use` with a configuration of these tenants; raises what it refused with.

    A line of its own for the person who reads it is tested for every command elsewhere.
    """

    def use(*arguments: str, tenants: tuple[str, ...] = ("acme",)) -> str:
        path = tmp_path / "config.toml"
        lines = [f'state_dir = "{tmp_path}"\n']
        for tenant in tenants:
            digest = hashlib.sha256(tenant.encode()).hexdigest()
            lines.append(f'[[tenants]]\nname = "{tenant}"\napi_key_sha256 = "{digest}"\n')
        path.write_text("".join(lines))
        done = CliRunner().invoke(app, ["drafters", "use", *arguments, "--config", str(path)])
        if done.exception is not None:
            raise done.exception
        return done.output

    return use


def test_a_channel_goes_back_to_an_earlier_drafter_and_to_none(shop: Shop, use: Use) -> None:
    first = shop.registered(b"anna", scope=ACME)
    second = shop.registered(b"anna", scope=ACME, parent=first)
    shop.registry.set_channel(ACME, "stable", second, at_s=1)
    short, shorter = second.hex()[:12], first.hex()[:12]
    said = use(first.hex()[:8])
    assert said == f"tenant:acme/stable: nodes get {shorter}, before {short}\n"
    assert shop.registry.channel(ACME, "stable") == first
    assert use("none") == f"tenant:acme/stable: nodes get no drafter, before {shorter}\n"
    assert shop.registry.channel(ACME, "stable") is None
    use(second.hex().upper(), "--tenant", "acme")
    assert shop.registry.channel(ACME, "stable") == second


def test_a_node_of_several_tenants_has_the_channel_of_everyone(shop: Shop, use: Use) -> None:
    digest = shop.registered(scope=EVERYONE)
    both = ("acme", "birch")
    use(digest.hex(), tenants=both)
    assert shop.registry.channel(EVERYONE, "stable") == digest
    use(digest.hex(), "--tenant", "birch", tenants=both)
    assert shop.registry.channel(tenant_scope("birch"), "stable") == digest
    assert shop.registry.channel(ACME, "stable") is None


def test_what_may_not_serve_or_is_not_one_is_refused(shop: Shop, use: Use) -> None:
    serving = shop.registered(b"anna", scope=ACME)
    shop.registry.set_channel(ACME, "stable", serving, at_s=1)
    unsigned = shop.registered(b"anna", scope=ACME, admit=False)
    tainted = shop.registered(b"ben", scope=ACME)
    shop.mark(tainted, "quarantined")
    others = shop.registered(b"carl", scope=tenant_scope("birch"))
    lost = shop.registered(b"dora", scope=ACME)
    shutil.rmtree(shop.registry.path(lost))
    refused: list[tuple[bytes | str, type[Exception], str]] = [
        (unsigned, DeniedError, "not signed"),
        (tainted, DeniedError, "quarantined"),
        (others, DeniedError, "scope"),
        (lost, InputError, "is not below .*; run this where"),
        (b"\0" * 32, InputError, "no drafter begins with"),
        (serving.hex()[:7], InputError, "8 to 64 hexadecimal digits"),
        ("stable", InputError, "8 to 64 hexadecimal digits"),
    ]
    for drafter, kind, reason in refused:
        with pytest.raises(kind, match=reason):
            use(drafter if isinstance(drafter, str) else drafter.hex())
    with pytest.raises(ConfigError, match="no tenant is configured"):
        use("none", tenants=())
    with pytest.raises(ConfigError, match="not configured"):
        use(serving.hex(), "--tenant", "nobody")
    assert shop.registry.channel(ACME, "stable") == serving


def test_digits_that_fit_two_are_not_guessed(shop: Shop, use: Use) -> None:
    one = shop.registered(b"anna", scope=ACME)
    alike = sa.select(sa.literal(one[:4] + bytes(28)), *list(schema.drafters.c)[1:])
    with shop.catalog.begin() as connection:
        connection.execute(sa.insert(schema.drafters).from_select(schema.drafters.c.keys(), alike))
    with pytest.raises(InputError, match=r"2 drafters begin with .*; give more"):
        use(one.hex()[:8])
    use(one.hex())
    assert shop.registry.channel(ACME, "stable") == one
