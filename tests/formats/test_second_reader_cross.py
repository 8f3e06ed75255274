"""What the project writes, the second reader reads: random traces, noise, processors, files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftkeep.config import RetentionConfig
from draftkeep.errors import CodecError, ModelError
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.envelope import Sealer
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import (
    Branch,
    DrafterRun,
    Finish,
    How,
    Provenance,
    TopK,
    Trace,
    ValueKind,
)
from draftkeep.kernels import noise, processors
from draftkeep.kernels.draw import choose
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.shard_writer import write_shard
from draftkeep.store.storage_local import LocalStorage
from tests.formats import reader, reader_body, reader_draws, reader_files
from tests.formats.reader_body import Body, Row, Settings
from tests.formats.reader_cbor import FormatError

NOW_S = 1_800_000_000
TARGET = b"T" * 32
NODE = SigningKey(b"n" * 32)
WORDS = st.integers(0, 2**64 - 1)
STEPS = np.array([-np.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0], np.float32)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.7, 0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -0.3]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 11), st.floats(-100, 100)), max_size=3, unique_by=lambda b: b[0]
    ).map(lambda pairs: tuple(sorted(pairs))),
    eos_ids=st.sampled_from([(), (2,), (2, 5)]),
    stop_ids=st.sampled_from([(), (7,), (900,)]),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 4),
)


def as_settings(sampling: Sampling) -> Settings:
    """The project's sampling values under the second reader's names."""
    return Settings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        bias=sampling.logit_bias,
        eos_ids=sampling.eos_ids,
        stop_ids=sampling.stop_ids,
        ignore_eos=sampling.ignore_eos,
    )


def random_topk(rng: np.random.Generator, rows: int, vocab: int) -> TopK:
    """Lists of every length with values and tails of every kind."""
    k_T = rng.choice([0, 1, 2, 9, 255], rows).astype(np.uint8)
    width = int(k_T.max(initial=0))
    real_TK = np.arange(width) < k_T[:, None]
    values_TK = -np.sort(rng.exponential(3.0, (rows, width)), axis=1)
    values_TK[:, 200:] = -np.inf
    logit_T = rng.uniform(-14, 3.7, rows)
    tail_T = np.where(rng.random(rows) < 0.2, -np.inf, -np.log1p(np.exp(-logit_T)))
    return TopK(
        ids_TK=np.where(real_TK, rng.integers(0, vocab, (rows, width)), -1).astype(np.int32),
        logprobs_TK=np.where(real_TK, values_TK, -np.inf).astype(np.float32),
        k_T=k_T,
        tail_T=np.where(rng.random(rows) < 0.2, 0.0, tail_T).astype(np.float32),
        tail_known_T=rng.random(rows) < 0.8,
    )


def tokens_at(rng: np.random.Generator, topk: TopK, vocab: int) -> NDArray[np.int32]:
    """A token a row, from its list where a coin says so."""
    tokens_T = rng.integers(0, vocab, len(topk)).astype(np.int32)
    for t in np.flatnonzero((topk.k_T > 0) & (rng.random(len(topk)) < 0.7)):
        tokens_T[t] = topk.ids_TK[t, rng.integers(topk.k_T[t])]
    return tokens_T


def random_trace(rng: np.random.Generator, sampling: Sampling, seed: int | None) -> Trace:
    """A trace with something in every field."""
    vocab, positions = int(rng.choice([3, 300, 200_000, 2**31 - 1])), int(rng.integers(0, 9))
    topk = random_topk(rng, positions, vocab)
    how_T = rng.integers(0, 4, positions).astype(np.uint8)
    rejected_T = np.where(how_T == How.CORRECTED, tokens_at(rng, topk, vocab), -1)
    branches = []
    for start in range(int(rng.integers(0, 3))):
        rows = random_topk(rng, int(rng.integers(1, 4)), vocab)
        branches.append(Branch(start=start, draft_ids_N=tokens_at(rng, rows, vocab), topk=rows))
    processed_T = -rng.exponential(2.0, positions).astype(np.float32)
    return Trace(
        prompt_ids_P=rng.integers(0, vocab, int(rng.integers(0, 20))).astype(np.int32),
        output_ids_T=tokens_at(rng, topk, vocab),
        topk=topk,
        how_T=how_T,
        rejected_T=rejected_T.astype(np.int32),
        sampling=sampling,
        seed=seed,
        choice=int(rng.integers(0, 2**63)),
        finish=Finish(int(rng.integers(3))),
        prompt_cut=bool(rng.integers(2)),
        output_cut=bool(rng.integers(2)),
        held_out=bool(rng.integers(2)),
        value_kind=ValueKind(int(rng.integers(3))),
        chat_template_hash=rng.bytes(32),
        drafters=(DrafterRun(drafter=rng.bytes(32), context_start=3, positions=positions),),
        processed_logprob_T=processed_T if seed is None else None,
        branches=tuple(branches),
        ext=rng.bytes(2),
    )


def compare_rows(rows: tuple[Row, ...], topk: TopK) -> None:
    """Ids exactly, values and tails within their grids."""
    assert len(rows) == len(topk)
    for t, row in enumerate(rows):
        k = int(topk.k_T[t])
        assert row.ids.tolist() == topk.ids_TK[t, :k].tolist()
        np.testing.assert_allclose(row.logprobs, topk.logprobs_TK[t, :k], rtol=1e-6, atol=0.02501)
        if not topk.tail_known_T[t]:
            assert np.isnan(row.tail)
            continue
        tail = float(np.exp(np.float64(topk.tail_T[t])))
        if row.tail in (0.0, 1.0):
            assert tail == row.tail
        else:
            gap = np.log(row.tail / (1 - row.tail)) - np.log(tail / (1 - tail))
            assert abs(gap) < 1 / 28 + 1e-4


def compare(body: Body, trace: Trace) -> None:
    """The same trace."""
    assert body.settings == as_settings(trace.sampling)
    assert (body.seed, body.choice, body.ext) == (trace.seed, trace.choice, trace.ext)
    assert (body.finish, body.value_kind) == (trace.finish, trace.value_kind)
    cuts = (body.prompt_cut, body.output_cut, body.held_out)
    assert cuts == (trace.prompt_cut, trace.output_cut, trace.held_out)
    assert body.template_hash == trace.chat_template_hash
    assert [(r.digest, r.context_start, r.positions) for r in body.runs] == [
        (r.drafter, r.context_start, r.positions) for r in trace.drafters
    ]
    assert body.prompt.tolist() == trace.prompt_ids_P.tolist()
    assert body.output.tolist() == trace.output_ids_T.tolist()
    assert body.how.tolist() == trace.how_T.tolist()
    corrected = np.flatnonzero(trace.how_T == How.CORRECTED)
    assert body.rejected == {int(t): int(trace.rejected_T[t]) for t in corrected}
    compare_rows(body.rows, trace.topk)
    assert len(body.branches) == len(trace.branches)
    for got, sent in zip(body.branches, trace.branches, strict=True):
        assert (got.start, got.drafts.tolist()) == (sent.start, sent.draft_ids_N.tolist())
        compare_rows(got.rows, sent.topk)
    if trace.processed_logprob_T is None:
        assert body.processed_logp is None
    else:
        assert body.processed_logp is not None
        np.testing.assert_allclose(body.processed_logp, trace.processed_logprob_T, atol=2.5e-4)


class Deployment:
    """A keyring and a sealer on disk."""

    def __init__(self, directory: Path) -> None:
        retention = RetentionConfig(period_s=3600, ttl_s=7 * 86400)
        self.keyring = Keyring.open(directory, retention=retention, clock=lambda: float(NOW_S))
        self.sealer = Sealer(self.keyring.node_keys(), "n1", NODE, clock=lambda: float(NOW_S))

    def seal(self, body: bytes, tenant: str, subject: str | None, **changes: Any) -> SealedTrace:
        values: dict[str, Any] = {
            "response_id": bytes(16),
            "domain": None,
            "consent": 1,
            "policy_version": 2,
            "created_s": NOW_S,
            "target": TARGET,
            "tokenizer": b"K" * 32,
        }
        provenance = Provenance(tenant=tenant, subject=subject, **(values | changes))
        return self.sealer.seal(body, provenance, prompt_tokens=3, positions=70_000)

    def open(self, record: reader.Record) -> bytes:
        """The body, by the second reader; the keyring only hands out keys."""
        header = reader.decode_header(record.header)
        keys = self.keyring.job_keys()
        found = keys.period(header.period_id)
        period = reader.PeriodRecord(
            found.tenant,
            found.period_id,
            found.start_s,
            found.destroy_at_s,
            found.public_key,
            found.signature,
        )
        private = keys.period_private_key(header.period_id)
        reader.check_node_signature(record, NODE.public)
        reader.check_period_record(period, keys.issuer_public)
        reader.check_period(header, period, NOW_S)
        assert reader.public_key(private) == period.public_key
        subject_key = keys.subject_key_for(header.alias, header.period_id)
        return reader.open_envelope(record, private, subject_key)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("keys"))
    yield made
    made.keyring.close()


@settings(max_examples=60)
@given(
    draw=st.integers(0, 2**32), sampling=samplings, seed=st.none() | WORDS, remapped=st.booleans()
)
def test_sealed_traces_open_to_the_same_values(
    deployment: Deployment, draw: int, sampling: Sampling, seed: int | None, remapped: bool
) -> None:
    rng = np.random.default_rng(draw)
    trace = random_trace(rng, sampling, seed)
    table, tables = RemapTable.identity(), {}
    if remapped:
        order_V = rng.permutation(200)
        table = RemapTable.from_order(order_V)
        data = b"".join(int(token).to_bytes(4, "little") for token in order_V)
        tables = {reader_body.remap_digest(data): data}
    subject = None if draw % 3 == 0 else f"Zoë {draw % 3}"
    sealed = deployment.seal(encode_body(trace, table), "ácme", subject)
    record = reader.decode_record(encode_record(sealed))
    body = deployment.open(record)
    compare(reader_body.decode_body(body, tables), trace)
    header = reader.decode_header(record.header)
    assert reader.encode_header(header) == sealed.parsed.encode() == record.header
    lookup_key = deployment.keyring.lookup_key("ácme")
    assert header.request_id == reader.request_id(lookup_key, bytes(16))
    provenance = Provenance(
        tenant="ácme",
        subject=subject,
        response_id=bytes(16),
        domain=None,
        consent=0,
        policy_version=0,
        created_s=0,
        target=TARGET,
        tokenizer=TARGET,
    )
    who = header.request_id if subject is None else subject
    assert reader.held_out(lookup_key, who) == deployment.sealer.held_out(provenance)


@settings(max_examples=60)
@given(draw=st.integers(0, 2**32), sampling=samplings, seed=st.none() | WORDS)
def test_both_readers_see_the_same_numbers(draw: int, sampling: Sampling, seed: int | None) -> None:
    trace = random_trace(np.random.default_rng(draw), sampling, seed)
    data = encode_body(trace, RemapTable.identity())
    mine, theirs = reader_body.decode_body(data), decode_body(data, only_identity)
    for t, row in enumerate(mine.rows):
        k = int(theirs.topk.k_T[t])
        np.testing.assert_array_equal(
            row.logprobs.astype(np.float32), theirs.topk.logprobs_TK[t, :k]
        )
        if theirs.topk.tail_known_T[t]:
            np.testing.assert_allclose(row.tail, np.exp(theirs.topk.tail_T[t]), rtol=1e-5)


def refuses(read: Callable[[], object], error: type[Exception]) -> bool:
    """Whether the bytes are refused; anything but the reader's own error is a failure."""
    try:
        read()
    except error:
        return True
    return False


@settings(max_examples=200)
@given(draw=st.integers(0, 2**32), value=st.integers(0, 255), cut=st.booleans())
def test_both_readers_refuse_the_same_bodies(draw: int, value: int, cut: bool) -> None:
    rng = np.random.default_rng(draw)
    trace = random_trace(rng, Sampling(logit_bias=((3, 1.0),)), None if draw % 2 else draw)
    payload = bytearray(reader_body.unpack(encode_body(trace, RemapTable.identity())))
    at = int(rng.integers(min(len(payload), int(rng.choice([160, 400, 10**6])))))
    payload[at] = value
    if cut:
        del payload[-1 - draw % 3 :]
    data = b"\x01" + zstandard.ZstdCompressor().compress(bytes(payload))
    mine = refuses(lambda: reader_body.decode_body(data), FormatError)
    assert mine == refuses(lambda: decode_body(data, only_identity), CodecError)


@settings(max_examples=60)
@given(seed=WORDS, choice=WORDS, index=WORDS, vocab=st.integers(1, 70))
def test_noise_rows_agree(seed: int, choice: int, index: int, vocab: int) -> None:
    mine = reader_draws.gumbel(seed, choice, index, np.arange(vocab))
    np.testing.assert_allclose(mine, noise.gumbel(seed, choice, index, vocab), rtol=1e-13)


@settings(max_examples=300)
@given(
    draw=st.integers(0, 2**32),
    coarse=st.booleans(),
    vocab=st.sampled_from([12, 60]),
    sampling=samplings,
)
def test_processors_agree(draw: int, coarse: bool, vocab: int, sampling: Sampling) -> None:
    rng = np.random.default_rng(draw)
    # Coarse logits hold ties, zeros and barred ids.
    logits_V = rng.choice(STEPS, vocab) if coarse else rng.normal(0, 4, vocab).astype(np.float32)
    prompt, output = (rng.integers(0, 12, n).tolist() for n in rng.integers(0, 7, 2))
    mine = reader_draws.process(logits_V, prompt, output, as_settings(sampling))
    try:
        theirs = processors.process(logits_V, sampling, prompt_ids=prompt, output_ids=output)
    except ModelError:
        assert np.isneginf(mine).all()
        return
    np.testing.assert_array_equal(mine, theirs)
    noise_V = None if sampling.greedy else noise.gumbel(draw, 1, 5, vocab)
    assert reader_draws.draw(mine, as_settings(sampling), draw, 1, 5) == choose(theirs, noise_V)


def test_a_shard_is_rebuilt_bit_for_bit(deployment: Deployment, tmp_path: Path) -> None:
    sealed = [
        deployment.seal(
            f"body {n}".encode(),
            ("birch", "ácme")[n % 2],
            (None, "Zoë")[n // 2 % 2],
            domain=(None, "unknown", "sql")[n % 3],
            created_s=NOW_S + n % 4,
        )
        for n in range(30)
    ]
    expiry_s = sealed[0].parsed.expiry_s
    rows = [(item.parsed, item) for item in sealed]
    storage = LocalStorage(tmp_path)
    file = write_shard(storage, rows, bucket_s=expiry_s, target=TARGET, serial="s1")
    shard = reader_files.read_shard(tmp_path / file.name)
    assert (shard.bucket_s, shard.target) == (expiry_s, TARGET)
    bodies = {item.header: f"body {n}".encode() for n, item in enumerate(sealed)}
    assert {record.header for record in shard.records} == set(bodies)
    by_header = {item.header: item for item in sealed}
    for record in shard.records:
        sent = by_header[record.header]
        for part in ("nonce", "ciphertext", "commitment", "signature", "encapsulation"):
            assert getattr(record, part) == getattr(sent, part)
        assert deployment.open(record) == bodies[record.header]
