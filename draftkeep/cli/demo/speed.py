"""Speed-up over the target alone: the same prompts with and without speculation, in turn."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from draftkeep.cli.demo.traffic import Endpoint
from draftkeep.cli.demo.workload import WorkItem


def measure_speed(
    endpoint: Endpoint, items: Sequence[WorkItem], *, console: Console
) -> dict[str, Any]:
    """Send each item alone, once without and once with speculation, alternating which is first.

    Both runs are in one server and interleaved, so a slower minute of the machine hits both. The
    two answers must be the same text: their count is returned beside the ratio of the times.
    Nothing sent here is captured.
    """
    spent_s = {"off": 0.0, "auto": 0.0}
    tokens = same = 0
    with endpoint.client() as client:
        try:
            for number, item in enumerate(track(items, "speed", console=console)):
                order = ("off", "auto") if number % 2 == 0 else ("auto", "off")
                texts = {}
                for mode in order:
                    endpoint.admin(client, "POST", "/admin/speculation", {"mode": mode})
                    started = time.monotonic()
                    texts[mode], count = endpoint.complete(client, item, store=False)
                    spent_s[mode] += time.monotonic() - started
                    if mode == "auto":
                        state = endpoint.admin(client, "GET", "/admin/stats")["speculation"]
                tokens += count
                same += texts["off"] == texts["auto"]
        finally:
            endpoint.admin(client, "POST", "/admin/speculation", {"mode": "auto"})
    return {
        "speedup": spent_s["off"] / spent_s["auto"],
        "plain_tokens_per_s": tokens / spent_s["off"],
        "speculative_tokens_per_s": tokens / spent_s["auto"],
        "prompts": len(items),
        "identical_answers": same,
        "conditions": "one SQL request at a time, prefill and HTTP included",
        "speculation": state,
    }
