"""/metrics over HTTP, what the dashboard asks of it, and what the page for its readers says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.station import ADMIN_KEY, bearer

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "draftkeep.json").read_text())


def page(station: Any) -> str:
    response = station.http.get("/metrics", headers=bearer(ADMIN_KEY))
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text: str = response.text
    return text


def families(station: Any) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(page(station))}


def total(found: dict[str, Any], name: str, **labels: str) -> float:
    return sum(
        float(sample.value)
        for sample in found[name].samples
        if labels.items() <= sample.labels.items()
    )


@pytest.fixture
def served(stations: Callable[..., Any], publish: Callable[..., bytes]) -> Any:
    """A node that drafted, swapped, captured, dropped, declined, refused and answered."""
    # Nobody listens there: a node serves and captures without its brokers.
    kafka = {"servers": ["127.0.0.1:1"], "deadline_s": 1}
    station = stations(serve={"floor": "ngram"}, kafka=kafka)
    station.chat(max_tokens=12, ignore_eos=True, metadata={"domain": "sql"})
    station.chat(max_tokens=5, ignore_eos=True, tenant="open")
    station.node.registry.set_channel("everyone", "stable", publish(station, vocab=512), at_s=0.0)
    station.node.follower.poll()
    assert station.capture_stats()["acknowledged"] == 1
    station.node._outbox.emitter.close(60)
    station.chat(max_tokens=20, ignore_eos=True, metadata={"domain": "sql"})
    other = {"model": "other", "messages": [{"role": "user", "content": "How many?"}]}
    station.post("/v1/chat/completions", other)
    station.http.get("/nowhere/zebra-canary-77")
    station.capture_stats()
    # A step is reported behind what it finished.
    metrics, engine = station.node.metrics, station.node.engine
    station.wait_for(lambda: metrics.counted().total.tokens == engine.stats().output_tokens)
    return station


def test_a_served_node_counts_what_it_did(served: Any) -> None:
    found = families(served)
    stats = served.node.engine.stats()
    assert total(found, "vllm:generation_tokens") == stats.output_tokens == 37
    assert total(found, "draftkeep_drafter_tokens") == 37
    assert total(found, "draftkeep_drafter_tokens", domain="sql") == 32
    assert total(found, "vllm:prompt_tokens") == stats.prompt_tokens
    assert total(found, "vllm:spec_decode_num_draft_tokens") == stats.drafted > 0
    assert total(found, "vllm:spec_decode_num_accepted_tokens") == stats.accepted
    assert total(found, "draftkeep_drafter_tested") == stats.tested
    assert total(found, "draftkeep_drafter_steps") == stats.row_steps
    assert total(found, "vllm:request_success", finished_reason="length") == 3
    assert total(found, "draftkeep_drafter_swaps") <= 1
    assert total(found, "draftkeep_capture_acknowledged") == 1
    assert total(found, "draftkeep_capture_dropped", reason="closed") == 1
    assert total(found, "draftkeep_capture_declined", reason="never") == 1
    chat = "/v1/chat/completions"
    assert total(found, "draftkeep_http_responses", route=chat, status="200") == 3
    assert total(found, "draftkeep_http_responses", route=chat, status="404") == 1
    assert total(found, "draftkeep_http_responses", route="other", status="404") == 1
    station = served
    station.wait_for(
        lambda: (
            total(families(station), "draftkeep_forward_failures") > 0
            and total(families(station), "draftkeep_spool_records") == 1
        )
    )
    assert total(found, "draftkeep_forwarded_records") == 0
    assert total(found, "draftkeep_spool_cap_bytes") == served.node._config.log.cap_bytes
    current = stats.drafter.hex()[:12]
    assert total(found, "draftkeep_drafter_info", drafter=current) == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        counts = [s for s in found[f"vllm:{name}"].samples if s.name.endswith("_count")]
        assert [sample.value for sample in counts] == [3]


def test_what_a_request_says_is_no_label(served: Any) -> None:
    for text in ("zebra-canary-77", "a diagnosis"):
        served.chat(text, max_tokens=1, metadata={"domain": text}, user=text)
    shown = page(served)
    assert "zebra" not in shown
    assert "diagnosis" not in shown
    assert not [tenant for tenant in ("acme", "shy", '"open"') if tenant in shown]


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Every expression of its panels and annotations."""
    panels = dashboard["panels"]
    inner = [panel for row in panels for panel in row.get("panels", [])]
    targets = [target["expr"] for panel in panels + inner for target in panel.get("targets", [])]
    notes = [note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note]
    return targets + notes


def test_the_dashboard_asks_only_for_what_a_node_exports(served: Any) -> None:
    exported = {
        sample.name
        for family in text_string_to_metric_families(page(served))
        for sample in family.samples
    }
    asked = {
        name
        for query in queries(DASHBOARD)
        for name in re.findall(r"(?:vllm:|draftkeep_)[a-z0-9_]+", query)
    }
    assert len(asked) > 15
    assert asked <= exported


def test_the_dashboard_has_the_shape_grafana_imports() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(DASHBOARD)
    assert DASHBOARD["id"] is None
    variables = {item["name"]: item for item in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == source
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
    (swaps,) = [n for n in DASHBOARD["annotations"]["list"] if n["name"] == "drafter swaps"]
    assert swaps["datasource"] == source


def test_every_metric_is_documented_with_its_type_and_labels(served: Any) -> None:
    rows = {}
    for line in (DOCS / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            rows[cells[1].strip("`")] = (cells[2], set(re.findall(r"`(\w+)`", cells[3])))
    common = {"model_name", "engine"}
    exported = {}
    for family in families(served).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        names = {label for sample in family.samples for label in sample.labels} - {"le"}
        if family.name.startswith("vllm:") and family.name != "vllm:cache_config_info":
            assert common <= names
            names -= common
        exported[name] = (family.type, names)
    assert rows == exported
