"""The body codec: everything comes back, exactly or on its grid."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftkeep.errors import CodecError, EnvelopeError
from draftkeep.ingest.codec import decode_bodies, decode_body, encode_body
from draftkeep.ingest.tables import RemapTable, TableStore, only_identity
from draftkeep.ingest.trace import (
    Branch,
    DrafterRun,
    Finish,
    How,
    TopK,
    Trace,
    ValueKind,
)
from draftkeep.kernels.sampling import Sampling

IDENTITY = RemapTable.identity()
MAX_ID = 2**31 - 1

numbers = st.floats(allow_nan=False, width=64)
counts = st.integers(0, 2**64 - 1)
token_lists = st.lists(st.integers(0, MAX_ID), max_size=3).map(tuple)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(numbers),
        top_p=draw(numbers),
        top_k=draw(counts),
        min_p=draw(numbers),
        repetition_penalty=draw(numbers),
        presence_penalty=draw(numbers),
        frequency_penalty=draw(numbers),
        logit_bias=tuple(
            draw(st.lists(st.tuples(st.integers(0, MAX_ID), numbers), max_size=3)),
        ),
        eos_ids=draw(token_lists),
        stop_ids=draw(token_lists),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(counts),
    )


def random_topk(rng: np.random.Generator, k_T: NDArray[np.uint8], vocab: int) -> TopK:
    """Lists of the given lengths over ids below `vocab`, with masses of every size."""
    rows, width = len(k_T), int(k_T.max(initial=0))
    real_TK = np.arange(width) < k_T[:, None]
    logprobs_TK = -np.sort(rng.exponential(3.0, (rows, width)), axis=1)
    logprobs_TK[rng.random((rows, width)).cumsum(axis=1) > 30] = -np.inf
    tail_T = np.log(rng.random(rows)) * rng.choice([0.0, 1e-3, 1.0, 30.0], rows)
    tail_T[rng.random(rows) < 0.2] = -np.inf
    return TopK(
        ids_TK=np.where(real_TK, rng.integers(0, vocab, (rows, width)), -1).astype(np.int32),
        logprobs_TK=np.where(real_TK, logprobs_TK, -np.inf).astype(np.float32),
        k_T=k_T,
        tail_T=tail_T.astype(np.float32),
        tail_known_T=rng.random(rows) < 0.8,
    )


def tokens_at(rng: np.random.Generator, topk: TopK, vocab: int) -> NDArray[np.int32]:
    """One token a row, mostly from its list."""
    tokens_T = rng.integers(0, vocab, len(topk)).astype(np.int32)
    for row in np.flatnonzero((topk.k_T > 0) & (rng.random(len(topk)) < 0.8)):
        tokens_T[row] = topk.ids_TK[row, rng.integers(topk.k_T[row])]
    return tokens_T


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocab = draw(st.sampled_from([2, 300, 49_152, 200_000, MAX_ID + 1]))
    widths = st.integers(0, draw(st.sampled_from([0, 1, 8, 255])))
    k_T = np.array(draw(st.lists(widths, max_size=9)), np.uint8)
    positions = len(k_T)
    topk = random_topk(rng, k_T, vocab)
    how_T = rng.integers(0, 4, positions).astype(np.uint8)
    branches = []
    for lengths in draw(st.lists(st.lists(widths, min_size=1, max_size=3), max_size=2)):
        branch_topk = random_topk(rng, np.array(lengths, np.uint8), vocab)
        draft_ids_N = tokens_at(rng, branch_topk, vocab)
        branches.append(Branch(start=draw(counts), draft_ids_N=draft_ids_N, topk=branch_topk))
    split = draw(st.integers(0, positions))
    runs = [(draw(st.binary(max_size=32)), split), (b"", positions - split)]
    return Trace(
        prompt_ids_P=rng.integers(0, vocab, draw(st.integers(0, 20))).astype(np.int32),
        output_ids_T=tokens_at(rng, topk, vocab),
        topk=topk,
        how_T=how_T,
        rejected_T=np.where(how_T == How.CORRECTED, tokens_at(rng, topk, vocab), -1).astype(
            np.int32
        ),
        sampling=draw(samplings()),
        seed=draw(st.none() | counts),
        choice=draw(counts),
        finish=draw(st.sampled_from(Finish)),
        prompt_cut=draw(st.booleans()),
        output_cut=draw(st.booleans()),
        held_out=draw(st.booleans()),
        value_kind=draw(st.sampled_from(ValueKind)),
        chat_template_hash=draw(st.binary(max_size=32)),
        drafters=tuple(
            DrafterRun(drafter=drafter, context_start=draw(counts), positions=length)
            for drafter, length in runs
            if positions
        ),
        processed_logprob_T=draw(
            st.sampled_from([None, -rng.exponential(2.0, positions).astype(np.float32)])
        ),
        branches=tuple(branches),
        ext=draw(st.binary(max_size=9)),
    )


def assert_same_topk(got: TopK, sent: TopK) -> None:
    assert got.ids_TK.shape[1] == sent.k_T.max(initial=0)
    np.testing.assert_array_equal(got.k_T, sent.k_T)
    np.testing.assert_array_equal(got.ids_TK, sent.ids_TK)
    np.testing.assert_array_equal(got.tail_known_T, sent.tail_known_T)
    np.testing.assert_allclose(got.logprobs_TK, sent.logprobs_TK, rtol=1e-6, atol=0.0251)
    known = sent.tail_known_T
    got_T, sent_T = (logits(topk.tail_T[known]) for topk in (got, sent))
    np.testing.assert_array_equal(np.isinf(got_T), np.isinf(sent_T))
    np.testing.assert_allclose(got_T, sent_T, rtol=1e-6, atol=1 / 28 + 1e-3)


def logits(log_tail_T: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logits of tail masses, held to the range that one byte covers."""
    values_T = log_tail_T.astype(np.float64)
    inner_T = np.clip(values_T, -1e3, -1e-6)
    logits_T = np.clip(inner_T - np.log1p(-np.exp(inner_T)), -199 / 14, 53 / 14)
    return np.where(values_T > -1e-6, np.inf, np.where(np.isneginf(values_T), -np.inf, logits_T))


LOSSY = ("topk", "processed_logprob_T", "branches")


def assert_same(got: Trace, sent: Trace) -> None:
    """Exact in every field but the values that lie on a grid."""
    for name in Trace.__slots__:
        if name.rsplit("_", 1)[-1] in ("P", "T") and name not in LOSSY:
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
            assert getattr(got, name).dtype == getattr(sent, name).dtype
        elif name not in LOSSY:
            assert getattr(got, name) == getattr(sent, name)
    assert_same_topk(got.topk, sent.topk)
    assert len(got.branches) == len(sent.branches)
    for mine, theirs in zip(got.branches, sent.branches, strict=True):
        assert mine.start == theirs.start
        np.testing.assert_array_equal(mine.draft_ids_N, theirs.draft_ids_N)
        assert_same_topk(mine.topk, theirs.topk)
    if sent.processed_logprob_T is None:
        assert got.processed_logprob_T is None
    else:
        assert got.processed_logprob_T is not None
        np.testing.assert_allclose(
            got.processed_logprob_T, sent.processed_logprob_T, rtol=1e-6, atol=2.5e-4
        )


@settings(max_examples=150, deadline=None)
@given(traces())
def test_every_field_comes_back(trace: Trace) -> None:
    body = encode_body(trace, IDENTITY)
    got = decode_body(body, only_identity)
    assert_same(got, trace)
    # What is on the grid stays where it is.
    assert encode_body(got, IDENTITY) == body


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(traces(), st.none() | st.integers(0, 2**16)), max_size=5))
def test_a_group_is_unpacked_as_its_bodies_are_one_by_one(
    drawn: list[tuple[Trace, int | None]],
) -> None:
    bodies = []
    for trace, place in drawn:
        changed = bytearray(encode_body(trace, IDENTITY))
        if place is not None:
            changed[place % len(changed)] ^= 1
        bodies.append(bytes(changed))
    earlier = EnvelopeError("before")
    found = decode_bodies([*bodies, earlier], only_identity)
    assert found.pop() is earlier
    for body, got in zip(bodies, found, strict=True):
        if isinstance(got, Trace):
            assert_same(got, decode_body(body, only_identity))
        else:
            with pytest.raises(CodecError, match=re.escape(str(got))):
                decode_body(body, only_identity)


@settings(max_examples=30, deadline=None)
@given(traces(), st.integers(1, 400), st.integers(0, 9))
def test_a_remap_table_changes_no_token(trace: Trace, vocab: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(vocab)
    table = RemapTable.from_order(order)
    stored = {table.digest: table}
    got = decode_body(encode_body(trace, table), stored.__getitem__)
    assert_same(got, trace)


def small_trace() -> Trace:
    """Two positions: one plain, one whose draft was corrected."""
    return Trace(
        prompt_ids_P=np.array([5, 9], np.int32),
        output_ids_T=np.array([7, 70_000], np.int32),
        topk=TopK(
            ids_TK=np.array([[7, 9], [5, -1]], np.int32),
            logprobs_TK=np.array([[-0.1, -3.0], [-0.5, -np.inf]], np.float32),
            k_T=np.array([2, 1], np.uint8),
            tail_T=np.log(np.array([0.045, 0.3935], np.float32)),
            tail_known_T=np.array([True, True]),
        ),
        how_T=np.array([How.PLAIN, How.CORRECTED], np.uint8),
        rejected_T=np.array([-1, 5], np.int32),
        sampling=Sampling(temperature=0.7, eos_ids=(2,)),
        seed=7,
        choice=0,
        finish=Finish.LENGTH,
    )


def test_values_are_stored_to_a_fortieth_of_a_nat_and_the_tail_by_itself() -> None:
    got = decode_body(encode_body(small_trace(), IDENTITY), only_identity)
    np.testing.assert_allclose(got.topk.logprobs_TK, [[-0.1, -3.0], [-0.5, -np.inf]], atol=1e-6)
    # logit(0.045) = -3.055 -> code 157; logit(0.3935) = -0.4325 -> code 194.
    np.testing.assert_allclose(
        np.exp(got.topk.tail_T), 1 / (1 + np.exp([43 / 14, 6 / 14])), atol=1e-6
    )


def test_a_list_of_255_and_a_token_outside_it() -> None:
    ids_TK = np.arange(1000, 1255, dtype=np.int32)[None, :].repeat(2, axis=0)
    topk = TopK(
        ids_TK=ids_TK,
        logprobs_TK=np.full((2, 255), -6.0, np.float32),
        k_T=np.array([255, 255], np.uint8),
        tail_T=np.array([-1.0, -1.0], np.float32),
        tail_known_T=np.array([True, True]),
    )
    output_ids_T = np.array([1254, 3], np.int32)
    trace = replace(small_trace(), topk=topk, output_ids_T=output_ids_T)
    assert_same(decode_body(encode_body(trace, IDENTITY), only_identity), trace)


def test_zero_mass_inside_a_list_is_kept() -> None:
    topk = replace(
        small_trace().topk,
        logprobs_TK=np.array([[0.0, -np.inf], [-5000.0, -np.inf]], np.float32),
    )
    got = decode_body(encode_body(replace(small_trace(), topk=topk), IDENTITY), only_identity)
    assert got.topk.logprobs_TK[0].tolist() == [0.0, -np.inf]
    assert np.isfinite(got.topk.logprobs_TK[1, 0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"how_T": np.array([3], np.uint8)}, "1 positions of how, expected 2"),
        ({"how_T": np.array([3, 4], np.uint8)}, "kind 4"),
        ({"rejected_T": np.array([5, 5], np.int32)}, "not corrected"),
        ({"rejected_T": np.array([-1, -1], np.int32)}, "negative"),
        ({"prompt_ids_P": np.array([-2], np.int32)}, "negative"),
        ({"seed": 2**64}, "seed"),
        ({"choice": -1}, "negative or past 64 bits"),
        ({"sampling": Sampling(temperature=float("nan"))}, "NaN"),
        ({"processed_logprob_T": np.array([-1.0, np.nan], np.float32)}, "NaN"),
        ({"drafters": (DrafterRun(drafter=b"", context_start=0, positions=3),)}, "drafters"),
    ],
)
def test_an_inconsistent_trace_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        encode_body(replace(small_trace(), **change), IDENTITY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs_TK": np.array([[-3.0, -0.1], [-0.5, -np.inf]], np.float32)}, "rank order"),
        ({"logprobs_TK": np.array([[0.5, -0.1], [-0.5, -np.inf]], np.float32)}, "above 0"),
        ({"k_T": np.array([3, 1], np.uint8)}, "3 entries in 2 columns"),
        ({"k_T": np.array([2], np.uint8)}, "expected 2"),
        ({"tail_T": np.array([np.nan, -1.0], np.float32)}, "tail"),
        ({"tail_T": np.array([-1.0], np.float32)}, "shape"),
    ],
)
def test_an_inconsistent_list_is_refused(change: dict[str, object], reason: str) -> None:
    topk = replace(small_trace().topk, **change)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=reason):
        encode_body(replace(small_trace(), topk=topk), IDENTITY)


def test_tables_are_stored_once_and_found_by_digest(tmp_path: Path) -> None:
    table = RemapTable.from_counts(np.array([1, 5, 0, 5]))
    assert table.id_of_rank_V.tolist() == [1, 3, 0, 2]
    store = TableStore(tmp_path)
    path = store.put(table)
    assert path is not None
    assert store.put(table) == path
    assert store.put(IDENTITY) is None
    assert sorted(tmp_path.iterdir()) == [path]
    body = encode_body(small_trace(), table)
    assert_same(decode_body(body, TableStore(tmp_path)), small_trace())
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CodecError, match="damaged"):
        decode_body(body, TableStore(tmp_path))
    path.unlink()
    with pytest.raises(CodecError, match="is not in"):
        decode_body(body, TableStore(tmp_path))
    with pytest.raises(CodecError, match="no table store"):
        decode_body(body, only_identity)


def test_a_table_must_be_a_permutation() -> None:
    with pytest.raises(CodecError, match="permutation"):
        RemapTable.from_order(np.array([0, 2]))
