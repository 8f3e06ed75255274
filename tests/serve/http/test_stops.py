"""A stop cuts a text where searching the whole of it would, however the text came in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.http.stops import StopMatcher

# Few letters, so that stops occur, overlap and repeat themselves.
LETTERS = st.text(alphabet="abé", max_size=4)
PIECES = st.lists(LETTERS, max_size=25)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=6), max_size=4)


def streamed(pieces: list[str], stops: list[str], *, armed_from: int = 0) -> tuple[list[str], int]:
    """What is shown with every piece, and how many pieces were taken."""
    matcher = StopMatcher(stops)
    shown = []
    for number, piece in enumerate(pieces, start=1):
        text, stopped = matcher.push(piece, armed=number >= armed_from)
        shown.append(text)
        if stopped:
            return shown, number
    return [*shown, matcher.flush()], len(pieces)


def searched(pieces: list[str], stops: list[str]) -> tuple[str, int]:
    """The same by `str.find` on the whole text after every piece."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], number
    return text, len(pieces)


@given(PIECES, STOPS)
def test_any_pieces_are_cut_as_the_whole_text_is(pieces: list[str], stops: list[str]) -> None:
    shown, taken = streamed(pieces, stops)
    assert ("".join(shown), taken) == searched(pieces, stops)


@given(PIECES, STOPS)
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    whole, _ = searched(pieces, stops)
    shown, _ = streamed(pieces, stops)
    assert whole.startswith("".join(shown[:-1]))


@given(PIECES, STOPS)
def test_no_more_is_held_than_could_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        new, stopped = matcher.push(piece)
        text, shown = text + piece, shown + new
        if stopped:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(PIECES, STOPS, st.integers(0, 30))
def test_stops_complete_too_early_are_text(pieces: list[str], stops: list[str], early: int) -> None:
    shown, taken = streamed(pieces, stops, armed_from=early)
    text = "".join(pieces[:taken])
    before = len("".join(pieces[: min(early, taken + 1) - 1])) if early else 0
    ends = [
        at
        for stop in stops
        for at in range(len(text) - len(stop) + 1)
        if text.startswith(stop, at) and at + len(stop) > before
    ]
    assert "".join(shown) == (text[: min(ends)] if ends else text)
    assert bool(ends) or taken == len(pieces)


def test_an_unfinished_stop_is_shown_at_the_end() -> None:
    assert streamed(["a", "b", "c"], ["bcd"]) == (["a", "", "", "bc"], 3)


def test_the_earliest_of_the_stops_in_one_piece_wins() -> None:
    assert streamed(["xabcy"], ["b", "abc", "y"]) == (["x"], 1)
    # The longer one begins earlier but is not there yet when the shorter one is.
    assert streamed(["xab", "cy"], ["b", "abc"]) == (["xa"], 1)
