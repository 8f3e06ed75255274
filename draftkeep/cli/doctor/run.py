"""`draftkeep doctor`: does everything fit together, and if not, what is the remedy."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import typer

from draftkeep.cli.doctor.finding import Finding
from draftkeep.cli.doctor.model_checks import (
    check_device,
    check_drafter,
    check_model,
    load_configured,
)
from draftkeep.cli.options import ConfigOption
from draftkeep.cli.tables import table_console
from draftkeep.config import Config, TenantConfig, load_config
from draftkeep.errors import DraftkeepError, NoCatalogError

MIN_FREE_BYTES = 2 * 1024**3
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def doctor(config: ConfigOption = None) -> None:
    """Check tenants, keys, log, catalog, shards, disk, models and Kafka; name each remedy."""
    console, failed = table_console(), False
    for finding in examine(load_config(config)):
        failed |= finding.status == "fail"
        line = f"{finding.check:<10} {finding.status:<5} {finding.detail}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        if finding.remedy:
            remedy = f"{'':<16} remedy: {finding.remedy}"
            console.print(remedy, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def examine(config: Config) -> Iterator[Finding]:
    """What each check finds, as it ends; one that raises is a finding, not the end."""
    target = cache(partial(load_configured, config))
    checks: tuple[tuple[str, Callable[[Config], Finding]], ...] = (
        ("tenants", _tenants),
        ("device", check_device),
        ("keys", _keys),
        ("log", _log),
        ("catalog", _catalog),
        ("shards", _shards),
        ("disk", _disk),
        ("model", partial(check_model, target=target)),
        ("drafter", partial(check_drafter, target=target)),
    )
    for name, check in checks:
        yield from _run(config, name, partial(_only, check))
    yield from _run(config, "brokers", _kafka)


def _only(check: Callable[[Config], Finding], config: Config) -> list[Finding]:
    return [check(config)]


def _run(
    config: Config, name: str, check: Callable[[Config], Iterable[Finding]]
) -> Iterator[Finding]:
    """What a check finds; what it raises is its last finding."""
    try:
        yield from check(config)
    except DraftkeepError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding(check=name, status="fail", detail=what, remedy=remedy)
    except (MemoryError, RuntimeError) as error:
        yield Finding(
            check=name,
            status="fail",
            detail=f"{config.model.device} failed with {type(error).__name__}",
            remedy="stop what else uses its memory, or choose another model.device",
        )
    except OSError as error:
        yield Finding(
            check=name,
            status="fail",
            detail=f"{error.strerror or type(error).__name__}: {error.filename or ''}",
            remedy="make the path readable and writable for this user",
        )


def _shards(config: Config) -> Finding:
    from draftkeep.cli.doctor.shard_checks import check_shards

    return check_shards(config)


def _kafka(config: Config) -> Iterable[Finding]:
    from draftkeep.cli.doctor.kafka_checks import check_kafka

    return check_kafka(config)


def _tenants(config: Config) -> Finding:
    if not config.tenants:
        return Finding(
            check="tenants",
            status="fail",
            detail="none configured, so every request is refused",
            remedy="add a [[tenants]] table with a name and api_key_sha256 (draftkeep keygen)",
        )
    if config.serve.open_metrics and config.serve.host not in LOOPBACK:
        return Finding(
            check="tenants",
            status="warn",
            detail=f"everyone who reaches {config.serve.host} may read /metrics",
            remedy="unset serve.open_metrics and use a key with the scope metrics",
        )
    modes = ", ".join(_described(tenant) for tenant in config.tenants)
    detail = f"{len(config.tenants)} configured: {modes}"
    return Finding(check="tenants", status="ok", detail=detail)


def _described(tenant: TenantConfig) -> str:
    count = len(tenant.all_keys)
    return f"{tenant.name} ({tenant.capture}, {count} key{'s' if count > 1 else ''})"


def _keys(config: Config) -> Finding:
    from draftkeep.policies.keyring import JobKeys
    from draftkeep.store.anchors import ISSUER

    path = config.keys_path
    if not (path / "keyring.db").exists() and not any(path.glob("*.kek")):
        if (config.state_dir / "anchors" / ISSUER).exists():
            return Finding(
                check="keys",
                status="fail",
                detail=f"none in {path}, but {config.state_dir} was used with a keyring",
                remedy="set keys_dir to where it lies; if it is lost, see docs/operations.md",
            )
        if _nearest(path).stat().st_dev == _nearest(config.state_dir).stat().st_dev:
            return _beside_data(f"none in {path} yet, on the file system of the data")
        return Finding(
            check="keys", status="ok", detail=f"none in {path} yet; made at the first start"
        )
    # A job's view: it reads every secret file and changes nothing.
    JobKeys.open(path, clock=time.time).close()
    loose = [
        file.name for file in path.iterdir() if file.suffix in (".kek", ".key") and _loose(file)
    ]
    if loose:
        return Finding(
            check="keys",
            status="fail",
            detail=f"readable by others: {', '.join(sorted(loose))}",
            remedy=f"chmod 600 {path}/*.kek {path}/*.key",
        )
    if path.stat().st_dev == _nearest(config.state_dir).stat().st_dev:
        return _beside_data("keys and data lie on one file system")
    return Finding(check="keys", status="ok", detail="readable, and of one keyring")


def _beside_data(detail: str) -> Finding:
    return Finding(
        check="keys",
        status="warn",
        detail=detail,
        remedy="set keys_dir to a file system that is not in the data's backups",
    )


def _log(config: Config) -> Finding:
    from draftkeep.ingest.sqlite_log import SqliteLog

    path = config.log_path
    if not path.exists():
        return Finding(check="log", status="ok", detail="empty; it is made at the first start")
    log = SqliteLog.open_reader(path)
    try:
        size = log.size_bytes()
        first, after = log.bounds()
    finally:
        log.close()
    detail = (
        f"{after - first} records wait, {size / 1e6:.1f} of {config.log.cap_bytes / 1e6:.0f} MB"
    )
    if size > config.log.cap_bytes // 2:
        return Finding(
            check="log",
            status="warn",
            detail=detail,
            remedy=(
                "see whether the brokers take what the node, or draftkeep forward, sends; "
                if config.kafka.servers
                else "run draftkeep compact; "
            )
            + "at the cap, traces are dropped",
        )
    return Finding(check="log", status="ok", detail=detail)


def _catalog(config: Config) -> Finding:
    from draftkeep.store.catalog import Catalog

    try:
        catalog = Catalog.configured(config, create=False, migrate=False)
    except NoCatalogError as error:
        where = str(error).partition("; ")[0]
        return Finding(
            check="catalog", status="ok", detail=f"{where} yet; it is made at the first start"
        )
    catalog.close()
    return Finding(check="catalog", status="ok", detail=catalog.place)


def _disk(config: Config) -> Finding:
    place = _nearest(config.state_dir)
    free = shutil.disk_usage(place).free
    needed = max(MIN_FREE_BYTES, 2 * config.log.cap_bytes)
    if not os.access(place, os.W_OK):
        return Finding(
            check="disk",
            status="fail",
            detail=f"{place} is not writable",
            remedy="choose another state_dir or fix its owner",
        )
    if free < needed:
        return Finding(
            check="disk",
            status="warn",
            detail=f"{free / 1e9:.1f} GB free, {needed / 1e9:.1f} wanted",
            remedy="free some space or lower log.cap_bytes",
        )
    return Finding(check="disk", status="ok", detail=f"{free / 1e9:.1f} GB free")


def _loose(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o077)


def _nearest(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
