"""Log-probabilities of a step's tokens, for the requests that ask for them.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary, K entries of the
longest list asked for, T tokens emitted.
"""

from collections.abc import Sequence

from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.topk import TopKLse
from draftkeep.serve.engine.request import TokenLogprob
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.spans import Span, emitted, look_through

Logprobs = tuple[TokenLogprob, ...] | None


def asked_logprobs(
    logits_NV: Tensor, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
) -> list[Logprobs]:
    """An entry for every token that `verdicts` emit, by row; None where none were asked for.

    Must run before the rows take their tokens. logits_NV holds drafts + 1 rows of each of `rows`,
    one request after another.
    """
    spans = [span for span in emitted(rows, verdicts) if span.row.request.top_logprobs is not None]
    if not spans:
        return [None] * len(rows)
    longest = max(span.row.request.top_logprobs or 1 for span in spans)
    found = _found(*look_through(logits_NV, spans, longest))
    return [found.get(id(row)) for row in rows]


def _found(logits_PV: Tensor, spans: Sequence[Span], top: TopKLse) -> dict[int, Logprobs]:
    """The entries of every span's emitted tokens, by the identity of its row."""
    at = [span.first + t for span in spans for t in range(span.count)]
    tokens = [token for span in spans for token in span.verdict.tokens]
    own_T = logits_PV[at, tokens].float() - top.lse_N[at]
    ids_TK, logprobs_TK = top.ids_NK[at].tolist(), top.logprobs_NK[at].tolist()
    entries = [
        (own, list(zip(ids, logprobs, strict=True)))
        for own, ids, logprobs in zip(own_T.tolist(), ids_TK, logprobs_TK, strict=True)
    ]
    found: dict[int, Logprobs] = {}
    for span in spans:
        count = span.row.request.top_logprobs
        mine, entries = entries[: span.count], entries[span.count :]
        found[id(span.row)] = tuple(
            TokenLogprob(logprob=own, top=tuple(best[:count])) for own, best in mine
        )
    return found
