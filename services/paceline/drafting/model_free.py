"""Sources without a model: what followed when the session's text last read like this, and what its grammar forces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from paceline.core.grammar import OutputGrammar
from paceline.core.params import GRAMMAR, NGRAM
from paceline.core.prediction import PredictedText
from paceline.drafting.growing import grow_best_first
from paceline.engine.source_interface import Followed, LocalSource, Turn

# Tokens that must agree for a place to count, and those beyond which agreement means no more.
LEAST_MATCH = 2
MOST_MATCH = 32
# Places kept of the same tokens, the latest ones.
MOST_PLACES = 4
# Tokens of a prompt that are read, its last ones.
READ_TOKENS = 8192


class Voter(NamedTuple):
    """A place in a text, whose next token is a vote.

    Attributes:
        text: The session's own, or its prediction.
        at: Index of the next token.
        match: Tokens before it that agree with the session's last ones.
    """

    text: Sequence[int]
    at: int
    match: int


class NgramSource(LocalSource["NgramFollower"]):
    """Method `ngram` (prompt lookup decoding): guesses what followed the same tokens before.

    The last tokens of a session are looked up in its prompt and output, and in what its client predicts of the output.
    The tokens that followed there are grown as a tree in which every place found has a vote. Nothing is done when
    nothing matches.
    """

    name = NGRAM
    needs_device = False

    @override
    def follow(self, session: Followed) -> NgramFollower:
        return NgramFollower(session.tokens, *session.output)

    @override
    def may_guess(self, follower: NgramFollower) -> bool:
        follower.find()
        return bool(follower.voters)

    @override
    def grow(self, turns: Sequence[Turn[NgramFollower]]) -> None:
        for turn in turns:
            grow_best_first(turn, NGRAM, turn.follower.voters, turn.follower.ballot)


class NgramFollower:
    """The source at work on one session.

    Args:
        tokens: The session's committed tokens; read as they grow.
        output_at: Where in them the output begins.
        predicted: The client's prediction of the output; empty: none.

    Attributes:
        voters: Places that read like the end of the committed tokens, as `find` last found them.
    """

    def __init__(self, tokens: Sequence[int], output_at: int = 0, predicted: Sequence[int] = ()) -> None:
        self.voters: list[Voter] = []
        self._tokens = tokens
        self._predicted = PredictedText(predicted)
        self._output_at = output_at
        # Where the same tokens ended.
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._read_to = max(LEAST_MATCH, len(tokens) - READ_TOKENS)

    def find(self) -> None:
        """Looks for places that read like the end of the committed tokens."""
        tokens, known = self._tokens, self._places
        for end in range(self._read_to, len(tokens)):
            places = known.get(key := tuple(tokens[end - LEAST_MATCH : end]))
            if places is None:
                known[key] = [end]
                continue
            places.append(end)
            if len(places) > MOST_PLACES:
                del places[0]
        self._read_to = max(self._read_to, len(tokens))
        ends = known.get(tuple(tokens[-LEAST_MATCH:]), ())
        self.voters = [Voter(tokens, end, _common(tokens, end)) for end in ends]
        if self._predicted.token_ids:
            self.voters[:0] = self._foretold()

    def _foretold(self) -> list[Voter]:
        """The place in the prediction, if the output is there."""
        predicted = self._predicted
        predicted.take(self._tokens[self._output_at :])
        self._output_at = max(self._output_at, len(self._tokens))
        match = min(MOST_MATCH, predicted.num_agreed)
        return [] if predicted.at is None else [Voter(predicted.token_ids, predicted.at, match)]

    def ballot(self, voters: Sequence[Voter]) -> Iterator[tuple[int, float, list[Voter]]]:
        """The votes for the next token: `(token_id, confidence, its voters, moved on by one token)`.

        Votes weigh as much as their voters match; the longer the longest match, the surer the whole.
        """
        sides: dict[int, list[Voter]] = {}
        total = 0
        for voter in voters:
            if voter.at < len(voter.text):
                side = sides.setdefault(voter.text[voter.at], [])
                side.append(Voter(voter.text, voter.at + 1, voter.match + 1))
                total += voter.match
        for token_id, side in sides.items():
            longest = max(voter.match for voter in side)
            share = sum(voter.match - 1 for voter in side) / total
            yield token_id, share * (1.0 - 1.0 / longest), side


def _common(tokens: Sequence[int], end: int) -> int:
    """Tokens before `end` that equal the last ones."""
    most = min(MOST_MATCH, end)
    match = LEAST_MATCH
    while match < most and tokens[-match - 1] == tokens[end - match - 1]:
        match += 1
    return match


# Guesses of others below which it looks for more, the best ones.
MOST_LEAVES = 4


class GrammarSource(LocalSource[OutputGrammar]):
    """Method `grammar`: guesses what a session's grammar leaves no choice of.

    The scaffolding of JSON costs no steps even without a drafter. The text of such a guess is sure, its cut into tokens
    is not, as a model may spell the same text with other tokens: how often it is right, calibration learns.
    """

    name = GRAMMAR
    needs_device = False

    @override
    def follow(self, session: Followed) -> OutputGrammar | None:
        return session.grammar

    @override
    def grow(self, turns: Sequence[Turn[OutputGrammar]]) -> None:
        """Adds what is forced below the roots and below the best leaves."""
        for turn in turns:
            tree, grammar = turn.tree, turn.follower
            _add_chain(tree.root, grammar.forced(), turn)
            for leaf in tree.leaves(turn.limit)[:MOST_LEAVES]:
                _add_chain(leaf, grammar.forced(tree.path(leaf)), turn)


def _add_chain(node: int, token_ids: Sequence[int], turn: Turn[OutputGrammar]) -> None:
    """Adds a chain below a node, as far as it is worth it."""
    tree, survival = turn.tree, 1.0
    for token_id in token_ids[: turn.limit - len(tree.path(node))]:
        survival *= tree.probability(GRAMMAR, 1.0)
        if survival < turn.least:
            break
        node = tree.suggest(node, token_id, 1.0, GRAMMAR)
