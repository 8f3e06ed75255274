"""The demo's last page: one table, one picture, one `report.json`."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftkeep.cli.demo.setup import Profile
from draftkeep.files import write_file

Outcomes = dict[str, dict[str, Any]]


def write_report(
    state_dir: Path, outcomes: Outcomes, profile: Profile, console: Console
) -> dict[str, Any]:
    """Print the table, write `report.json` and `report.png`, and return the report."""
    report = build_report(outcomes, profile)
    write_file(state_dir / "report.json", json.dumps(report, indent=1).encode())
    _picture(report, state_dir / "report.png")
    console.print(_table(report))
    _print_rest(report, state_dir, console)
    return report


def build_report(outcomes: Outcomes, profile: Profile) -> dict[str, Any]:
    """The figures of one run. Rates that had nothing to count are null."""
    replay = outcomes["distillation"]["replay"]
    before, after = outcomes["round one"]["live"], outcomes["round two"]["live"]
    domains = {}
    for name in sorted(before):
        late = after.get(name, {})
        domains[name] = {
            "replay_before": replay.get(name, {}).get("before"),
            "replay_after": replay.get(name, {}).get("after"),
            "live_before": _ratio(before[name].get("accepted", 0), before[name].get("tested", 0)),
            "live_after": _ratio(late.get("accepted", 0), late.get("tested", 0)),
            "tokens_per_step": _ratio(late.get("output_tokens", 0), late.get("steps", 0)),
        }
    erasure = outcomes["erasure"]
    return {
        "model": profile.model,
        "domains": domains,
        "speedup": outcomes["speed"]["speedup"],
        "speed": {key: value for key, value in outcomes["speed"].items() if key != "speedup"},
        "bytes_per_position": outcomes["audit"]["bytes_per_position"],
        "erased": {name: erasure[name] for name in ("traces", "opened_after", "rows_removed")},
        "admitted": outcomes["distillation"]["admitted"],
        "stages_s": {name: outcome["seconds"] for name, outcome in outcomes.items()},
        "elapsed_s": round(sum(float(outcome["seconds"]) for outcome in outcomes.values()), 1),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _table(report: dict[str, Any]) -> Table:
    table = Table(
        title="Acceptance by domain",
        caption="replay: held-out requests, both drafters on the same tokens. live: accepted over "
        "tested drafts as served, probes before and the chosen lookahead after",
        header_style="bold",
    )
    for column in ("domain", "replay before", "replay after", "live before", "live after"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    table.add_column("tokens per step", justify="right")
    for name, row in report["domains"].items():
        table.add_row(name, *(_shown(value) for value in row.values()))
    return table


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _print_rest(report: dict[str, Any], state_dir: Path, console: Console) -> None:
    speed = report["speed"]
    spec = speed["speculation"]
    console.print(
        f"Speed-up over the target alone: [bold]{report['speedup']:.2f}x[/bold] "
        f"({speed['plain_tokens_per_s']:.1f} to {speed['speculative_tokens_per_s']:.1f} tokens/s; "
        f"{speed['conditions']}; {speed['identical_answers']} of {speed['prompts']} answers "
        f"identical). Speculation: {spec['reason']}."
    )
    console.print(
        f"Sealed bytes a position, prompts included: {report['bytes_per_position']:.1f}. "
        f"Erased traces: {report['erased']['traces']}, of which still open: "
        f"{report['erased']['opened_after']}. Elapsed: {report['elapsed_s']:.0f} s."
    )
    console.print(
        f"Everything lies in {state_dir}: shards/, catalog.db, keys/, drafters/, report.json and "
        "the picture report.png"
    )


def _picture(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(report["domains"])
    figure, both = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axes, kind, title in (
        (both[0], "replay", "held-out replay acceptance (none: nothing held out)"),
        (both[1], "live", "accepted over tested drafts, live"),
    ):
        for offset, (when, color) in enumerate((("before", "#b0b7c3"), ("after", "#2f6f9f"))):
            shares = [report["domains"][name][f"{kind}_{when}"] for name in names]
            places = [index + (offset - 0.5) * 0.38 for index in range(len(names))]
            heights = [share or 0.0 for share in shares]
            bars = axes.bar(places, heights, width=0.36, label=when, color=color)
            # No bar at all would look like a share of nothing.
            labels = ["none" if share is None else f"{share:.2f}" for share in shares]
            axes.bar_label(bars, labels, padding=2)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(0, 1.08)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].legend(frameon=False, loc="upper left")
    figure.suptitle(f"What the drafter learned from its own traffic ({report['model']})")
    figure.savefig(path, dpi=150)
    plt.close(figure)
