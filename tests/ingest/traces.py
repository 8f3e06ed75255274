"""Traces of any size and where they come from; nothing in them is real."""

import os

import numpy as np

from draftkeep.ingest.trace import Finish, How, Provenance, TopK, Trace
from draftkeep.kernels.sampling import Sampling

NOW_S = 1_000_000


def make_topk(rows: int, k: int, seed: int) -> TopK:
    draw = np.random.default_rng(seed)
    return TopK(
        ids_TK=draw.integers(0, 50_000, (rows, k)).astype(np.int32),
        logprobs_TK=-np.sort(draw.exponential(3.0, (rows, k)).astype(np.float32), axis=1),
        k_T=np.full(rows, k, np.uint8),
        tail_T=np.full(rows, -3.0, np.float32),
        tail_known_T=np.ones(rows, np.bool_),
    )


def make_trace(mark: int, *, positions: int = 3, k: int = 4) -> Trace:
    return Trace(
        prompt_ids_P=np.array([mark], np.int32),
        output_ids_T=np.arange(positions, dtype=np.int32),
        topk=make_topk(positions, k, mark),
        how_T=np.full(positions, How.PLAIN, np.uint8),
        rejected_T=np.full(positions, -1, np.int32),
        sampling=Sampling(),
        seed=mark,
        choice=0,
        finish=Finish.STOP,
    )


def make_provenance(subject: str | None = "person") -> Provenance:
    return Provenance(
        tenant="acme",
        subject=subject,
        response_id=os.urandom(16),
        domain="sql",
        consent=0,
        policy_version=1,
        created_s=NOW_S,
        target=b"t" * 32,
        tokenizer=b"k" * 32,
    )
