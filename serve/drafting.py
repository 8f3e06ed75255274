"""Drafting: a loaded drafter proposes tokens for rows, under the noise the target will use.

Shapes: N rows of a pass, D drafter vocabulary, V target vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.kernels.coupled import choose, is_end
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.packed import Packing
from draftkeep.serve.row import Row
from draftkeep.serve.runner import ModelRunner, Segment

_FEED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A drafter as the engine takes it: logit column i of `model` is target id vocab_ids[i].

    The model reads target ids. It belongs to the engine once it was handed over.
    """

    model: PreTrainedModel
    vocab_ids: Tensor
    digest: bytes


class LoadedDrafter:
    """A drafter with its own runner and cache, ready to be swapped in.

    Raises ModelError where it does not fit a target of `target_vocab` ids. `context` is how many
    positions it can read, at most the engine's; rows beyond that are not drafted for.
    """

    def __init__(
        self,
        drafter: DraftModel,
        *,
        target_vocab: int,
        slots: int,
        context: int,
        packing: Packing,
    ) -> None:
        ids = drafter.vocab_ids.detach().cpu().numpy().astype(np.int64)
        _check_vocabulary(ids, drafter.model, target_vocab)
        limit = int(getattr(drafter.model.config, "max_position_embeddings", context))
        self.context = min(context, limit)
        self.digest = drafter.digest
        try:
            self.runner = ModelRunner(
                drafter.model, slots=slots, context=self.context, packing=packing
            )
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise ModelError(
                f"a trial pass of the drafter failed with {type(error).__name__}; its shapes do "
                "not fit each other: export the drafter again"
            ) from error
        self._ids_D = ids
        self._target_vocab = target_vocab
        self._whole = len(ids) == target_vocab
        self._lookup_V = np.full(target_vocab, -1, dtype=np.int64)
        self._lookup_V[ids] = np.arange(len(ids))

    def room(self, row: Row) -> int:
        """The most drafts for this row that stay inside the drafter's own context."""
        return max(0, self.context - len(row.tokens) + 1)

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """Fill `drafts` of every row with up to its count of tokens.

        The first pass feeds whatever the drafter's cache lacks: one token after a rejection, two
        after full acceptance, more after plain steps, everything after a swap. A row stops early
        behind an ending token. `timed(batch, work)` runs one pass of the loop.
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

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Prefill rows that lack many tokens, so that they do not widen the first draft pass."""
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
        logits_ND = self.runner.forward(segments)
        for row, segment in zip(rows, segments, strict=True):
            row.drafter_len += len(segment.tokens)
        best_N = logits_ND.argmax(dim=-1).tolist()
        for index, row in enumerate(rows):
            if _sampling(row).plain_argmax:
                row.drafts.append(int(self._ids_D[best_N[index]]))
            elif (token := self._draw(row, logits_ND[index].cpu().numpy())) is not None:
                row.drafts.append(token)

    def _draw(self, row: Row, logits_D: NDArray[np.float32]) -> int | None:
        """The drafter's own draw under the row's processors and noise; None where q is empty."""
        sampling, prompt = _sampling(row), row.request.prompt_ids
        index = row.output_len + len(row.drafts)
        noise_V = None if sampling.greedy else row.noise(index)
        try:
            if self._whole or sampling.needs_history or sampling.min_tokens:
                logits_V = np.full(self._target_vocab, -np.inf, dtype=np.float32)
                logits_V[self._ids_D] = logits_D
                output = row.output_ids + row.drafts
                scores = process(logits_V, sampling, prompt_ids=prompt, output_ids=output)
                return choose(scores, noise_V)
            # Without history only the bias names ids, so the chain can stay in the short row.
            short = self._shortened(sampling)
            scores = process(logits_D, short, prompt_ids=(), output_ids=())
            noise_D = None if noise_V is None else noise_V[self._ids_D]
            return int(self._ids_D[choose(scores, noise_D)])
        except ModelError:
            return None

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


def _check_vocabulary(ids_D: NDArray[np.int64], model: PreTrainedModel, target_vocab: int) -> None:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    outputs = len(cast(Tensor, head.weight))
    if ids_D.ndim != 1 or len(ids_D) != outputs:
        raise ModelError(
            f"the drafter's head has {outputs} outputs but its list names {ids_D.size} ids; "
            "export the drafter again"
        )
    inside = bool(len(ids_D)) and int(ids_D.min()) >= 0 and int(ids_D.max()) < target_vocab
    if not inside or bool((np.diff(ids_D) <= 0).any()):
        raise ModelError(
            f"the drafter's ids must be ascending and below the target's {target_vocab}; it was "
            "made for another tokenizer: choose a drafter of this target"
        )
    inputs = len(cast(Tensor, model.get_input_embeddings().weight))
    if inputs < target_vocab:
        raise ModelError(
            f"the drafter reads {inputs} ids but the target writes {target_vocab}; it was made for "
            "another tokenizer: choose a drafter of this target"
        )
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"the drafter's tensor {name} holds values that are not numbers; its training "
                "diverged or its file is damaged: choose another version"
            )
