"""Trace: what one choice of one finished request leaves. Token ids and distributions, no text.

Suffixes: P prompt tokens, T output tokens, K the widest stored list. All arrays are NumPy, owned
by the trace and never written to after it was made.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from draftkeep.kernels.outcome import Finish as Finish
from draftkeep.kernels.outcome import How as How
from draftkeep.kernels.sampling import Sampling


class Origin(IntEnum):
    """Where a trace came from."""

    SERVED = 0
    RELABELLED = 1
    TAP = 2


class ValueKind(IntEnum):
    """What the stored log-probabilities are: before every processor, after all, or not known."""

    RAW = 0
    PROCESSED = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The head of a distribution at each of T positions, with the mass outside it.

    ids_TK (int32) and logprobs_TK (float32, natural log) are in rank order: value descending, ties
    by id ascending. Row t holds k_T[t] entries; the rest of the row is -1 and -inf. tail_T
    (float32) is the natural log of the mass outside the list (-inf where there is none), and is
    meaningful where tail_known_T.
    """

    ids_TK: NDArray[np.int32]
    logprobs_TK: NDArray[np.float32]
    k_T: NDArray[np.uint8]
    tail_T: NDArray[np.float32]
    tail_known_T: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.k_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun:
    """A stretch of output positions under one drafter.

    `drafter` is the 32-byte digest of the drafter loaded (empty bytes: none). `context_start` is
    the absolute token position (prompt first) at which the drafter's own context began.
    """

    drafter: bytes
    context_start: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A rejected branch: drafts after a rejection, with the target's distributions on them.

    `start` is the output index of the rejected draft. draft_ids_N[0] is that draft, and topk row i
    is the target's distribution after draft_ids_N[0..i].
    """

    start: int
    draft_ids_N: NDArray[np.int32]
    topk: TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One finished choice. The unit that is sealed, stored, erased and trained on.

    prompt_ids_P holds the prompt's last tokens; `prompt_cut` says that earlier ones were left out.
    `seed` is modulo 2^64, or None where the noise is not known (then processed_logprob_T is set).
    how_T holds `How`; rejected_T the rejected draft where how is CORRECTED, else -1.
    The distribution at row t was produced by the prompt and output tokens before t.
    """

    prompt_ids_P: NDArray[np.int32]
    output_ids_T: NDArray[np.int32]
    topk: TopK
    how_T: NDArray[np.uint8]
    rejected_T: NDArray[np.int32]
    sampling: Sampling
    seed: int | None
    choice: int
    finish: Finish
    prompt_cut: bool = False
    output_cut: bool = False
    held_out: bool = False
    value_kind: ValueKind = ValueKind.RAW
    chat_template_hash: bytes = b""
    drafters: tuple[DrafterRun, ...] = ()
    processed_logprob_T: NDArray[np.float32] | None = None
    branches: tuple[Branch, ...] = field(default=())
    ext: bytes = b""

    @property
    def positions(self) -> int:
        """How many output tokens the trace holds."""
        return len(self.output_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the sealer needs to know about a trace beside its content.

    `subject` is the name the request gave, or None for an anonymous caller; it is never written
    anywhere in the clear. `response_id` is the 16 random bytes behind the id shown to the caller.
    `created_s` is Unix time. `consent` is the widest scope allowed: 0 tenant, 1 pool, 2 everyone.
    """

    tenant: str
    subject: str | None
    response_id: bytes
    domain: str | None
    consent: int
    policy_version: int
    created_s: int
    target: bytes
    tokenizer: bytes
    origin: Origin = Origin.SERVED
