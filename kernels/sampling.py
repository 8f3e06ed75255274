"""The sampling values of one request, as they were applied.

A drafter is replayed years later from these values, so they are stored complete: nothing that
changes which token is drawn may live anywhere else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request's tokens are drawn (processor version 1, in this order).

    bias -> repetition -> presence -> frequency -> temperature -> min-p -> top-k -> top-p.
    Neutral values switch a stage off: empty bias, repetition 1, presence 0, frequency 0, min_p 0,
    top_k 0, top_p 1. `temperature` 0 is argmax and uses no noise. Repetition looks at prompt and
    output, presence and frequency at the output alone. Before `min_tokens` outputs the stop and
    EOS ids are barred (minus infinity, in the bias stage). `ignore_eos` keeps EOS from ending the
    output. `logit_bias` is sorted by id. `stop_ids` end the output like EOS does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        """True where the token is an argmax and the noise is not used."""
        return self.temperature == 0.0

    @property
    def keeps_all(self) -> bool:
        """True where min-p, top-k and top-p rule nothing out."""
        return self.min_p <= 0.0 and self.top_k <= 0 and self.top_p >= 1.0

    @property
    def needs_history(self) -> bool:
        """True where a position's distribution depends on more than its logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def plain_argmax(self) -> bool:
        """True where the token is the argmax of the raw logits, at every position."""
        return (
            self.greedy and not self.needs_history and not self.logit_bias and self.min_tokens == 0
        )
