"""What the tests need from the machine: find it, and install what is missing with apt.

Standard library only: `make services` runs this file with the system's Python, before there is a
virtual environment. `python3 tests/services/needs.py` installs; tests import it to skip.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIN_JAVA = 17
MIN_POSTGRESQL = 13
INSTALL = "make services"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A program of the machine. The first of `packages` that apt knows brings it."""

    name: str
    find: Callable[[], Path | None]
    packages: tuple[str, ...]


@cache
def find_java() -> Path | None:
    """A `java` of a version that runs the broker, or None: JAVA_HOME, the path, /usr/lib/jvm."""
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    candidates = [Path(home) / "bin/java"] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += sorted(Path("/usr/lib/jvm").glob("*/bin/java"))
    return next((path for path in candidates if _java_version(path) >= MIN_JAVA), None)


def _java_version(path: Path) -> int:
    try:
        answer = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', answer.stderr)
    return int(found[1]) if found else 0


def find_maven() -> Path | None:
    """Maven, or None."""
    found = shutil.which("mvn")
    return Path(found) if found else None


def find_strace() -> Path | None:
    """strace, or None."""
    found = shutil.which("strace")
    return Path(found) if found else None


@cache
def find_postgresql() -> Path | None:
    """The directory of the newest PostgreSQL's server programs, or None.

    Debian keeps it off the path.
    """
    found = shutil.which("postgres")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += Path("/usr/lib/postgresql").glob("*/bin")
    versions = {_postgresql_version(path): path for path in candidates}
    newest = max(versions, default=0)
    return versions[newest] if newest >= MIN_POSTGRESQL else None


def _postgresql_version(directory: Path) -> int:
    try:
        answer = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, timeout=60
        )
    except OSError:
        return 0
    found = re.search(r"PostgreSQL\) (\d+)", answer.stdout)
    return int(found[1]) if found else 0


JAVA = Need(
    name=f"Java {MIN_JAVA} or newer",
    find=find_java,
    # Debian 12 has 17 alone, Debian 13 has 21 and 25.
    packages=("openjdk-17-jre-headless", "openjdk-21-jre-headless", "openjdk-25-jre-headless"),
)
MAVEN = Need(name="Maven", find=find_maven, packages=("maven",))
POSTGRESQL = Need(
    name=f"PostgreSQL {MIN_POSTGRESQL} or newer", find=find_postgresql, packages=("postgresql",)
)
STRACE = Need(name="strace", find=find_strace, packages=("strace",))
NEEDS = (JAVA, MAVEN, POSTGRESQL, STRACE)


def missing(needs: Iterable[Need]) -> list[Need]:
    """Those of `needs` that the machine lacks."""
    return [need for need in needs if need.find() is None]


def _apt_knows(package: str) -> bool:
    answer = subprocess.run(["apt-cache", "policy", package], capture_output=True, text=True)
    return bool(re.search(r"Candidate: (?!\(none\))", answer.stdout))


def _apt(*arguments: str) -> None:
    command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", *arguments]
    if os.geteuid() != 0:
        command = ["sudo", *command]
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def install() -> str | None:
    """Install what is missing; None where all is there, else what a person has to do."""
    lacking = missing(NEEDS)
    if not lacking:
        return None
    names = ", ".join(need.name for need in lacking)
    if shutil.which("apt-get") is None:
        return f"no apt-get here: install {names} yourself, so that they are on PATH"
    if os.geteuid() != 0 and shutil.which("sudo") is None:
        return f"{names} missing, and neither root nor sudo: have an administrator install them"
    _apt("update")
    packages = []
    for need in lacking:
        known = next((package for package in need.packages if _apt_knows(package)), None)
        if known is None:
            return f"apt knows none of {', '.join(need.packages)}: install {need.name} yourself"
        packages.append(known)
    _apt("install", "--no-install-recommends", *packages)
    find_java.cache_clear()
    find_postgresql.cache_clear()
    lacking = missing(NEEDS)
    names = ", ".join(need.name for need in lacking)
    return f"apt installed {' '.join(packages)}, yet {names} cannot be found" if lacking else None


def main() -> None:
    """Install, then say where everything is."""
    problem = install()
    if problem:
        sys.exit(problem)
    for need in NEEDS:
        print(f"{need.name}: {need.find()}")


if __name__ == "__main__":
    main()
