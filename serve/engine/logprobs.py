"""Log-probabilities of a step's tokens, for the requests that ask for them.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary, K entries of the
longest list asked for, T tokens emitted.
"""

from collections.abc import Sequence

from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.topk import topk_lse
from draftkeep.serve.engine.places import Place, emitted, gathered, sound
from draftkeep.serve.engine.request import TokenLogprob
from draftkeep.serve.engine.row import Row

Logprobs = tuple[TokenLogprob, ...] | None


def asked_logprobs(
    logits_NV: Tensor, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
) -> list[Logprobs]:
    """An entry for every token that `verdicts` emit, by row; None where none were asked for.

    Must run before the rows take their tokens. logits_NV holds drafts + 1 rows of each of `rows`,
    one request after another.
    """
    places = [
        place for place in emitted(rows, verdicts) if place.row.request.top_logprobs is not None
    ]
    if not places:
        return [None] * len(rows)
    found = _found(*gathered(logits_NV, places, sound=sound(verdicts)))
    return [found.get(id(row)) for row in rows]


def _found(logits_PV: Tensor, places: Sequence[Place]) -> dict[int, Logprobs]:
    """The entries of every place's emitted tokens, by the identity of its row."""
    top = topk_lse(logits_PV, max(place.row.request.top_logprobs or 1 for place in places))
    at = [place.first + t for place in places for t in range(place.count)]
    tokens = [token for place in places for token in place.verdict.tokens]
    own_T = logits_PV[at, tokens].float() - top.lse_N[at]
    ids_TK, logprobs_TK = top.ids_NK[at].tolist(), top.logprobs_NK[at].tolist()
    entries = [
        (own, list(zip(ids, logprobs, strict=True)))
        for own, ids, logprobs in zip(own_T.tolist(), ids_TK, logprobs_TK, strict=True)
    ]
    found: dict[int, Logprobs] = {}
    for place in places:
        count = place.row.request.top_logprobs
        mine, entries = entries[: place.count], entries[place.count :]
        found[id(place.row)] = tuple(
            TokenLogprob(logprob=own, top=tuple(best[:count])) for own, best in mine
        )
    return found
