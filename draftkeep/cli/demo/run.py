"""`draftkeep demo`: the whole loop on one machine, through the real parts.

The demo only orchestrates. It starts `draftkeep serve` as a process, talks to it over HTTP, and
runs `draftkeep compact` and `draftkeep distill` as the processes they are in production. Each
stage's outcome is written down, so an interrupted demo goes on with the stage it was in.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftkeep.cli.demo.broker import make_topic, remove_topic, servers_of
from draftkeep.cli.demo.child import ends_in_order
from draftkeep.cli.demo.report import write_report
from draftkeep.cli.demo.server_process import ServerProcess
from draftkeep.cli.demo.setup import Profile, prepare, profile_for
from draftkeep.cli.demo.stages import Stages
from draftkeep.config import load_config
from draftkeep.errors import ConfigError, DraftkeepError
from draftkeep.files import write_file


def demo(
    model: Annotated[
        str, typer.Option(help="smollm2, tiny, a transformers directory or a hub name.")
    ] = "smollm2",
    state_dir: Annotated[
        Path, typer.Option(help="Where everything the demo makes is kept.")
    ] = Path("draftkeep-demo"),
    log: Annotated[
        str, typer.Option(help="kafka://HOST:PORT: traces go through a broker (make kafka).")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete that directory first.")] = False,
) -> None:
    """Watch a drafter learn from its own service's traffic, then erase a person from it."""
    console = Console()
    try:
        with ends_in_order():
            run_demo(model=model, state_dir=state_dir, log=log, fresh=fresh, console=console)
    except KeyboardInterrupt:
        console.print("\nInterrupted. The same command without --fresh goes on from here.")
        raise


def run_demo(*, model: str, state_dir: Path, log: str, fresh: bool, console: Console) -> None:
    """Run or resume the demo and leave `report.json` and `report.png` in `state_dir`.

    `log` is kafka://HOST:PORT, or empty for the node's own log.
    """
    servers = servers_of(log) if log else ()
    with _alone_in(state_dir):
        if fresh:
            _empty(state_dir, console)
        profile = profile_for(model)
        config_path = prepare(state_dir, profile, servers)
        progress = Progress(state_dir / "demo" / "progress.json")
        if progress.done("audit"):
            console.print("This demo has already finished; --fresh starts over.")
        else:
            _run_stages(profile, config_path, state_dir, progress, console)
        write_report(state_dir, progress.outcomes, profile, console)


def _run_stages(
    profile: Profile, config_path: Path, state_dir: Path, progress: "Progress", console: Console
) -> None:
    config = load_config(config_path)
    if config.kafka.servers:
        make_topic(config)
        console.print(
            f"Traces go over topic {config.kafka.topic} at {', '.join(config.kafka.servers)}"
        )
    with ServerProcess(config_path, state_dir, console) as server:
        stages = Stages(
            profile=profile,
            config_path=config_path,
            state_dir=state_dir,
            server=server,
            console=console,
        )
        for number, (name, stage) in enumerate(stages.in_order(), start=1):
            if progress.done(name):
                continue
            console.rule(f"[bold]{number}/{len(stages.in_order())} {name}", align="left")
            started = time.monotonic()
            outcome = stage(progress.outcomes)
            progress.finish(name, outcome, seconds=time.monotonic() - started)


class Progress:
    """Which stages are over, and what came of each. Written atomically after every stage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, dict[str, object]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def done(self, name: str) -> bool:
        """True where the stage has finished."""
        return name in self.outcomes

    def finish(self, name: str, outcome: dict[str, object], *, seconds: float) -> None:
        """Record a stage's outcome and how long it took."""
        self.outcomes[name] = {**outcome, "seconds": round(seconds, 1)}
        write_file(self._path, json.dumps(self.outcomes, indent=1).encode())


@contextmanager
def _alone_in(state_dir: Path) -> Iterator[None]:
    """No second demo in a directory: each would take the other's lines for its own."""
    state_dir.mkdir(parents=True, exist_ok=True)
    # The directory itself is locked, which --fresh empties and leaves there.
    directory = os.open(state_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another demo runs in {state_dir}; wait for it, or choose another --state-dir"
            ) from None
        yield
    finally:
        os.close(directory)


def _empty(state_dir: Path, console: Console) -> None:
    # Only what a demo made is deleted: a mistyped --state-dir must not cost anybody a directory.
    if any(state_dir.iterdir()) and not (state_dir / "demo").is_dir():
        raise ConfigError(
            f"{state_dir} was not made by the demo, so --fresh will not delete it; "
            "choose another --state-dir"
        )
    config_path = state_dir / "config.toml"
    if config_path.exists() and (config := load_config(config_path)).kafka.servers:
        try:
            remove_topic(config)
        except DraftkeepError as error:
            # What it holds is unreadable without the keys that go with the directory.
            console.print(f"Left topic {config.kafka.topic} behind: {error}", markup=False)
    for item in state_dir.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
