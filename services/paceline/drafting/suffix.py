"""Methods `ngram` and `suffix`: what followed when the text last read like this.

No model, no extra forward pass: the last tokens of a session are looked up among earlier ones, and the tokens that
followed there are grown as a tree in which every place found has a vote. `ngram` looks at the session's own prompt and
output (prompt lookup decoding); `suffix` at recent outputs of all sessions of the same cache salt too (SuffixDecoding,
2411.04975). Nothing is done when nothing matches, and memory is bounded by the sessions' own tokens and by
`RecentTexts`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from typing_extensions import override

from paceline.core.params import SUFFIX
from paceline.drafting.growing import grow_best_first
from paceline.engine.source_interface import Followed, Follower, LocalSource, Turn

# Tokens that must agree for a place to count, and those beyond which agreement means no more.
LEAST_MATCH = 2
MOST_MATCH = 32
# Places kept of the same tokens, the latest ones.
MOST_PLACES = 4
# Tokens of a prompt that are read, its last ones, and of finished outputs that are kept for other sessions.
READ_TOKENS = 8192
RECENT_TOKENS = 65_536

# A text, and the index at which the tokens looked up have ended in it.
Place = tuple[Sequence[int], int]


class SuffixIndex:
    """Places in texts by the tokens before them."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def add(self, text: Sequence[int], start: int) -> int:
        """Takes in the places of a text from index `start` on.

        Returns:
            Where to go on when the text has grown.
        """
        for end in range(max(start, LEAST_MATCH), len(text)):
            places = self._places.setdefault(tuple(text[end - LEAST_MATCH : end]), [])
            places.append((text, end))
            if len(places) > MOST_PLACES:
                del places[0]
        return max(start, LEAST_MATCH, len(text))

    def remove(self, text: Sequence[int]) -> None:
        """Forgets all places of a text."""
        for end in range(LEAST_MATCH, len(text)):
            key = tuple(text[end - LEAST_MATCH : end])
            rest = [place for place in self._places.get(key, ()) if place[0] is not text]
            if rest:
                self._places[key] = rest
            else:
                self._places.pop(key, None)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no place."""
        return not self._places

    def find(self, tokens: Sequence[int]) -> Sequence[Place]:
        """Places after the same last tokens."""
        return self._places.get(tuple(tokens[-LEAST_MATCH:]), ())


class RecentTexts:
    """Outputs of sessions that have ended, the latest ones; shared by the sessions of a verifier that have one salt.

    Args:
        most_tokens: Bound on the tokens of all salts; 0 keeps none.
    """

    def __init__(self, most_tokens: int = RECENT_TOKENS) -> None:
        self._indexes: dict[str, SuffixIndex] = {}
        self._most_tokens = most_tokens
        self._texts: deque[tuple[str, Sequence[int]]] = deque()
        self._num_tokens = 0

    def keep(self, output: Sequence[int], salt: str = "") -> None:
        """Takes in the output of a session that ended."""
        text = tuple(output[-self._most_tokens :]) if self._most_tokens else ()
        if len(text) <= LEAST_MATCH:
            return
        self._indexes.setdefault(salt, SuffixIndex()).add(text, 0)
        self._texts.append((salt, text))
        self._num_tokens += len(text)
        while self._num_tokens > self._most_tokens:
            self._forget_oldest()

    def find(self, tokens: Sequence[int], salt: str = "") -> Sequence[Place]:
        """Places after the same last tokens, in outputs of the same salt."""
        index = self._indexes.get(salt)
        return () if index is None else index.find(tokens)

    def _forget_oldest(self) -> None:
        salt, oldest = self._texts.popleft()
        self._num_tokens -= len(oldest)
        index = self._indexes[salt]
        index.remove(oldest)
        if index.is_empty:
            del self._indexes[salt]


class Voter:
    """A place in a text, whose next token is a vote.

    Args:
        text: Where it was found.
        at: Index of the next token.
        match: Tokens before it that agree with the session's.
    """

    __slots__ = ("at", "match", "text")

    def __init__(self, text: Sequence[int], at: int, match: int) -> None:
        self.text = text
        self.at = at
        self.match = match


class TextSource(LocalSource["TextFollower"]):
    """Guesses what followed the same tokens before.

    Args:
        name: `ngram` or `suffix`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._recent = RecentTexts(RECENT_TOKENS if name == SUFFIX else 0)

    @override
    def follow(self, session: Followed) -> TextFollower:
        return TextFollower(session.tokens, session.prompt_len, self._recent, session.cache_salt)

    @override
    def grow(self, turns: Sequence[Turn[TextFollower]]) -> list[list[float]]:
        return [
            grow_best_first(turn.tree, self.name, turn.follower.find(), ballot, limit=turn.limit, least=turn.least)
            for turn in turns
        ]


class TextFollower(Follower):
    """The source at work on one session.

    Args:
        tokens: The session's committed tokens; read as they grow.
        prompt_len: How many of them are prompt.
        recent: Outputs of other sessions.
        salt: Of those among them that it may read.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int, recent: RecentTexts, salt: str = "") -> None:
        self._salt = salt
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._own = SuffixIndex()
        self._recent = recent
        self._read_to = max(0, len(tokens) - READ_TOKENS)

    @override
    def close(self) -> None:
        self._recent.keep(self._tokens[self._prompt_len :], self._salt)

    def find(self) -> list[Voter]:
        """Places that read like the end of the committed tokens."""
        self._read_to = self._own.add(self._tokens, self._read_to)
        places = (*self._own.find(self._tokens), *self._recent.find(self._tokens, self._salt))
        return [Voter(text, end, _common(self._tokens, text, end)) for text, end in places]


def ballot(voters: Sequence[Voter]) -> Iterator[tuple[int, float, list[Voter]]]:
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


def _common(tokens: Sequence[int], text: Sequence[int], end: int) -> int:
    """Tokens before `end` of the text that equal the last ones."""
    most = min(MOST_MATCH, len(tokens), end)
    match = LEAST_MATCH
    while match < most and tokens[-match - 1] == text[end - match - 1]:
        match += 1
    return match
