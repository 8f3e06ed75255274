"""What a job may learn from, and what it counts instead."""

from dataclasses import replace

import numpy as np
import pytest

from draftkeep.distill.selection import (
    Selection,
    inputs_of,
    list_sealed,
    living,
    open_all,
)
from draftkeep.ingest.codec import decode_bodies
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.tables import only_identity
from draftkeep.ingest.trace import Trace
from draftkeep.policies.signing import SigningKey
from draftkeep.store.erasure import erase_subject
from draftkeep.store.reader import count_left_out
from tests.deployment import PERIOD_S, TTL_S
from tests.distill.conftest import VOCAB, Workshop


def _open(deployment: Workshop, sealed: list[SealedTrace]) -> Selection:
    return open_all(
        sealed,
        opener=deployment.opener(),
        decode=lambda bodies: decode_bodies(bodies, only_identity),
        target=deployment.target,
    )


def _listed(deployment: Workshop) -> list[SealedTrace]:
    return list_sealed(
        deployment.catalog,
        deployment.storage,
        tenant="acme",
        target=deployment.target.target_fingerprint,
        now_s=deployment.clock(),
    )


def _left_out(deployment: Workshop) -> dict[str, int]:
    return count_left_out(
        deployment.catalog,
        tenant="acme",
        target=deployment.target.target_fingerprint,
        now_s=deployment.clock(),
    )


def test_everything_stored_is_opened_and_split_by_subject(filled: Workshop) -> None:
    found = _open(filled, _listed(filled))
    assert found.skipped == {}
    assert len(found.training) + len(found.held_out) == len(filled.served)
    assert found.training
    assert found.held_out
    subjects = [
        {filled.served[item.header.trace_id] for item in side}
        for side in (found.training, found.held_out)
    ]
    assert subjects[0].isdisjoint(subjects[1])


def test_order_does_not_depend_on_the_shards(deployment: Workshop, traffic: list[Trace]) -> None:
    for start in (0, 4, 8):
        deployment.clock.now_s += 5
        parts = traffic[start : start + 4]
        deployment.store(*(deployment.seal(t, f"u{i}", start + i) for i, t in enumerate(parts)))
    created = [item.parsed.created_s for item in _listed(deployment)]
    assert created == sorted(created)
    assert len(created) == 12


def test_other_tenants_and_targets_are_never_listed(
    deployment: Workshop, traffic: list[Trace]
) -> None:
    mine = deployment.seal(traffic[0], "ada", 0)
    deployment.store(
        mine,
        deployment.seal(traffic[1], "ada", 1, tenant="birch"),
        deployment.seal(traffic[2], "ada", 2, target=b"O" * 32),
    )
    assert [item.parsed.trace_id for item in _listed(deployment)] == [mine.parsed.trace_id]
    assert _left_out(deployment) == {"wrong_target": 1}


def test_expired_and_erased_traces_are_counted(deployment: Workshop, traffic: list[Trace]) -> None:
    deployment.store(deployment.seal(traffic[0], "early", 0), deployment.seal(traffic[1], "ben", 1))
    deployment.clock.now_s += 3 * PERIOD_S
    deployment.store(deployment.seal(traffic[2], "ben", 2), deployment.seal(traffic[3], "cy", 3))
    erase_subject(
        deployment.catalog,
        deployment.keyring,
        tenant="acme",
        subject="ben",
        now_s=deployment.clock(),
    )
    assert len(_listed(deployment)) == 2
    assert _left_out(deployment) == {"erased": 2}
    deployment.clock.now_s += TTL_S - 2 * PERIOD_S
    assert len(_listed(deployment)) == 1
    assert _left_out(deployment) == {"expired": 2, "erased": 1}


def test_what_cannot_be_used_is_counted_by_reason(
    deployment: Workshop, traffic: list[Trace]
) -> None:
    seal = deployment.seal
    good = seal(traffic[0], "ada", 0)
    gone = seal(traffic[1], "ben", 1)
    stranger = SigningKey(bytes(32))
    beyond = replace(traffic[2], output_ids_T=traffic[2].output_ids_T + np.int32(VOCAB))
    bare = replace(
        traffic[3],
        topk=replace(traffic[3].topk, tail_known_T=np.zeros(traffic[3].positions, np.bool_)),
    )
    sealed = [
        good,
        gone,
        seal(traffic[4], "cy", 2, target=b"O" * 32),
        seal(traffic[4], "cy", 3, tokenizer=b"O" * 32),
        seal(traffic[4], "cy", 4, body=b"\x01 not a body"),
        replace(good, ciphertext=bytes([good.ciphertext[0] ^ 1]) + good.ciphertext[1:]),
        replace(good, signature=stranger.sign(b"anything")),
        seal(beyond, "cy", 5),
        seal(bare, "cy", 6),
    ]
    deployment.keyring.destroy_subject("acme", "ben")
    found = _open(deployment, sealed)
    opened = [*found.training, *found.held_out]
    assert [item.header.trace_id for item in opened] == [good.parsed.trace_id]
    assert found.skipped == {
        "key_destroyed": 1,
        "wrong_target": 1,
        "foreign_tokenizer": 1,
        "corrupt": 4,
        "untrainable": 1,
    }


def test_opening_refuses_by_the_clock(filled: Workshop) -> None:
    sealed = _listed(filled)
    filled.clock.now_s += TTL_S
    found = _open(filled, sealed)
    assert not found.training
    assert found.skipped == {"key_destroyed": len(sealed)}


@pytest.mark.parametrize("end", ["erasure", "deadline"])
def test_opened_traces_live_no_longer_than_their_keys(filled: Workshop, end: str) -> None:
    found = _open(filled, _listed(filled))
    keys = filled.keyring.job_keys()
    assert living(keys, found.training) == found.training
    subject = filled.served[found.training[0].header.trace_id]
    if end == "erasure":
        filled.keyring.destroy_subject("acme", subject)
        left = living(keys, found.training)
        assert {filled.served[item.header.trace_id] for item in left} == {
            filled.served[item.header.trace_id] for item in found.training
        } - {subject}
    else:
        filled.clock.now_s += TTL_S
        assert living(keys, found.training) == []


def test_inputs_add_up_by_alias_and_period(filled: Workshop) -> None:
    headers = [item.parsed for item in _listed(filled)]
    inputs = inputs_of(headers)
    assert len({(item.alias, item.period_id) for item in inputs}) == len(inputs) == 80
    assert sum(item.positions for item in inputs) == sum(header.positions for header in headers)
    assert inputs == inputs_of(reversed(headers))
