"""Look-up finds what followed the last time, lets places vote, and keeps within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import NGRAM
from paceline.core.tree import DraftTree
from paceline.drafting.model_free import LEAST_MATCH, MOST_PLACES, NgramFollower, NgramSource
from paceline.engine.source_interface import Turn
from tests.support.trees import new_tree, nodes_of, seen

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def grown(follower, tokens, *, limit=8, least=0.01) -> tuple[DraftTree, list[float]]:
    tree, source = new_tree(len(tokens)), NgramSource()
    turn = Turn(follower=follower, tree=tree, limit=limit, least=least)
    assert source.may_guess(follower) == bool(follower.voters)
    source.grow([turn])
    return tree, sorted([node.survival for node in nodes_of(tree)], reverse=True)


def longest_path(tree) -> list[int]:
    node = seen(tree)
    while node.children:
        node = max(node.children.values(), key=lambda child: child.survival)
    return node.path()


def test_what_followed_last_time_is_guessed():
    tokens = [5, 6, 7, 8, 9, 10, 1, 5, 6, 7]
    tree, survivals = grown(NgramFollower(tokens), tokens, limit=4)
    assert longest_path(tree) == [8, 9, 10, 1]
    assert len(survivals) == 4


def test_nothing_is_guessed_when_nothing_matches():
    tokens = [1, 2, 3, 4, 5, 6]
    tree, survivals = grown(NgramFollower(tokens), tokens)
    assert (tree.num_nodes, survivals) == (0, [])


PROMPT, PREDICTED = [1, 2, 3], [50, 51, 52, 53, 54, 55]


def test_a_prediction_is_guessed_from_the_first_token_on():
    tree, _ = grown(NgramFollower(PROMPT, len(PROMPT), PREDICTED), PROMPT, limit=4)
    assert longest_path(tree) == [50, 51, 52, 53]


def test_behind_a_deviation_the_rest_of_a_prediction_is_guessed():
    tokens = [*PROMPT]
    follower = NgramFollower(tokens, len(PROMPT), PREDICTED)
    for output, guessed in (([50], [51, 52]), ([9], []), ([52], []), ([53], [54, 55])):
        tokens += output
        tree, _ = grown(follower, tokens, limit=2)
        assert longest_path(tree) == guessed


def test_a_prediction_and_the_text_itself_share_the_vote():
    tokens = [60, 61, 62, 7, 60, 61]
    tree, _ = grown(NgramFollower(tokens, 4, [60, 61, 80]), tokens)
    assert seen(tree).children.keys() == {62, 80}


def test_places_that_disagree_share_the_vote_and_the_longer_match_weighs_more():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    tree, _ = grown(NgramFollower(tokens), tokens)
    children = seen(tree).children
    assert children[50].survival > children[60].survival > 0
    assert sum(child.guesses[NGRAM] for child in children.values()) < 1


def test_a_longer_match_is_surer():
    short, long = [1, 2, 9, 7, 1, 2], [5, 6, 1, 2, 9, 7, 5, 6, 1, 2]
    sure = [grown(NgramFollower(tokens), tokens, limit=1)[1][0] for tokens in (short, long)]
    assert sure[0] < sure[1]


def test_guesses_below_the_least_survival_are_not_added():
    tokens = [1, 2, 9, 7, 1, 2]
    everything, _ = grown(NgramFollower(tokens), tokens)
    some, survivals = grown(NgramFollower(tokens), tokens, least=0.4)
    assert 0 < some.num_nodes < everything.num_nodes
    assert min(survivals) >= 0.4


def test_tokens_committed_later_are_read_too():
    tokens = [1, 2, 3]
    follower = NgramFollower(tokens)
    assert grown(follower, tokens)[1] == []
    tokens += [4, 1, 2]
    tree, _ = grown(follower, tokens, limit=2)
    assert longest_path(tree) == [3, 4]


@given(TOKENS)
def test_every_guess_really_followed_these_tokens_somewhere(tokens):
    tree, _ = grown(NgramFollower(tokens), tokens, limit=16, least=0.0)
    text = "," + ",".join(map(str, tokens)) + ","
    for node in nodes_of(tree):
        assert "," + ",".join(map(str, tokens[-LEAST_MATCH:] + node.path())) + "," in text


@given(TOKENS, st.integers(0, 6))
def test_a_limit_cuts_off_what_is_worth_least(tokens, limit):
    _, everything = grown(NgramFollower(tokens), tokens, limit=1000, least=0.0)
    _, some = grown(NgramFollower(tokens), tokens, limit=limit, least=0.0)
    assert some == everything[:limit]


@given(TOKENS)
def test_of_equal_tokens_only_the_latest_places_are_kept(tokens):
    follower = NgramFollower(tokens)
    follower.find()
    places = follower.voters
    assert len(places) <= MOST_PLACES
    same = [end for end in range(LEAST_MATCH, len(tokens)) if tokens[:end][-LEAST_MATCH:] == tokens[-LEAST_MATCH:]]
    assert [voter.at for voter in places] == same[-MOST_PLACES:]
