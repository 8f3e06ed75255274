"""The parts of the serving bench that decide what is measured, and one small run of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.adapt.plan import AdaptPlan, shrunk
from bench.adapt.traces import TraceFile, opened, split
from bench.peers.peer import SLOTS, PeerResult
from bench.peers.vllm_cpu import read_result
from bench.prompts import ALL_DOMAINS, HOME, UNSEEN, domain_named, draw_texts
from bench.serving.__main__ import Journal, main
from draftkeep.cli.demo.workload import DOMAINS
from draftkeep.errors import DraftkeepError, InputError
from draftkeep.ingest.trace import Finish, TopK, Trace
from draftkeep.kernels.sampling import Sampling
from draftkeep.store.models.target import load_target


def _trace(tokens: Any) -> Any:
    count = len(tokens)
    return Trace(
        prompt_ids_P=np.array([1, 2], np.int32),
        output_ids_T=np.array(tokens, np.int32),
        topk=TopK(
            ids_TK=np.array([[token, 5] for token in tokens], np.int32),
            logprobs_TK=np.full((count, 2), -1.0, np.float32),
            k_T=np.full(count, 2, np.uint8),
            tail_T=np.full(count, -1.5, np.float32),
            tail_known_T=np.ones(count, np.bool_),
        ),
        how_T=np.zeros(count, np.uint8),
        rejected_T=np.full(count, -1, np.int32),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choice=0,
        finish=Finish.LENGTH,
    )


def test_prompts_are_distinct_and_a_function_of_the_seed() -> None:
    for domain in ALL_DOMAINS:
        texts = draw_texts(domain, 30, seed=4)
        assert len(set(texts)) == 30
        assert texts == draw_texts(domain, 30, seed=4)
        assert texts != draw_texts(domain, 30, seed=5)
    plan = AdaptPlan()
    wanted = plan.measure + plan.held_out + plan.train
    assert len(draw_texts(domain_named(HOME), wanted, seed=plan.seed)) == wanted
    with pytest.raises(InputError, match="distinct"):
        draw_texts(replace(UNSEEN, make=lambda rng: rng.choice("ab")), 3, seed=0)
    assert UNSEEN.name not in {domain.name for domain in DOMAINS}


def test_a_trace_file_survives_a_kill_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    store = TraceFile(path)
    store.append([(3, _trace([7, 8, 9])), (1, _trace([4, 6]))])
    whole = path.read_bytes()
    for cut in (1, 9, 20):
        path.write_bytes(whole + whole[:cut])
        again = TraceFile(path)
        assert path.read_bytes() == whole
        assert again.indices() == {1, 3}
    found = dict(TraceFile(path).read())
    assert found[3].output_ids_T.tolist() == [7, 8, 9]
    TraceFile(path).append([(2, _trace([5]))])
    assert [index for index, _ in TraceFile(path).read()] == [3, 1, 2]


def test_held_out_prompts_are_not_trained_on() -> None:
    target = load_target("tiny")
    items = opened([(2, _trace([3])), (0, _trace([4])), (1, _trace([6]))], target, domain=HOME)
    assert [item.trace.output_ids_T[0] for item in items] == [4, 6, 3]
    training, held_out = split(items, held_out={1})
    assert [item.trace.output_ids_T[0] for item in training] == [4, 3]
    assert [item.trace.output_ids_T[0] for item in held_out] == [6]
    assert held_out[0].trace.held_out
    assert not training[0].trace.held_out


def test_a_stopped_run_goes_on_with_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    journal = Journal(path, fresh=False)
    journal.add("adapt")
    assert Journal(path, fresh=False).done == ["adapt"]
    assert Journal(path, fresh=True).done == []
    journal.add("batch1")
    journal.close()
    assert not path.exists()


def test_a_peers_result_is_found_among_its_words() -> None:
    result = {"ids": [[1]], "seconds": [0.5]}
    assert read_result(f"loading\n{json.dumps(result)}\nbye", "") == PeerResult(
        ids=[[1]], seconds=[0.5]
    )
    with pytest.raises(DraftkeepError, match="no room left"):
        read_result("7\n[]\n{}", "warning\nno room left")
    with pytest.raises(DraftkeepError, match="no output"):
        read_result("", "")


def test_plans_of_other_values_have_other_names() -> None:
    plan = AdaptPlan()
    assert plan.key == AdaptPlan().key
    assert len({plan.key, AdaptPlan(seed=1).key, shrunk(plan).key}) == 3


def test_a_small_run_writes_its_rows_and_keeps_the_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, results = tmp_path / "cache", tmp_path / "results"
    fixed = ["--quick", "--threads", "1", "--cache-dir", str(cache), "--results-dir", str(results)]
    assert main([*fixed, "--only", "adapt", "batch1", "batch8", "capture"]) == 0
    rows = [json.loads(line) for line in (results / "serving.jsonl").read_text().splitlines()]
    found = {row["metric"]: row for row in rows}
    assert set(found) == {
        "adapt_seconds",
        "replay_acceptance",
        "tokens_per_pass",
        "speedup_batch1",
        "vs_generate",
        "vs_assisted",
        "batch8_vs_assisted",
        "batch8_vs_plain",
        "capture_cost",
        "capture_path_cost",
    }
    captured = found["capture_cost"]["conditions"]
    assert captured["requests_a_round"] > captured["at_a_time"] == SLOTS
    assert captured["acknowledged"] == captured["requests_a_round"] * (captured["rounds"] + 1)
    assert captured["dropped"] == {}
    assert found["capture_path_cost"]["value"] > found["capture_cost"]["value"]
    heads = [row["conditions"]["drafter"] for row in rows if row["metric"] == "vs_assisted"]
    assert heads == ["trimmed", "full"]
    single = found["vs_assisted"]
    ways = {"auto", "auto full", "off", "generate"}
    assert set(single["conditions"]["decode_tokens_per_s"]) == ways
    assert all("identical" in text for text in single["conditions"]["same_answers"].values())
    low, high = single["conditions"]["interval_95"]
    assert low <= single["value"] <= high
    assert (
        found["replay_acceptance"]["value"]
        > found["replay_acceptance"]["conditions"]["acceptance_untrained"]
    )
    kept = sorted(path for path in cache.rglob("model.safetensors"))
    before = [path.stat().st_mtime_ns for path in kept]
    assert main([*fixed, "--only", "adapt"]) == 0
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert "replay_acceptance" in capsys.readouterr().out
