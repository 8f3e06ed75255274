"""Cutting a trace until it fits: what goes, in which order, and that what stays is unchanged."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.fit import cut_positions, fit_body
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import Branch, DrafterRun, Finish, How, TopK, Trace
from draftkeep.kernels.sampling import Sampling

VOCAB = 50_000


def make_topk(draw: np.random.Generator, rows: int, k: int) -> TopK:
    logprobs_TK = -np.sort(draw.exponential(2.0, (rows, k)).astype(np.float32), axis=1)
    ids_TK = np.stack([draw.choice(VOCAB, k, replace=False) for _ in range(rows)])
    return TopK(
        ids_TK=ids_TK.astype(np.int32).reshape(rows, k),
        logprobs_TK=logprobs_TK,
        k_T=np.full(rows, k, np.uint8),
        tail_T=np.full(rows, -3.0, np.float32),
        tail_known_T=np.ones(rows, np.bool_),
    )


def make_trace(positions: int, *, seed: int, branches: int = 0, k: int = 4) -> Trace:
    """A trace whose drafts alternate between accepted and corrected, under two drafters."""
    draw = np.random.default_rng(seed)
    corrected_T = np.arange(positions) % 2 == 1
    half = positions // 2
    starts = np.sort(draw.choice(positions, branches, replace=False))
    return Trace(
        prompt_ids_P=draw.integers(0, VOCAB, 5).astype(np.int32),
        output_ids_T=draw.integers(0, VOCAB, positions).astype(np.int32),
        topk=make_topk(draw, positions, k),
        how_T=np.where(corrected_T, How.CORRECTED, How.ACCEPTED).astype(np.uint8),
        rejected_T=np.where(corrected_T, 7, -1).astype(np.int32),
        sampling=Sampling(),
        seed=seed,
        choice=0,
        finish=Finish.LENGTH,
        drafters=(
            DrafterRun(drafter=b"\x01" * 32, context_start=0, positions=half),
            DrafterRun(drafter=b"\x02" * 32, context_start=3, positions=positions - half),
        ),
        processed_logprob_T=np.full(positions, -1.0, np.float32),
        branches=tuple(
            Branch(
                start=int(start),
                draft_ids_N=draw.integers(0, VOCAB, 3).astype(np.int32),
                topk=make_topk(draw, 3, k),
            )
            for start in starts
        ),
    )


def encode(trace: Trace) -> bytes:
    return encode_body(trace, RemapTable.identity())


@given(
    st.integers(2, 120),
    st.integers(0, 2),
    st.integers(0, 10**6),
    st.floats(0.05, 1.1),
)
@settings(max_examples=60, deadline=None)
def test_a_fitted_trace_is_a_prefix_that_decodes(
    positions: int, branches: int, seed: int, share: float
) -> None:
    trace = make_trace(positions, seed=seed, branches=branches)
    without_branches = replace(trace, branches=())
    limit = int(len(encode(trace)) * share)
    fitted = fit_body(trace, encode, limit)
    if fitted is None:
        assert len(encode(cut_positions(without_branches, 1))) > limit
        return
    assert len(fitted.body) <= limit
    assert fitted.cut == (len(encode(trace)) > limit)
    back = decode_body(fitted.body, only_identity)
    kept = back.positions
    assert back.output_cut == (kept < positions)
    assert back.output_ids_T.tolist() == trace.output_ids_T[:kept].tolist()
    assert back.topk.ids_TK.tolist() == trace.topk.ids_TK[:kept].tolist()
    assert back.how_T.tolist() == trace.how_T[:kept].tolist()
    assert back.rejected_T.tolist() == trace.rejected_T[:kept].tolist()
    assert sum(run.positions for run in back.drafters) == kept
    assert back.prompt_ids_P.tolist() == trace.prompt_ids_P.tolist()
    if fitted.cut:
        assert back.branches == ()
    if kept < positions:
        assert len(encode(without_branches)) > limit


def test_branches_go_before_any_position() -> None:
    trace = make_trace(60, seed=1, branches=20)
    without = make_trace(60, seed=1)
    limit = (len(encode(trace)) + len(encode(without))) // 2
    fitted = fit_body(trace, encode, limit)
    assert fitted is not None
    assert fitted.cut
    assert fitted.trace.positions == 60
    assert not fitted.trace.output_cut
    assert fitted.trace.branches == ()


def test_little_more_is_cut_than_must_be() -> None:
    trace = make_trace(400, seed=2, k=32)
    limit = len(encode(trace)) // 2
    fitted = fit_body(trace, encode, limit)
    assert fitted is not None
    assert 160 <= fitted.trace.positions <= 200


def test_a_prompt_too_long_for_any_record_does_not_fit() -> None:
    assert fit_body(make_trace(10, seed=3), encode, 20) is None


@pytest.mark.parametrize("positions", [1, 29, 30, 31, 59])
def test_a_cut_takes_everything_that_belongs_to_a_position(positions: int) -> None:
    trace = make_trace(60, seed=4, branches=60)
    cut = cut_positions(trace, positions)
    assert cut.output_cut
    assert len(cut.output_ids_T) == len(cut.topk) == len(cut.how_T) == positions
    assert len(cut.rejected_T) == positions
    assert cut.processed_logprob_T is not None
    assert len(cut.processed_logprob_T) == positions
    assert [branch.start for branch in cut.branches] == list(range(positions))
    runs = [run.positions for run in cut.drafters]
    assert runs == ([positions] if positions <= 30 else [30, positions - 30])
    assert cut_positions(trace, 60) is trace
