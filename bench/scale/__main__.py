"""Whether what a trace costs stays flat while a store fills: 10 M headers, 1 M sealed traces.

    python -m bench.scale DIRECTORY [--only PHASE ...] [--headers N] [--traces N] [--fresh]

Every phase fills something of the package's own, and measures at 1, 3, 10, 30 and 100 hundredths
of it. The data and what was measured stay in DIRECTORY: a run that was stopped goes on where it
was. Each phase appends its rows to bench/results/scale.jsonl when it is done.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from bench.results import RESULTS_DIR
from bench.scale.bucket import one_bucket
from bench.scale.catalog import Filling
from bench.scale.keys import keyring
from bench.scale.report import append, show
from bench.scale.run import Run, Sizes
from bench.scale.sealed import sealed
from bench.scale.shards import many_shards
from bench.scale.traffic import Traffic
from draftkeep.errors import DraftkeepError
from draftkeep.store.catalog import Catalog
from draftkeep.store.storage_local import LocalStorage
from tests.services.needs import POSTGRESQL
from tests.services.postgres import running_postgres

_HELP = {
    "headers": "synthetic headers a catalog is filled with",
    "per_bucket": "of them in one expiry bucket",
    "bucket": "headers of the one large bucket that expires at once",
    "traces": "really sealed traces",
    "subjects": "people who send them",
    "keys": "keys in a keyring",
    "shards": "shards in a catalog",
    "batch": "records that the compactor commits at a time",
}


def phases(options: argparse.Namespace) -> dict[str, Callable[[Run], None]]:
    """Every phase by name, in order."""
    return {
        "sqlite": _sqlite,
        "postgresql": lambda run: _postgresql(run, options.postgres),
        "bucket": one_bucket,
        "sealed": sealed,
        "keyring": keyring,
        "shards": many_shards,
    }


def _sqlite(run: Run) -> None:
    directory = run.directory / "sqlite"
    catalog = Catalog.open(directory / "catalog.db")
    try:
        _fill(run, "sqlite", catalog, LocalStorage(directory / "shards"), readable=True)
    finally:
        catalog.close()


def _postgresql(run: Run, url: str | None) -> None:
    if url is None and POSTGRESQL.find() is None:
        run.console.print("PostgreSQL is not installed; run make services, or give --postgres URL")
        return
    directory = run.directory / "postgresql"
    with _server(url) as found:
        catalog = Catalog.connect(found)
        try:
            if url is None:
                shutil.rmtree(directory, ignore_errors=True)
            storage = LocalStorage(directory / "shards")
            _fill(run, "postgresql", catalog, storage, readable=False)
        finally:
            catalog.close()


def _fill(run: Run, phase: str, catalog: Catalog, storage: LocalStorage, *, readable: bool) -> None:
    traffic = Traffic(per_bucket=run.sizes.per_bucket)
    filling = Filling(run, phase, catalog, storage, traffic, readable=readable)
    filling.fill(run.sizes.headers)


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    """The database that was given, or an empty one of a server of the bench's own."""
    if url is not None:
        yield url
        return
    with running_postgres(fsync=True) as server:
        yield server.create_database()


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    options = _parser().parse_args(arguments)
    # Where nobody looks, wide enough for the tables.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.fresh and (options.directory / "sizes.json").exists():
        shutil.rmtree(options.directory)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    try:
        _run_phases(Run(options.directory, sizes, console), options)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 130
    except DraftkeepError as error:
        console.print(f"[red]{error}[/]")
        return 1
    return 0


def _run_phases(run: Run, options: argparse.Namespace) -> None:
    known = phases(options)
    for name in options.only or [name for name in known if name not in run.finished]:
        run.console.rule(name)
        start_s = time.perf_counter()
        known[name](run)
        show(run, name)
        append(run, name, seconds=time.perf_counter() - start_s, directory=options.results_dir)
        run.finish(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.add_argument("directory", type=Path, help="for its data, about 5 GB; stays afterwards")
    names = list(phases(argparse.Namespace()))
    parser.add_argument("--only", nargs="+", choices=names, help="these phases alone")
    parser.add_argument("--fresh", action="store_true", help="remove the directory first")
    parser.add_argument("--postgres", help="an empty database to fill, instead of one of its own")
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, help=_HELP[field.name])
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
