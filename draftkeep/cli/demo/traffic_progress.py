"""The progress bar of a round of traffic."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftkeep.cli.demo.workload import WorkItem


@contextmanager
def traffic_bar(
    console: Console, requests: int, budget_s: float, at_least: int
) -> Iterator[Callable[[WorkItem, int], None]]:
    """Show requests answered and positions a second; yields the callback that feeds it.

    `budget_s` and `at_least` say how long a round sends, as `traffic.send` has them.
    """
    least = f", at least {at_least} of them" if at_least else ""
    console.print(f"Sending up to {requests} requests for {budget_s:.0f} s{least}")
    started = time.monotonic()
    tokens = 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("requests", total=requests, rate="")

        def on_done(item: WorkItem, item_tokens: int) -> None:
            nonlocal tokens
            tokens += item_tokens
            rate = tokens / max(time.monotonic() - started, 1e-9)
            bar.update(task, advance=1, rate=f"{tokens} positions, {rate:.0f}/s")

        yield on_done
