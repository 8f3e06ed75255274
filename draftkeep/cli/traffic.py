"""Sends a workload to a running endpoint over HTTP, some requests at a time, and keeps count.

What was sent is written down line by line, so an interrupted round goes on where it stopped.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftkeep.cli.workload import WorkItem
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
    """What came of a round so far: requests answered and output tokens, by domain."""

    requests: Counter[str]
    tokens: Counter[str]
    seconds: float = 0.0


def send(
    endpoint: Endpoint,
    items: Sequence[WorkItem],
    *,
    journal: Path,
    workers: int,
    budget_s: float,
    on_done: Callable[[WorkItem, int], None],
) -> Round:
    """Send the items not yet in `journal`, `workers` at a time, for at most `budget_s` seconds.

    Requests under way at the end of the budget are finished. The journal holds an item's index,
    domain, output tokens and the seconds spent so far; never a prompt or an answer. A failed
    request stops the round and raises; what was answered is kept.
    """
    done, result = _read_journal(journal)
    started, before_s = time.monotonic(), result.seconds
    lock, todo = threading.Lock(), iter([i for i in range(len(items)) if i not in done])

    def work() -> None:
        with endpoint.client() as client:
            while before_s + time.monotonic() - started < budget_s:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                _, tokens = endpoint.complete(client, items[index], store=True)
                with lock:
                    result.requests[items[index].domain] += 1
                    result.tokens[items[index].domain] += tokens
                    result.seconds = before_s + time.monotonic() - started
                    _write_journal(journal, index, items[index].domain, tokens, result.seconds)
                    on_done(items[index], tokens)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    return result


def _reach(client: httpx.Client, method: str, path: str, body: Any, key: str) -> httpx.Response:
    try:
        return client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
    except httpx.TransportError as error:
        raise DraftkeepError(
            f"{method} {path} got no answer ({type(error).__name__}); is the server still running?"
        ) from None


def _read_journal(journal: Path) -> tuple[set[int], Round]:
    done: set[int] = set()
    result = Round(Counter(), Counter())
    for line in journal.read_text().splitlines() if journal.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that was killed while writing it
            continue
        done.add(row["index"])
        result.requests[row["domain"]] += 1
        result.tokens[row["domain"]] += row["tokens"]
        result.seconds = row["seconds"]
    return done, result


def _write_journal(journal: Path, index: int, domain: str, tokens: int, seconds: float) -> None:
    row = {"index": index, "domain": domain, "tokens": tokens, "seconds": round(seconds, 3)}
    with journal.open("a") as file:
        file.write(json.dumps(row) + "\n")
