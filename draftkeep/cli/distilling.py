"""A distillation job with progress bars, its outcome printed and left in `jobs/last.json`."""

import json

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from draftkeep.cli.tables import plain_table
from draftkeep.config import Config
from draftkeep.distill.job import run_job
from draftkeep.distill.progress import JobProgress
from draftkeep.distill.result import JobResult
from draftkeep.files import write_file

STAGES = {
    "select": "opening traces",
    "baseline": "measuring the drafter that serves",
    "train": "training",
    "evaluate": "measuring the candidate",
}


def distill_with_progress(config: Config, *, tenant: str) -> JobResult:
    """Run or resume the tenant's job. What it decided is printed, whatever it was."""
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(report: JobProgress) -> None:
            if report.stage not in tasks:
                tasks[report.stage] = bars.add_task(STAGES[report.stage], total=1.0, note="")
            bars.update(tasks[report.stage], completed=report.fraction, note=_note(report))

        result = run_job(config, tenant=tenant, progress=progress)
    record = result.as_json()
    write_file(config.state_dir / "jobs" / "last.json", json.dumps(record, indent=1).encode())
    print_outcome(result, config, console)
    return result


def print_outcome(result: JobResult, config: Config, console: Console) -> None:
    """What a person wants to know of a job that ended, with the numbers that it failed by."""
    record = result.as_json()
    counts = record["counts"]
    console.print(f"The job ended: [bold]{record['status']}[/bold]", *record["reasons"])
    if record["status"] == "too_few_traces":
        have = counts.get("training_traces", counts.get("sealed", 0))
        console.print(
            f"{have} traces to train on, distill.min_traces is {config.distill.min_traces}"
        )
    if "too_few_requests" in record["reasons"]:
        overall = result.gate.overall if result.gate else None
        console.print(
            f"{overall.count if overall else 0} held-out requests, distill.gate_min_held_out is "
            f"{config.distill.gate_min_held_out}"
        )
    if record["replay"]:
        rows = [
            (name, *("" if value is None else f"{value:.3f}" for value in pair.values()))
            for name, pair in sorted(record["replay"].items())
        ]
        console.print(
            f"Replay acceptance on {counts.get('held_out_traces', 0)} held-out traces "
            f"(the gate wants {config.distill.gate_min_held_out} requests):"
        )
        console.print(plain_table(("domain", "before", "after"), rows))
    if record["drafter"]:
        console.print(
            f"{record['scope']}/{config.serve.channel} points at {record['drafter'][:12]}"
        )


def _note(report: JobProgress) -> str:
    if report.train is None:
        return ""
    note = f"step {report.train.step}, loss {report.train.loss:.2f}"
    if report.train.agreement is not None:
        note += f", held-out agreement {report.train.agreement:.2f}"
    return note
