"""ModelDrafter: a small causal LM that drafts with a runner and a slot cache of its own.

Shapes: N rows of a pass, D drafter vocabulary, V target vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import ModelError
from draftkeep.kernels.draw import choose, draw
from draftkeep.kernels.noise import DRAFT, gumbel
from draftkeep.kernels.outcome import is_end
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.rejection import Law
from draftkeep.kernels.sampling import Sampling
from draftkeep.kernels.topk import argmax
from draftkeep.serve.engine.draft_vocabulary import draftable, readable
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.host_copy import host_rows
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.verification import Verification
from draftkeep.serve.passes.packed import Packing
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner

_FEED_AT_ONCE = 8


class ModelDrafter:
    """A drafter with its own runner and cache, ready to be swapped in.

    Raises ModelError where it does not fit a target of `target_vocab` ids. `context` is how many
    positions it can read, at most the engine's; rows beyond that are not drafted for. `on_problem`
    hears of what its passes survived. Used by one thread at a time.
    """

    def __init__(
        self,
        drafter: DraftModel,
        *,
        target_vocab: int,
        slots: int,
        context: int,
        packing: Packing = "measured",
        verification: Verification = "coupled",
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str, BaseException], None] = lambda kind, error: None,
    ) -> None:
        self._ids_D = draftable(drafter, target_vocab)
        self._reads = readable(drafter.model)
        limit = int(getattr(drafter.model.config, "max_position_embeddings", None) or context)
        self.context = min(context, limit)
        self.digest = drafter.digest
        try:
            self.runner = ModelRunner(
                drafter.model,
                slots=slots,
                context=self.context,
                packing=packing,
                on_problem=on_problem,
            )
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise ModelError(
                f"a trial pass of the drafter failed with {type(error).__name__}; its shapes do "
                "not fit each other: export the drafter again"
            ) from error
        self.forward_s = 0.0
        self._clock = clock
        self._needs_laws = verification == "rejection"
        self._target_vocab = target_vocab
        self._whole = len(self._ids_D) == target_vocab
        self._lookup_V = np.full(target_vocab, -1, dtype=np.int64)
        self._lookup_V[self._ids_D] = np.arange(len(self._ids_D))

    def room(self, row: Row) -> int:
        """The most drafts for this row that stay inside the drafter's own context.

        0 where the row holds an id that the drafter has no embedding for.
        """
        room = max(0, self.context - len(row.tokens) + 1)
        if room and self._reads < self._target_vocab:
            unread = row.tokens[row.drafter_len :]
            return room if max(unread, default=0) < self._reads else 0
        return room

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """Fill `drafts` of every row, and its `draft_laws` where the rule needs them.

        The first pass feeds whatever the drafter's cache lacks: one token after a rejection, two
        after full acceptance, more after plain steps, everything after a swap. A row stops early
        behind an ending token and where nothing the drafter knows is allowed.
        """
        live = [(row, count) for row, count in zip(rows, counts, strict=True) if count > 0]
        self._catch_up([row for row, _ in live])
        for depth in range(max((count for _, count in live), default=0)):
            active = [row for row, count in live if count > depth and len(row.drafts) == depth]
            if depth:
                active = [row for row in active if not is_end(row.drafts[-1], _sampling(row))]
            if not active:
                return
            timed(len(active), lambda active=active: self._draft_one(active))  # type: ignore[misc]

    def forget(self, row: Row) -> None:
        """Take nothing in the cache for this row's: it is read again from its first token."""
        row.drafter_len = 0

    def idle_pass(self, batch: int) -> None:
        """One pass of `batch` rows that changes nothing, for measuring what a draft costs."""
        self.runner.idle_pass(batch, 1)

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Prefill rows that lack many tokens, so that they do not widen the first draft pass."""
        started = self._clock()
        behind = [row for row in rows if len(row.tokens) - row.drafter_len > _FEED_AT_ONCE]
        self.runner.prefill(
            [
                Segment(
                    slot=row.slot, tokens=row.tokens[row.drafter_len : -1], start=row.drafter_len
                )
                for row in behind
            ]
        )
        for row in behind:
            row.drafter_len = len(row.tokens) - 1
        self.forward_s += self._clock() - started

    def _draft_one(self, rows: Sequence[Row]) -> None:
        """One pass: the next draft of every row, or none where nothing can be proposed."""
        segments = [
            Segment(
                slot=row.slot,
                tokens=(row.tokens + row.drafts)[row.drafter_len :],
                start=row.drafter_len,
                want=1,
            )
            for row in rows
        ]
        started = self._clock()
        # Columns beyond the draftable ids are padding of the vocabulary.
        logits_ND = self.runner.forward(segments)[:, : len(self._ids_D)]
        best_N = argmax(logits_ND)[0].tolist()
        self.forward_s += self._clock() - started
        for row, segment in zip(rows, segments, strict=True):
            row.drafter_len += len(segment.tokens)
        plain = [_sampling(row).plain_argmax for row in rows]
        drawn = host_rows(
            logits_ND, [slice(at, at + 1) for at, greedy in enumerate(plain) if not greedy]
        )
        for row, best, greedy in zip(rows, best_N, plain, strict=True):
            if greedy:
                self._append(row, int(self._ids_D[best]), None)
            else:
                self._draw(row, next(drawn)[0])

    def _draw(self, row: Row, logits_D: NDArray[np.float32]) -> None:
        """Append the drafter's own draw under the row's processors, or nothing where q is empty."""
        sampling = _sampling(row)
        index = row.output_len + len(row.drafts)
        try:
            if self._needs_laws and not sampling.greedy:
                law_V = self._law(row, logits_D)
                request = row.request
                noise_V = gumbel(
                    request.seed, request.choice, index, self._target_vocab, stream=DRAFT
                )
                self._append(row, choose(law_V, noise_V), law_V)
            elif self._whole or sampling.needs_history or sampling.min_tokens:
                noise = None if sampling.greedy else row.noise(index)
                token = draw(
                    self._spread(logits_D),
                    sampling,
                    noise,
                    prompt_ids=row.request.prompt_ids,
                    output_ids=row.output_ids + row.drafts,
                )
                self._append(row, token, None)
            else:
                # Without history only the bias names ids, so the chain can stay in the short row.
                column = draw(
                    logits_D,
                    self._shortened(sampling),
                    None if sampling.greedy else row.noise(index),
                    prompt_ids=(),
                    output_ids=(),
                    names_V=self._ids_D,
                )
                self._append(row, int(self._ids_D[column]), None)
        except ModelError:
            return

    def _append(self, row: Row, token: int, law_V: Law | None) -> None:
        row.drafts.append(token)
        if self._needs_laws:
            row.draft_laws.append(law_V)

    def _law(self, row: Row, logits_D: NDArray[np.float32]) -> Law:
        """The log of the processed distribution over V; ids the drafter lacks have none of it."""
        return log_softmax64(
            process(
                self._spread(logits_D),
                _sampling(row),
                prompt_ids=row.request.prompt_ids,
                output_ids=row.output_ids + row.drafts,
            )
        )

    def _spread(self, logits_D: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._whole:
            return logits_D
        logits_V = np.full(self._target_vocab, -np.inf, dtype=np.float32)
        logits_V[self._ids_D] = logits_D
        return logits_V

    def _shortened(self, sampling: Sampling) -> Sampling:
        """The same values with the bias named by drafter index; ids it lacks have q = 0."""
        if not sampling.logit_bias:
            return sampling
        bias = tuple(
            (int(self._lookup_V[token]), value)
            for token, value in sampling.logit_bias
            if self._lookup_V[token] >= 0
        )
        return replace(sampling, logit_bias=bias)


def _sampling(row: Row) -> Sampling:
    return row.request.sampling
