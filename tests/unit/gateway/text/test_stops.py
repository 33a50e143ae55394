"""The stop matcher against `str.find` on the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.text.streaming import StopMatcher

LETTERS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads the text letter by letter; the first moment at which it contains a stop string ends it."""
    for end in range(len(text) + 1):
        starts = [found for stop in stops if (found := text[:end].find(stop)) >= 0]
        if starts:
            return text[: min(starts)], True
    return text, False


def feed_all(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Feeds pieces until a stop string is found."""
    matcher = StopMatcher(stops)
    passed_text = ""
    for piece in pieces:
        passed, stop = matcher.feed(piece)
        passed_text += passed
        if stop is not None:
            return passed_text, True
    return passed_text + matcher.flush(), False


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_the_text_ends_where_a_search_of_the_whole_text_finds_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    assert feed_all(stops, pieces) == cut_at_first_stop("".join(pieces), stops)


@given(text=LETTERS, stops=STOPS)
def test_the_result_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str]) -> None:
    assert feed_all(stops, list(text)) == feed_all(stops, [text])


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for letter in text:
        if matcher.feed(letter)[1] is not None:
            return
    held = matcher.flush()
    assert not held or any(stop.startswith(held) for stop in stops)


def test_text_is_held_until_a_stop_string_is_found_and_named_or_cannot_be_one() -> None:
    assert StopMatcher([]).feed("abc") == ("abc", None)
    matcher = StopMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("text E", "N", "D more")] == [("text ", None), ("", None), ("", "END")]
    matcher = StopMatcher(["END"])
    assert [matcher.feed(letter)[0] for letter in "EEx"] == ["", "E", "Ex"]
