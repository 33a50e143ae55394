"""Look-up finds what followed the last time, lets places vote, and keeps within its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import NGRAM, SUFFIX
from paceline.core.tree import DraftTree
from paceline.drafting.suffix import LEAST_MATCH, MOST_PLACES, RecentTexts, SuffixIndex, TextFollower, TextSource
from paceline.engine.source_interface import Turn
from tests.support.trees import new_tree, nodes_of, seen

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@dataclass
class Text:
    """All that look-up reads of a session."""

    tokens: Sequence[int]
    prompt_len: int
    cache_salt: str = ""


@dataclass
class Looking:
    """A source at work on one session."""

    source: TextSource
    follower: TextFollower


def looking(source, tokens, prompt_len, salt="") -> Looking:
    return Looking(source, source.follow(Text(tokens, prompt_len, salt)))


def follow(tokens, name=NGRAM) -> Looking:
    return looking(TextSource(name), tokens, len(tokens))


def grown(looker, tokens, *, limit=8, least=0.01) -> tuple[DraftTree, list[float]]:
    tree = new_tree(len(tokens))
    turn = Turn(follower=looker.follower, tree=tree, limit=limit, least=least)
    return tree, looker.source.grow([turn])[0]


def longest_path(tree) -> list[int]:
    node = seen(tree)
    while node.children:
        node = max(node.children.values(), key=lambda child: child.survival)
    return node.path()


def test_what_followed_last_time_is_guessed():
    tokens = [5, 6, 7, 8, 9, 10, 1, 5, 6, 7]
    tree, survivals = grown(follow(tokens), tokens, limit=4)
    assert longest_path(tree) == [8, 9, 10, 1]
    assert survivals == sorted(survivals, reverse=True)
    assert len(survivals) == 4


def test_nothing_is_guessed_when_nothing_matches():
    tokens = [1, 2, 3, 4, 5, 6]
    tree, survivals = grown(follow(tokens), tokens)
    assert (tree.num_nodes, survivals) == (0, [])


def test_places_that_disagree_share_the_vote_and_the_longer_match_weighs_more():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    tree, _ = grown(follow(tokens), tokens)
    children = seen(tree).children
    assert children[50].survival > children[60].survival > 0
    assert sum(child.guesses[NGRAM] for child in children.values()) < 1


def test_a_longer_match_is_surer():
    short, long = [1, 2, 9, 7, 1, 2], [5, 6, 1, 2, 9, 7, 5, 6, 1, 2]
    sure = [grown(follow(tokens), tokens, limit=1)[1][0] for tokens in (short, long)]
    assert sure[0] < sure[1]


def test_guesses_below_the_least_survival_are_not_hung():
    tokens = [1, 2, 9, 7, 1, 2]
    everything, _ = grown(follow(tokens), tokens)
    some, survivals = grown(follow(tokens), tokens, least=0.4)
    assert 0 < some.num_nodes < everything.num_nodes
    assert min(survivals) >= 0.4


def test_tokens_committed_later_are_read_too():
    tokens = [1, 2, 3]
    follower = follow(tokens)
    assert grown(follower, tokens)[1] == []
    tokens += [4, 1, 2]
    tree, _ = grown(follower, tokens, limit=2)
    assert longest_path(tree) == [3, 4]


@given(TOKENS)
def test_every_guess_really_followed_these_tokens_somewhere(tokens):
    tree, survivals = grown(follow(tokens), tokens, limit=16, least=0.0)
    text = "," + ",".join(map(str, tokens)) + ","
    for node in nodes_of(tree):
        assert "," + ",".join(map(str, tokens[-LEAST_MATCH:] + node.path())) + "," in text
    assert tree.num_nodes == len(survivals)
    assert survivals == sorted(survivals, reverse=True)


@given(TOKENS, st.integers(0, 6))
def test_a_limit_cuts_off_what_is_worth_least(tokens, limit):
    _, everything = grown(follow(tokens), tokens, limit=1000, least=0.0)
    _, some = grown(follow(tokens), tokens, limit=limit, least=0.0)
    assert some == everything[:limit]


@pytest.mark.parametrize(
    ("name", "salt", "expected"),
    [(SUFFIX, "one key", [7, 8]), (SUFFIX, "another key", []), (SUFFIX, "", []), (NGRAM, "one key", [])],
)
def test_outputs_of_other_sessions_are_read_by_suffix_alone_and_under_the_same_salt(name, salt, expected):
    source = TextSource(name)
    looking(source, [1, 2, 5, 6, 7, 8], 2, "one key").follower.close()
    tokens = [3, 5, 6]
    tree, _ = grown(looking(source, tokens, 3, salt), tokens)
    assert longest_path(tree) == expected


def test_prompts_of_other_sessions_are_never_read():
    source = TextSource(SUFFIX)
    looking(source, [5, 6, 7, 8, 1, 2, 3], 4).follower.close()
    tokens = [5, 6]
    assert grown(looking(source, tokens, 2), tokens)[1] == []


@given(st.lists(st.tuples(TOKENS, st.sampled_from(("", "a", "b"))), max_size=12), st.integers(0, 80))
def test_recent_texts_keep_the_latest_of_all_salts_within_their_bound(texts, most_tokens):
    recent = RecentTexts(most_tokens)
    for text, salt in texts:
        recent.keep(text, salt)
    kept = {
        (salt, id(text))
        for salt, index in recent._indexes.items()
        for places in index._places.values()
        for text, _ in places
    }
    assert sum(len(text) for _, text in recent._texts) <= most_tokens
    assert kept <= {(salt, id(text)) for salt, text in recent._texts if len(text) > LEAST_MATCH}
    assert set(recent._indexes) == {salt for salt, _ in recent._texts}


@given(TOKENS)
def test_an_index_is_as_good_as_new_after_a_text_was_removed(text):
    index = SuffixIndex()
    index.add(text, 0)
    assert all(len(places) <= MOST_PLACES for places in index._places.values())
    index.remove(text)
    assert index._places == {}
