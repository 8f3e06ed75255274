"""Row: one running request, with its slot, positions, noise and captured distributions.

Suffixes: T output tokens (room for the whole budget), K the captured list, V target vocabulary.
"""

import numpy as np

from draftkeep.kernels.noise import GumbelRow
from draftkeep.kernels.outcome import Verified, is_end
from draftkeep.kernels.rejection import Law
from draftkeep.serve.engine.request import (
    DrafterUse,
    Finish,
    Finished,
    How,
    RejectedBranch,
    Request,
)

PARKED = -1


class Row:
    """The engine's state of one request. Touched by the engine's thread alone.

    `tokens` is prompt and output. `target_len` and `drafter_len` say how many leading tokens the
    two caches hold for this slot; everything from there on is fed before the next draw, which is
    all there is to catching up, also after a swap or a time without a slot. `drafts` are the
    proposals of the running step and `draft_laws`, under the rejection rule, what each was drawn
    from. `k` is how many log-probabilities are captured for each position, 0 for none; `processed`
    keeps the processed log-probability of every token as well.
    """

    def __init__(
        self,
        request: Request,
        *,
        budget: int,
        vocab: int,
        k: int,
        submitted_s: float,
        started_s: float,
        processed: bool = False,
    ) -> None:
        self.request = request
        self.slot = PARKED
        self.slot_since_s = started_s
        self.budget = budget
        self.tokens = list(request.prompt_ids)
        self.target_len = 0
        self.drafter_len = 0
        self.drafts: list[int] = []
        self.draft_laws: list[Law | None] = []
        self.branches: list[RejectedBranch] = []
        self.submitted_s = submitted_s
        self.started_s = started_s
        self.first_s: float | None = None
        self.last_s = submitted_s
        self._entered_len = 0
        self._vocab = vocab
        self._noise: dict[int, GumbelRow] = {}
        self._uses: list[tuple[bytes, int]] = []
        self.how_T = np.zeros(budget, np.uint8)
        self.rejected_T = np.full(budget, -1, np.int32)
        self.k = k
        self.ids_TK = np.full((budget, k), -1, np.int32)
        self.logprobs_TK = np.full((budget, k), -np.inf, np.float32)
        self.tail_T = np.full(budget, -np.inf, np.float32)
        # Zero where no law was drawn from: an argmax is certain.
        self._processed_T = np.zeros(budget, np.float32) if processed else None

    @property
    def output_len(self) -> int:
        """How many tokens were emitted."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The emitted tokens, a copy."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def backlog(self) -> int:
        """Tokens the target's cache lacks beside the last one, which the next step feeds."""
        return len(self.tokens) - 1 - self.target_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.budget - self.output_len

    @property
    def ending(self) -> Finish | None:
        """Why the output ends with its last token, or None where it goes on."""
        if self.output_len and is_end(self.tokens[-1], self.request.sampling):
            return Finish.STOP
        return Finish.LENGTH if self.remaining == 0 else None

    def enter(self, slot: int, now_s: float) -> None:
        """Take a slot, whose caches hold nothing of this row."""
        self.slot = slot
        self.slot_since_s = now_s
        self._entered_len = self.output_len

    def may_give_way(self, since_s: float) -> bool:
        """True where it has held its slot since then or longer, and got somewhere in that time."""
        return self.slot_since_s <= since_s and self.output_len > self._entered_len

    def park(self) -> None:
        """Give the slot up. What was emitted and captured stays, what the caches held is lost."""
        self.slot = PARKED
        self.target_len = self.drafter_len = 0
        self.clear_drafts()
        self._noise.clear()

    def clear_drafts(self) -> None:
        """Propose nothing in this step."""
        self.drafts = []
        self.draft_laws = []

    def noise(self, index: int) -> GumbelRow:
        """The Gumbel row of an output index, made once for drafting and verification."""
        if index not in self._noise:
            request = self.request
            self._noise[index] = GumbelRow(request.seed, request.choice, index, self._vocab)
        return self._noise[index]

    def take(self, verdict: Verified, digest: bytes, now_s: float) -> None:
        """Append what a step emits, under the drafter of that digest. Rewinds both caches."""
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        tokens, accepted = verdict.tokens, verdict.accepted
        start, before = self.output_len, len(self.tokens)
        self.tokens += tokens
        self.how_T[start : start + accepted] = How.ACCEPTED
        if len(tokens) > accepted:
            last = start + accepted
            self.how_T[last] = _how(drafted=len(self.drafts), accepted=accepted)
            if accepted < len(self.drafts):
                self.rejected_T[last] = self.drafts[accepted]
        if self._processed_T is not None and verdict.logprobs is not None:
            self._processed_T[start : start + len(tokens)] = verdict.logprobs
        self.target_len = before + accepted
        self.drafter_len = min(self.drafter_len, before + accepted)
        self._use(digest, len(tokens))
        self._noise = {at: row for at, row in self._noise.items() if at >= self.output_len}

    def stop_capture(self) -> None:
        """Give up the distributions of this request; what is delivered does not change."""
        self.k = 0

    def finished(self, finish: Finish, *, length: int, now_s: float) -> Finished:
        """The first `length` output tokens and everything known of them."""
        how_T = self.how_T[:length].copy()
        accepted = int((how_T == How.ACCEPTED).sum())
        processed_T = self._processed_T
        # Every step ends in a token of the target's own, except one cut short by an ending draft.
        cut = int(length > 0 and how_T[-1] == How.ACCEPTED)
        return Finished(
            request=self.request,
            finish=finish,
            output_ids_T=np.array(self.output_ids[:length], np.int32),
            ids_TK=self.ids_TK[:length, : self.k].copy(),
            logprobs_TK=self.logprobs_TK[:length, : self.k].copy(),
            tail_T=self.tail_T[:length].copy(),
            how_T=how_T,
            rejected_T=self.rejected_T[:length].copy(),
            processed_T=None if processed_T is None else processed_T[:length].copy(),
            branches=tuple(b for b in self.branches if b.start < length) if self.k else (),
            drafters=self._runs(length),
            steps=length - accepted + cut,
            tested=accepted + int((how_T == How.CORRECTED).sum()),
            accepted=accepted,
            submitted_s=self.submitted_s,
            started_s=self.started_s,
            first_s=self.first_s if self.first_s is not None else now_s,
            finished_s=now_s,
        )

    def _use(self, digest: bytes, positions: int) -> None:
        if self._uses and self._uses[-1][0] == digest:
            positions += self._uses.pop()[1]
        self._uses.append((digest, positions))

    def _runs(self, length: int) -> tuple[DrafterUse, ...]:
        runs = []
        for digest, positions in self._uses:
            used = min(positions, length)
            length -= used
            if used:
                # A drafter that takes a request over reads it again from its first token.
                runs.append(DrafterUse(digest=digest, context_start=0, positions=used))
        return tuple(runs)


def _how(*, drafted: int, accepted: int) -> How:
    """How the target's own token at the end of a step came about."""
    if drafted == 0:
        return How.PLAIN
    return How.BONUS if accepted == drafted else How.CORRECTED
