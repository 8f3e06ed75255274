"""Which drafter the engine runs: what the channel points at, once verified, and nothing erased."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftkeep.errors import StoreError
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.engine.model_drafter import ModelDrafter
from draftkeep.serve.engine.ngram import NGRAM_DIGEST
from draftkeep.serve.follow import RELOADS
from draftkeep.store.anchors import GATE
from draftkeep.store.jobs import JobInput
from draftkeep.store.registry import EVERYONE, scope_of, tenant_scope


def point(station: Any, digest: bytes | None, scope: str = EVERYONE) -> None:
    station.node.registry.set_channel(scope, "stable", digest, at_s=0.0)


def drafting(station: Any) -> bytes:
    """What the engine drafts with after the next poll and step."""
    station.node.follower.poll()
    station.chat(max_tokens=2, store=False)
    digest: bytes = station.node.engine.stats().drafter
    return digest


def test_the_scope_is_the_only_tenants_own() -> None:
    assert scope_of(("acme",)) == tenant_scope("acme") == "tenant:acme"
    assert scope_of(("acme", "shy")) == EVERYONE
    assert scope_of(()) == EVERYONE


def test_the_engine_follows_the_channel(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 0.01})
    before = station.chat(seed=1, max_tokens=30)["choices"]
    one, other = publish(station, vocab=100), publish(station, vocab=300)
    assert drafting(station) == b""
    for digest in (one, other):
        point(station, digest)
        assert drafting(station) == digest
        assert station.chat(seed=1, max_tokens=30)["choices"] == before
    assert station.admin("GET", "/admin/stats").json()["drafter"] == other.hex()
    point(station, None)
    assert drafting(station) == b""


def test_a_node_that_starts_already_drafts(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations()
    digest = publish(station)
    point(station, digest)
    again = stations(serve={"node": "node-2", "follow_s": 3600})
    again.chat(max_tokens=2)
    assert again.node.engine.stats().drafter == digest


def _tampered(station: Any, digest: bytes) -> None:
    path = station.node.registry.path(digest) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] += 0.5
    save_file(tensors, path)


def _foreign_signature(station: Any, digest: bytes) -> None:
    path = station.node.registry.path(digest) / "signature"
    other = SigningKey.load_or_create(station.config.state_dir / "other.key")
    path.write_bytes(other.sign(digest))


def _unsigned(station: Any, digest: bytes) -> None:
    (station.node.registry.path(digest) / "signature").unlink()


def _missing(station: Any, digest: bytes) -> None:
    shutil.rmtree(station.node.registry.path(digest))


@pytest.mark.parametrize("damage", [_tampered, _foreign_signature, _unsigned, _missing])
def test_a_drafter_that_does_not_verify_is_refused_and_the_running_one_stays(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Any, bytes], None],
) -> None:
    station = stations(serve={"follow_s": 3600})
    good, bad = publish(station, vocab=100), publish(station, vocab=300)
    point(station, good)
    assert drafting(station) == good
    damage(station, bad)
    point(station, bad)
    with caplog.at_level(logging.ERROR):
        assert drafting(station) == good
        assert drafting(station) == good
    refusals = [record for record in caplog.records if "refused" in record.message]
    assert len(refusals) == 1
    assert bad.hex()[:12] in refusals[0].getMessage()
    point(station, good)
    assert drafting(station) == good


def test_a_drafter_made_for_another_target_is_refused(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 3600})
    station.node.follower._target = replace(station.node.target, target_fingerprint=b"x" * 32)
    point(station, publish(station))
    assert drafting(station) == b""


def test_a_gates_key_that_comes_late_is_waited_for(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 3600})
    digest = publish(station)
    anchor = station.config.state_dir / "anchors" / GATE
    public = anchor.read_bytes()
    anchor.unlink()
    point(station, digest)
    assert drafting(station) == b""
    anchor.write_bytes(public)
    assert drafting(station) == digest


def test_the_running_drafter_stays_while_the_registry_cannot_be_read(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    station = stations(serve={"follow_s": 3600})
    digest = publish(station)
    point(station, digest)
    assert drafting(station) == digest

    def unreachable(*_: object) -> None:
        raise StoreError("no catalog")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(station.node.registry, "channel", unreachable)
        assert drafting(station) == digest
        assert drafting(station) == digest
        assert not station.node.stats().catalog_up
        assert "draftkeep_catalog_up 0.0" in station.node.exposition.render().decode()
    point(station, None)
    with caplog.at_level(logging.WARNING):
        assert drafting(station) == b""
    assert station.node.stats().catalog_up
    said = [line for line in caplog.messages if "the registry" in line]
    assert said[0] == (
        "reading the registry fails and is tried again: no catalog. The running drafter stays"
    )
    assert said[1].startswith("reading the registry works again, after ")
    assert len(said) == 2


def test_erasing_who_taught_it_ends_drafting_at_once(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 3600})
    cold = publish(station, vocab=100)
    station.chat(max_tokens=3, safety_identifier="someone")
    ((header, _),) = station.captured()
    learned = JobInput(alias=header.alias, period_id=header.period_id, tenant="acme", positions=3)
    taught = publish(station, vocab=300, inputs=[learned])
    point(station, cold)
    point(station, taught)
    assert drafting(station) == taught
    body = {"tenant": "acme", "subject": "someone"}
    result = station.admin("POST", "/admin/erase", body).json()
    assert result["drafters_quarantined"] == 1
    station.chat(max_tokens=2, store=False)
    assert station.node.engine.stats().drafter == b""


def test_a_quarantined_drafter_goes_even_where_its_successor_cannot_be_used(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 3600})
    station.chat(max_tokens=3, safety_identifier="someone")
    ((header, _),) = station.captured()
    learned = JobInput(alias=header.alias, period_id=header.period_id, tenant="acme", positions=3)
    taught, broken = publish(station, vocab=300, inputs=[learned]), publish(station, vocab=100)
    point(station, taught)
    assert drafting(station) == taught
    _tampered(station, broken)
    point(station, broken)
    assert drafting(station) == taught
    station.admin("POST", "/admin/erase", {"tenant": "acme", "subject": "someone"})
    station.chat(max_tokens=2, store=False)
    assert station.node.engine.stats().drafter == b""


class _Failing:
    """Drafters whose passes fail as often as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
        self.left = times
        propose = ModelDrafter.propose

        def failing(drafter: ModelDrafter, *arguments: Any) -> None:
            if self.left:
                self.left -= 1
                raise MemoryError("zebra-canary-77")
            propose(drafter, *arguments)

        monkeypatch.setattr(ModelDrafter, "propose", failing)


def test_a_drafter_that_the_engine_lost_comes_back(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _Failing(monkeypatch, times=RELOADS)
    station = stations(serve={"follow_s": 3600})
    digest = publish(station)
    point(station, digest)
    with caplog.at_level(logging.WARNING):
        assert [drafting(station) for _ in range(RELOADS)] == [b""] * RELOADS
        assert drafting(station) == digest
        assert drafting(station) == digest
    lost = [message for message in caplog.messages if "was lost" in message]
    assert len(lost) == RELOADS
    assert all(digest.hex()[:12] in message for message in lost)
    assert f"drafter {digest.hex()[:12]} failed with MemoryError" in caplog.messages
    assert "zebra" not in caplog.text
    assert station.admin("GET", "/admin/stats").json()["engine"]["drafter_failed"] == RELOADS


def test_a_drafter_that_always_fails_is_refused_in_the_end(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = _Failing(monkeypatch, times=100)
    station = stations(serve={"follow_s": 3600})
    bad, good = publish(station, vocab=300), publish(station, vocab=100)
    point(station, bad)
    with caplog.at_level(logging.ERROR):
        assert [drafting(station) for _ in range(RELOADS + 4)] == [b""] * (RELOADS + 4)
    assert failing.left == 100 - (RELOADS + 1)
    assert len([message for message in caplog.messages if "refused" in message]) == 1
    failing.left = 0
    assert drafting(station) == b""
    point(station, good)
    assert drafting(station) == good


def test_the_floor_drafts_while_there_is_nothing_to_follow(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    station = stations(serve={"follow_s": 3600, "floor": "ngram"})
    assert drafting(station) == NGRAM_DIGEST
    digest = publish(station)
    point(station, digest)
    assert drafting(station) == digest
    point(station, None)
    with caplog.at_level(logging.INFO):
        assert drafting(station) == NGRAM_DIGEST
    assert any("the node's floor drafts" in message for message in caplog.messages)
    _Failing(monkeypatch, times=1)
    point(station, digest)
    assert drafting(station) == NGRAM_DIGEST
    assert drafting(station) == digest
