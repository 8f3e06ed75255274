"""Prompt lookup: which earlier place is copied, and that the index is only a faster way there."""

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.ngram import NGRAM_DIGEST, NgramDrafter
from draftkeep.serve.engine.request import Request
from draftkeep.serve.engine.row import Row


def _row(*tokens: int, stop: int = -1) -> Row:
    request = Request(
        request_id="a",
        prompt_ids=tokens,
        sampling=Sampling(stop_ids=(stop,)),
        seed=0,
        max_tokens=100,
        on_tokens=lambda emission: None,
        on_error=lambda error: None,
    )
    row = Row(request, budget=100, vocab=64, k=0, submitted_s=0.0, started_s=0.0)
    row.enter(0, 0.0)
    return row


def _proposed(drafter: NgramDrafter, row: Row, count: int = 4) -> list[int]:
    row.clear_drafts()
    drafter.propose([row], [count], lambda batch, work: work())
    return row.drafts


def _take(row: Row, tokens: list[int], accepted: int = 0) -> None:
    row.take(Verified(tokens=tuple(tokens), accepted=accepted, tested=accepted), b"", 0.0)


def test_what_followed_the_ending_is_proposed_again() -> None:
    assert _proposed(NgramDrafter(3, 2), _row(7, 8, 1, 2, 3, 7, 8)) == [1, 2, 3, 7]


def test_the_latest_occurrence_counts() -> None:
    assert _proposed(NgramDrafter(2, 2), _row(7, 8, 1, 7, 8, 2, 7, 8), 1) == [2]


def test_a_longer_ending_beats_a_later_one() -> None:
    row = _row(9, 7, 8, 1, 5, 7, 8, 2, 9, 7, 8)
    assert _proposed(NgramDrafter(3, 2), row, 1) == [1]
    assert _proposed(NgramDrafter(2, 2), row, 1) == [2]


def test_nothing_is_proposed_for_a_new_ending() -> None:
    assert _proposed(NgramDrafter(3, 2), _row(1, 2, 3, 4, 5)) == []
    assert _proposed(NgramDrafter(3, 2), _row(1)) == []
    assert _proposed(NgramDrafter(1, 1), _row(1, 2, 1), 1) == [2]


def test_a_loop_goes_on_beyond_the_end() -> None:
    assert _proposed(NgramDrafter(2, 2), _row(5, 6, 7, 5, 6, 7, 5, 6), 5) == [7, 5, 6, 7, 5]
    assert _proposed(NgramDrafter(2, 2), _row(4, 4, 4), 3) == [4, 4, 4]


def test_drafting_stops_behind_an_ending_token() -> None:
    assert _proposed(NgramDrafter(2, 2), _row(7, 8, 1, 2, 3, 7, 8, stop=2)) == [1, 2]


def test_rejected_drafts_leave_no_trace() -> None:
    drafter, row = NgramDrafter(2, 2), _row(7, 8, 1, 7, 8)
    assert _proposed(drafter, row, 2) == [1, 7]
    _take(row, [3])
    assert _proposed(drafter, row, 2) == []
    _take(row, [7, 8])
    assert _proposed(drafter, row, 2) == [3, 7]


def test_a_forgotten_row_is_read_again() -> None:
    drafter, row = NgramDrafter(3, 2), _row(7, 8, 1, 2, 7, 8)
    before = _proposed(drafter, row)
    drafter.forget(row)
    drafter.forget(row)
    row.park()
    row.enter(3, 1.0)
    assert _proposed(drafter, row) == before


def test_rows_do_not_see_each_other() -> None:
    drafter = NgramDrafter(2, 2)
    assert _proposed(drafter, _row(7, 8, 1, 2, 3, 7, 8)) == [1, 2, 3, 7]
    assert _proposed(drafter, _row(7, 8)) == []
    assert _proposed(drafter, _row(1, 2, 7, 8)) == []


def test_the_state_of_a_row_ends_with_it() -> None:
    drafter = NgramDrafter()
    rows = [_row(1, 2, 3, 1, 2) for _ in range(5)]
    for row in rows:
        _proposed(drafter, row)
    assert len(drafter._index) == 5
    del row, rows
    gc.collect()
    assert len(drafter._index) == 0


def test_sizes_are_checked_and_the_digest_is_its_own() -> None:
    assert len(NGRAM_DIGEST) == 32
    assert NgramDrafter().digest == NGRAM_DIGEST
    for sizes in ((0, 0), (2, 3), (3, 0)):
        with pytest.raises(ValueError, match="min_n <= max_n"):
            NgramDrafter(*sizes)


def _searched(tokens: list[int], max_n: int, min_n: int, count: int) -> list[int]:
    """The same by scanning everything: the longest ending, then its latest earlier place."""
    for size in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                copied = list(tokens)
                for place in range(end, end + count):
                    copied.append(copied[place])
                return copied[len(tokens) :]
    return []


@given(data=st.data(), max_n=st.integers(1, 4), count=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_index_finds_what_a_scan_finds(data: Any, max_n: int, count: int) -> None:
    min_n = data.draw(st.integers(1, max_n))
    ids = st.integers(0, 3)
    drafter = NgramDrafter(max_n, min_n)
    row = _row(*data.draw(st.lists(ids, min_size=1, max_size=12)))
    for _ in range(6):
        drafts = _proposed(drafter, row, count)
        assert drafts == _searched(row.tokens, max_n, min_n, count)
        accepted = data.draw(st.integers(0, len(drafts)))
        _take(row, [*drafts[:accepted], data.draw(ids)], accepted)
        if data.draw(st.booleans()):
            drafter.forget(row)
