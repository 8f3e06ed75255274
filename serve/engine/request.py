"""Request, Emission and Finished: what goes into the engine and what comes out of it.

Suffixes: T output tokens, K the captured list, N drafts of a rejected branch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Finish as Finish
from draftkeep.kernels.outcome import How as How
from draftkeep.kernels.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """What the target thought of one emitted token: raw natural logs, before every processor.

    `top` holds the (id, logprob) pairs asked for, value descending and ids ascending on ties; the
    emitted token need not be among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one step of one request produced.

    `finish` is None until the last one. `logprobs` has an entry for every token where the request
    asked for them, and is None where it did not.
    """

    tokens: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One choice to generate.

    `on_tokens(emission)` is called in the engine's thread after every step that produced tokens.
    `on_error(error)` takes its place where the request failed. Both must return at once; an
    exception in either cancels this request alone. `seed` is modulo 2^64. `top_logprobs` asks for
    the raw log-probability of every token and of that many best alternatives (None: no
    log-probabilities). `group` is a label of similar traffic by which acceptance is followed.
    `tag` is the caller's own and comes back in `Finished`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    on_tokens: Callable[[Emission], None]
    on_error: Callable[[DraftkeepError], None]
    choice: int = 0
    top_logprobs: int | None = None
    group: str = "unknown"
    capture: bool = True
    tag: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUse:
    """A stretch of output positions under one drafter (empty digest: none).

    `context_start` is the absolute token position, prompt first, where its own context began.
    """

    digest: bytes
    context_start: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedBranch:
    """Drafts from a rejection on, with the target's raw top-k after each of them.

    draft_ids_N[0] is the rejected draft of output index `start`; row i of the other arrays is the
    target's distribution after draft_ids_N[0..i].
    """

    start: int
    draft_ids_N: NDArray[np.int32]
    ids_NK: NDArray[np.int32]
    logprobs_NK: NDArray[np.float32]
    tail_N: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that ended by itself (STOP or LENGTH), after its tokens were delivered.

    Row t of ids_TK, logprobs_TK and tail_T is the target's raw distribution that token t was drawn
    from: natural logs, before every processor, value descending and ids ascending on ties, tail the
    log of the mass outside the list. K is 0 where nothing was captured. processed_T is the log of
    each token's probability after every processor, where the verification rule leaves the noise
    unknown to a replay, else None. rejected_T is the rejected draft where how_T is CORRECTED, else
    -1. `tested` and `accepted` count drafts compared with the target's token up to the end of the
    output. Times are the engine's clock in seconds.
    """

    request: Request
    finish: Finish
    output_ids_T: NDArray[np.int32]
    ids_TK: NDArray[np.int32]
    logprobs_TK: NDArray[np.float32]
    tail_T: NDArray[np.float32]
    how_T: NDArray[np.uint8]
    rejected_T: NDArray[np.int32]
    processed_T: NDArray[np.float32] | None
    branches: tuple[RejectedBranch, ...]
    drafters: tuple[DrafterUse, ...]
    steps: int
    tested: int
    accepted: int
    submitted_s: float
    started_s: float
    first_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """One request's part of a step.

    `drafted` drafts were proposed, those behind the end of the output not counted; the first
    `tested` of them were compared and the first `accepted` of those agreed. `emitted` tokens were
    delivered, `gap_s` after the request's last ones (after its submission for the first).
    """

    group: str
    first: bool
    drafted: int
    tested: int
    accepted: int
    emitted: int
    gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One decoding step, for whoever counts.

    `drafter` is the digest of the drafter that proposed, empty where none did. `width` is the most
    drafts of a row and one: with the number of `rows` the shape of the target's pass. `draft_s` and
    `verify_s` are the two models' forward passes; `total_s` is the whole step with them, prefill
    not included, so the rest is the engine's own.
    """

    drafter: bytes
    width: int
    draft_s: float
    verify_s: float
    total_s: float
    rows: tuple[RowStep, ...]
