"""Which ids a drafter gets."""

import torch

from draftkeep.distill.vocabulary import choose_vocabulary
from tests.distill.conftest import GREEDY, make_trace


def test_ids_with_the_most_teacher_mass_win_and_ending_tokens_always_stay() -> None:
    # Mass by id over both positions: 0: .1, 1: .9, 2: .1, 3: .7, 4: .2 (id 4 is never listed).
    logits = torch.tensor([[0.0, 0.5, 0.1, 0.4, 0.0], [0.1, 0.4, 0.0, 0.3, 0.2]]).log()
    trace = make_trace([2], [1, 3], logits, sampling=GREEDY, k=2)
    assert choose_vocabulary([trace], size=2, keep=(), total=5).tolist() == [1, 3]
    assert choose_vocabulary([trace], size=2, keep=(4,), total=5).tolist() == [1, 4]
    # The rest is filled from the lowest id up, and never beyond the target's own ids.
    assert choose_vocabulary([trace], size=4, keep=(4,), total=5).tolist() == [0, 1, 3, 4]
    assert choose_vocabulary([trace], size=9, keep=(), total=5).tolist() == [0, 1, 2, 3, 4]


def test_required_ids_are_kept_even_where_they_are_more_than_asked_for() -> None:
    assert choose_vocabulary([], size=1, keep=(7, 3, 3), total=9).tolist() == [3, 7]
