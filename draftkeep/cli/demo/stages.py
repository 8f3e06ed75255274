"""The stages of the demo. Each returns JSON values, which later stages and the report read."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkeep.cli.auditing import ask, print_result
from draftkeep.cli.demo.broker import wait_until_forwarded
from draftkeep.cli.demo.child import run_child
from draftkeep.cli.demo.live_counts import LiveCounts
from draftkeep.cli.demo.openable import Openable, aliases_of, count_openable
from draftkeep.cli.demo.server_process import ServerProcess
from draftkeep.cli.demo.setup import TENANT, Profile
from draftkeep.cli.demo.speed import measure_speed
from draftkeep.cli.demo.traffic import Round, send
from draftkeep.cli.demo.traffic_progress import traffic_bar
from draftkeep.cli.demo.workload import WorkItem, generate
from draftkeep.config import load_config
from draftkeep.errors import DraftkeepError
from draftkeep.files import write_file
from draftkeep.ingest.record import ENVELOPE_BYTES

SWAP_TIMEOUT_S = 60.0
ROUND_ONE_SEED, ROUND_TWO_SEED, SPEED_SEED = 1, 2, 3
AUDIT_QUERIES = {
    "What is stored, and until when?": """
        SELECT domain, count(*) AS traces, sum(positions) AS positions,
               sum(body_bytes) AS body_bytes, to_timestamp(max(deadline_s)) AS last_deadline
        FROM traces WHERE NOT erased GROUP BY domain ORDER BY domain
    """,
    "Who was erased, and which drafters did that take out of service?": """
        SELECT erasures.id[:8] AS erasure, erasures.traces, keys_destroyed,
               (SELECT count(*) FROM drafters WHERE status = 'quarantined') AS quarantined,
               (SELECT list(digest[:12]) FROM channels) AS serving
        FROM erasures ORDER BY planned_s
    """,
}
SIZE_QUERY = "SELECT sum(body_bytes), count(*), sum(positions) FROM traces"

Outcome = dict[str, Any]
Outcomes = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One method a stage, in the order of `in_order`."""

    profile: Profile
    config_path: Path
    state_dir: Path
    server: ServerProcess
    console: Console

    def in_order(self) -> tuple[tuple[str, Callable[[Outcomes], Outcome]], ...]:
        """(name, stage); a stage is given what earlier ones left."""
        return (
            ("cold drafter", self._cold_drafter),
            ("round one", self._round_one),
            ("compaction", self._compaction),
            ("distillation", self._distillation),
            ("hot swap", self._hot_swap),
            ("round two", self._round_two),
            ("speed", self._speed),
            ("erasure", self._erasure),
            ("audit", self._audit),
        )

    def _cold_drafter(self, outcomes: Outcomes) -> Outcome:
        output = self._draftkeep("drafters", "cold", capture=True)
        digest = output.strip().splitlines()[-1]
        self._wait_for_drafter(digest)
        self.console.print(f"A drafter that knows nothing yet serves: {digest[:12]}")
        return {"drafter": digest}

    def _round_one(self, outcomes: Outcomes) -> Outcome:
        items = generate(requests=self.profile.round_one_requests, seed=ROUND_ONE_SEED)
        return self._round(
            "round-1",
            items,
            budget_s=self.profile.round_one_budget_s,
            at_least=self.profile.round_one_least,
        )

    def _round_two(self, outcomes: Outcomes) -> Outcome:
        items = generate(requests=self.profile.round_two_requests, seed=ROUND_TWO_SEED)
        return self._round("round-2", items, budget_s=self.profile.round_two_budget_s, at_least=0)

    def _round(
        self, name: str, items: list[WorkItem], *, budget_s: float, at_least: int
    ) -> Outcome:
        items = [self._capped(item) for item in items]
        folder = self.state_dir / "demo"
        with (
            LiveCounts(self.server.endpoint, folder / f"{name}-live.json") as live,
            traffic_bar(self.console, len(items), budget_s, at_least) as on_done,
        ):
            result = send(
                self.server.endpoint,
                items,
                journal=folder / f"{name}.jsonl",
                workers=self.profile.workers,
                budget_s=budget_s,
                at_least=at_least,
                on_done=on_done,
            )
        people = {name: len(subjects) for name, subjects in result.subjects.items()}
        self.console.print(
            f"{sum(result.requests.values())} requests from "
            + ", ".join(f"{count} people on {name}" for name, count in sorted(people.items()))
        )
        return {**_summary(result), "subjects": people, "live": live.totals}

    def _capped(self, item: WorkItem) -> WorkItem:
        if item.max_tokens <= self.profile.max_tokens:
            return item
        return replace(item, max_tokens=self.profile.max_tokens)

    def _compaction(self, outcomes: Outcomes) -> Outcome:
        report = self._compact()
        self.console.print(
            f"{report['stored']} traces in {report['shards']} shards; the compactor held no key"
        )
        return dict(report)

    def _distillation(self, outcomes: Outcomes) -> Outcome:
        self._draftkeep("distill", "--tenant", TENANT)
        result: Outcome = json.loads((self.state_dir / "jobs" / "last.json").read_text())
        return result

    def _hot_swap(self, outcomes: Outcomes) -> Outcome:
        digest = outcomes["distillation"].get("drafter")
        if not digest or not outcomes["distillation"].get("admitted"):
            self.console.print("The gate did not admit the drafter; the old one goes on serving.")
            return {"drafter": outcomes["cold drafter"]["drafter"], "swapped": False}
        self._wait_for_drafter(digest)
        self.console.print(f"The running server swapped to {digest[:12]} between two steps")
        return {"drafter": digest, "swapped": True}

    def _speed(self, outcomes: Outcomes) -> Outcome:
        items = generate(requests=self.profile.speed_prompts * 3, seed=SPEED_SEED)
        sql = [self._capped(item) for item in items if item.domain == "sql"]
        return measure_speed(
            self.server.endpoint, sql[: self.profile.speed_prompts], console=self.console
        )

    def _erasure(self, outcomes: Outcomes) -> Outcome:
        # Speed was measured with store: false, so round two is the last traffic that was kept.
        self._compact()
        subject = self._whom_to_erase()
        found = self._find_traces(subject)
        endpoint = self.server.endpoint
        with endpoint.client() as client:
            result = endpoint.admin(
                client, "POST", "/admin/erase", {"tenant": TENANT, "subject": subject}
            )
        opened_after = count_openable(self.config_path, TENANT, found.aliases)
        # Keys first, then bytes: until here their rows lay in the shards and opened no more.
        rows_removed = self._compact()["rows_rewritten_away"]
        self.console.print(
            f"One person erased: {found.traces} traces, {found.opened} opened before, "
            f"{opened_after.opened} opened after; the next compaction took {rows_removed} rows out "
            "of the shards; drafters that had learned from them and are quarantined: "
            f"{result['drafters_quarantined']}"
        )
        return {
            "traces": found.traces,
            "opened_before": found.opened,
            "opened_after": opened_after.opened,
            "rows_removed": rows_removed,
            "result": result,
        }

    def _whom_to_erase(self) -> str:
        """One of our own users: one whom a drafter learned from, where there is any.

        The first choice stands, also for a demo that is interrupted in the erasure.
        """
        path = self.state_dir / "demo" / "erasing-whom.json"
        if path.exists():
            return str(json.loads(path.read_text()))
        rows = ask(load_config(self.config_path), "SELECT DISTINCT alias FROM lineage").rows
        learned = {bytes.fromhex(alias) for (alias,) in rows}
        people = [f"sql-user-{number:03d}" for number in range(20)]
        random.Random(ROUND_ONE_SEED).shuffle(people)  # noqa: S311 (not a secret)
        chosen = next(
            (name for name in people if aliases_of(self.config_path, TENANT, name) & learned),
            people[0],
        )
        write_file(path, json.dumps(chosen).encode())
        return chosen

    def _compact(self) -> Outcome:
        config = load_config(self.config_path)
        if config.kafka.servers:
            wait_until_forwarded(config)
        report: Outcome = json.loads(self._draftkeep("compact", capture=True))
        return report

    def _find_traces(self, subject: str) -> Openable:
        """The person's traces before the erasure, remembered for a demo that is interrupted in it:
        afterwards nobody can tell which aliases were theirs."""
        path = self.state_dir / "demo" / "erasing.json"
        if path.exists():
            return Openable.from_json(path.read_text())
        found = count_openable(
            self.config_path, TENANT, aliases_of(self.config_path, TENANT, subject)
        )
        write_file(path, found.to_json().encode())
        return found

    def _audit(self, outcomes: Outcomes) -> Outcome:
        config = load_config(self.config_path)
        answers: Outcome = {}
        for question, sql in AUDIT_QUERIES.items():
            result = ask(config, sql)
            self.console.print(f"\n[bold]{question}[/bold]")
            print_result(result, self.console)
            answers[question] = [
                dict(zip(result.columns, map(str, row), strict=True)) for row in result.rows
            ]
        bodies, traces, positions = ask(config, SIZE_QUERY).rows[0]
        sealed = bodies + traces * ENVELOPE_BYTES
        return {"answers": answers, "bytes_per_position": float(sealed) / float(positions)}

    def _draftkeep(self, *arguments: str, capture: bool = False) -> str:
        return run_child([*arguments, "--config", str(self.config_path)], capture=capture)

    def _wait_for_drafter(self, digest: str) -> None:
        deadline = time.monotonic() + SWAP_TIMEOUT_S
        endpoint = self.server.endpoint
        with endpoint.client() as client, self.console.status("Waiting for the server to swap"):
            while time.monotonic() < deadline:
                if endpoint.admin(client, "GET", "/admin/stats")["drafter"] == digest:
                    return
                time.sleep(0.2)
        raise DraftkeepError(
            f"the serving node did not take drafter {digest[:12]}; "
            f"see {self.state_dir / 'serve.log'}"
        )


def _summary(result: Round) -> Outcome:
    tokens = sum(result.tokens.values())
    return {
        "requests": dict(result.requests),
        "tokens": dict(result.tokens),
        "tokens_per_s": round(tokens / max(result.seconds, 1e-9), 1),
    }
