"""Sends a workload to a running endpoint over HTTP, some requests at a time, and keeps count.

What was sent is written down line by line, so an interrupted round goes on where it stopped.
"""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftkeep.cli.demo.workload import WorkItem
from draftkeep.errors import DraftkeepError

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to send requests, and as whom. `model` is the served model's id."""

    url: str
    api_key: str
    admin_key: str
    model: str

    def client(self) -> httpx.Client:
        """A client for this endpoint, closed by the caller; no proxy of the environment is used."""
        return httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def admin(self, client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
        """Call an admin route and return its JSON; raises DraftkeepError on anything but 200."""
        response = _reach(client, method, path, body, self.admin_key)
        if response.status_code != 200:
            raise DraftkeepError(f"{method} {path} answered {response.status_code}, expected 200")
        return response.json()

    def complete(self, client: httpx.Client, item: WorkItem, *, store: bool) -> tuple[str, int]:
        """Send one item; returns the answer and its number of tokens."""
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": item.system},
                {"role": "user", "content": item.prompt},
            ],
            "temperature": item.temperature,
            "max_completion_tokens": item.max_tokens,
            "seed": item.seed,
            "safety_identifier": item.subject,
            "metadata": {"domain": item.domain},
            "store": store,
        }
        response = _reach(client, "POST", "/v1/chat/completions", body, self.api_key)
        if response.status_code != 200:
            raise DraftkeepError(f"the endpoint answered {response.status_code}, expected 200")
        answer = response.json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


@dataclass(slots=True)
class Round:
    """What came of a round so far, by domain: requests answered, output tokens, who asked."""

    requests: Counter[str]
    tokens: Counter[str]
    subjects: defaultdict[str, set[str]]
    seconds: float = 0.0

    def add(self, item: WorkItem, tokens: int) -> None:
        """Count one answered request."""
        self.requests[item.domain] += 1
        self.tokens[item.domain] += tokens
        self.subjects[item.domain].add(item.subject)


def send(
    endpoint: Endpoint,
    items: Sequence[WorkItem],
    *,
    journal: Path,
    workers: int,
    budget_s: float,
    at_least: int,
    on_done: Callable[[WorkItem, int], None],
) -> Round:
    """Send the items not yet in `journal`, `workers` at a time.

    The first `at_least` are always sent, later ones within `budget_s` seconds of sending, earlier
    runs included. Requests under way at the end, at an error or at Ctrl-C are finished and written
    down; then the error is raised. The journal holds an item's index, its tokens and the seconds
    spent so far; never a prompt or an answer.
    """
    done, result = _read_journal(journal, items)
    started, before_s = time.monotonic(), result.seconds
    lock, stop = threading.Lock(), threading.Event()
    todo = iter([index for index in range(len(items)) if index not in done])

    def take() -> int | None:
        with lock:
            index = next(todo, None)
        over = before_s + time.monotonic() - started >= budget_s
        return None if index is None or (over and index >= at_least) else index

    def work() -> None:
        with endpoint.client() as client:
            while not stop.is_set() and (index := take()) is not None:
                _, tokens = endpoint.complete(client, items[index], store=True)
                with lock:
                    result.add(items[index], tokens)
                    result.seconds = before_s + time.monotonic() - started
                    _write_journal(journal, index, tokens, result.seconds)
                    on_done(items[index], tokens)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
    return result


def _reach(client: httpx.Client, method: str, path: str, body: Any, key: str) -> httpx.Response:
    try:
        return client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
    except httpx.TransportError as error:
        raise DraftkeepError(
            f"{method} {path} got no answer ({type(error).__name__}); is the server still running?"
        ) from None


def _read_journal(journal: Path, items: Sequence[WorkItem]) -> tuple[set[int], Round]:
    done: set[int] = set()
    result = Round(Counter(), Counter(), defaultdict(set))
    for line in journal.read_text().splitlines() if journal.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that was killed while writing it
            continue
        done.add(row["index"])
        result.add(items[row["index"]], row["tokens"])
        result.seconds = row["seconds"]
    return done, result


def _write_journal(journal: Path, index: int, tokens: int, seconds: float) -> None:
    row = {"index": index, "tokens": tokens, "seconds": round(seconds, 3)}
    with journal.open("a") as file:
        file.write(json.dumps(row) + "\n")
