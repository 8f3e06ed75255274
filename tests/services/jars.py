"""The broker's own jars, resolved once by Maven from the pinned `pom.xml`."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.services.needs import JAVA, MAVEN, Need

_POM = Path(__file__).with_name("pom.xml")
# The models' cache; importing its name from there would import torch. Read once: some tests give
# theirs another.
_CACHE = Path(os.environ.get("DRAFTKEEP_CACHE") or Path.home() / ".cache" / "draftkeep")
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def jars_directory() -> Path:
    """Where the jars of this `pom.xml` lie or will lie; another pom has another directory."""
    pinned = hashlib.sha256(_POM.read_bytes()).hexdigest()[:12]
    return _CACHE / "kafka" / pinned


def kafka_needs() -> tuple[Need, ...]:
    """What a broker needs of this machine: Maven only until the jars are there."""
    return (JAVA,) if jars_directory().is_dir() else (JAVA, MAVEN)


def resolve_jars() -> Path:
    """The directory of the jars, resolving them first where nobody has.

    Processes that come meanwhile wait for the one that resolves. Raises RuntimeError with Maven's
    words where it fails, most often for want of a network.
    """
    directory = jars_directory()
    with alone():
        if not directory.is_dir():
            _resolve(directory)
    return directory


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the cache against every other process of this machine. Not to be nested."""
    directory = jars_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def class_archive(java: Path) -> Path:
    """Where this Java's archive of the broker's classes lies, once somebody made it."""
    return jars_directory() / f"classes-{java.stat().st_mtime_ns}.jsa"


def _resolve(directory: Path) -> None:
    maven = MAVEN.find()
    if maven is None:
        raise RuntimeError("Maven is missing; run make services")
    building = Path(tempfile.mkdtemp(dir=directory.parent, prefix="building-"))
    try:
        command = [str(maven), "-q", "-B", "-f", str(_POM), _COPY]
        answer = subprocess.run(
            [*command, f"-DoutputDirectory={building}", "-DincludeScope=runtime"],
            capture_output=True,
            text=True,
            env={**os.environ, "MAVEN_OPTS": "-Xmx256m"},
        )
        if answer.returncode != 0:
            raise RuntimeError(f"Maven could not resolve {_POM}:\n{answer.stdout[-2000:]}")
        # The name appears only when everything lies under it.
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
