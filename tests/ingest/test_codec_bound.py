"""The size and the accuracy a body promises, on real distributions of SmolLM2-135M-Instruct.

body-topk.npz: eight completions of 128 tokens sampled at temperatures 0.7 to 1.0, the hard case,
with the 32 best log-probabilities and the logarithm of the mass outside them at each position.

Suffixes: N traces, T positions, K list entries.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import DrafterRun, Finish, How, TopK, Trace
from draftkeep.kernels.sampling import Sampling

FIXTURE = Path(__file__).parents[1] / "golden" / "body-topk.npz"
ENVELOPE_BYTES = 124  # nonce 12, tag 16, commitment 32, signature 64
MAX_BYTES_PER_POSITION = 75.0
MAX_MEAN_KL = 1e-4


def real_traces() -> list[Trace]:
    """The fixture as traces with an empty prompt and drafts drawn from the target itself."""
    rng = np.random.default_rng(0)
    with np.load(FIXTURE) as data:
        columns = [data[name] for name in data.files]
    traces = []
    for temperature, output_ids_T, ids_TK, logprobs_TK, tail_T in zip(*columns, strict=True):
        positions = len(output_ids_T)
        below_TK = np.exp(logprobs_TK).cumsum(axis=1) < rng.random((positions, 1))
        rank_T = np.minimum(below_TK.sum(axis=1), ids_TK.shape[1] - 1)
        drafts_T = ids_TK[np.arange(positions), rank_T].astype(np.int32)
        corrected_T = drafts_T != output_ids_T
        traces.append(
            Trace(
                prompt_ids_P=np.zeros(0, np.int32),
                output_ids_T=output_ids_T.astype(np.int32),
                topk=TopK(
                    ids_TK=ids_TK.astype(np.int32),
                    logprobs_TK=logprobs_TK,
                    k_T=np.full(positions, ids_TK.shape[1], np.uint8),
                    tail_T=tail_T,
                    tail_known_T=np.ones(positions, np.bool_),
                ),
                how_T=np.where(corrected_T, How.CORRECTED, How.ACCEPTED).astype(np.uint8),
                rejected_T=np.where(corrected_T, drafts_T, -1).astype(np.int32),
                sampling=Sampling(temperature=float(temperature), eos_ids=(2,)),
                seed=int(rng.integers(2**63)),
                choice=0,
                finish=Finish.LENGTH,
                chat_template_hash=rng.bytes(32),
                drafters=(DrafterRun(drafter=rng.bytes(32), context_start=0, positions=positions),),
            )
        )
    return traces


def probabilities(topk: TopK) -> NDArray[np.float64]:
    """The k + 1 categories of each position: the list and the mass outside it, summing to 1."""
    logs = np.concatenate([topk.logprobs_TK, topk.tail_T[:, None]], axis=1)
    masses: NDArray[np.float64] = np.exp(logs.astype(np.float64))
    masses /= masses.sum(axis=1, keepdims=True)
    return masses


@pytest.fixture(scope="module")
def packed() -> list[tuple[Trace, bytes]]:
    return [(trace, encode_body(trace, RemapTable.identity())) for trace in real_traces()]


def test_a_position_takes_at_most_75_bytes(packed: list[tuple[Trace, bytes]]) -> None:
    total_bytes = sum(len(body) + ENVELOPE_BYTES for _, body in packed)
    positions = sum(trace.positions for trace, _ in packed)
    assert positions == 1024
    assert total_bytes / positions <= MAX_BYTES_PER_POSITION


def test_the_mean_divergence_is_at_most_1e_4(packed: list[tuple[Trace, bytes]]) -> None:
    kl = []
    for trace, body in packed:
        p, q = (probabilities(topk) for topk in (trace.topk, decode_body(body, only_identity).topk))
        kl.append((p * np.log(p / q)).sum(axis=1))
    assert np.mean(kl) <= MAX_MEAN_KL
    assert np.max(kl) <= 10 * MAX_MEAN_KL
