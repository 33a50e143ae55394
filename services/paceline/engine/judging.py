"""Judges a step's guesses: the target's tokens, down each session's tree.

Sessions that choose by logits alone are followed where the logits are. Rows of others are changed first, or judged by
what guesses were drawn from: level by level, so that a row is changed only once a session's tokens have led to it. (A
grammar's mask costs as much as a row of a small model, and a session verifies four times as many rows as it walks.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from paceline.core.acceptance import SparseDraft
from paceline.core.messages import StepCommit, TokenOrigin
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.model import Pending
from paceline.engine.pending import Longs, VerifyRequest, choices_of
from paceline.engine.planned_step import Part, StepPlan
from paceline.engine.sampler import Logits, working_space
from paceline.engine.target_session import TargetSession
from paceline.forest import NONE, ROOT, Floats, Guesses

# Rows of logits that log probabilities are read from at a time: at 150,000 ids those of a whole step are 300 MB.
READ_ROWS = 32
_ACCEPTED, _RECOVERED, _BONUS, _PLAIN = (bytes([each]) for each in TokenOrigin)
_NOT_DRAWN = SparseDraft(token_ids=(), weights=())
_BY_NOISE = (np.nan, np.nan)


class Verification:
    """A step's rows of last committed tokens, and of guesses below them.

    Args:
        firsts: Row of the last committed token of each plan part; its guesses' rows follow.

    Attributes:
        parts: The plan's parts, including those of sessions that have left since.
        walks: Guesses of the sessions that choose by logits alone.
    """

    def __init__(self, plan: StepPlan, firsts: Sequence[int]) -> None:
        self.parts, self._plan, self.firsts = plan.parts, plan, firsts
        committing = [place for place, part in enumerate(self.parts) if part.commits]
        self._plain = [place for place in committing if self.parts[place].session.by_logits]
        self._others = [place for place in committing if not self.parts[place].session.by_logits]
        self.walks = self._walks_of([self.parts[place] for place in self._plain])
        # By place in the plan's parts: accepted guesses and one token of the target's own, and whether guesses were in
        # its place; or why there are none.
        self._chosen: dict[int, tuple[list[int], bool]] = {}
        self._failed: dict[int, Exception] = {}
        # Of chains: see `StepCommit`.
        self._chances: dict[int, list[float]] = {}
        # Logits that log probabilities are read from, of a few sessions at a time.
        self._read: dict[int, Logits] = {}

    def _walks_of(self, parts: Sequence[Part]) -> VerifyRequest:
        sizes = np.array([part.num_guesses for part in self.parts], np.int64)
        stops = np.cumsum(sizes)
        return VerifyRequest(
            rows=np.array(self.firsts, np.int64)[self._plain],
            positions=np.array([part.stop for part in parts], np.int64),
            choices=choices_of([part.session.choice for part in parts]),
            starts=(stops - sizes)[self._plain],
            stops=stops[self._plain],
            tokens=self._plan.guesses.tokens,
            parents=self._plan.guesses.parents,
            others=np.array([row for place in self._others for row in self._rows_of(place)], np.int64),
        )

    def _rows_of(self, place: int) -> range:
        first = self.firsts[place]
        return range(first, first + 1 + self.parts[place].num_guesses)

    def follow(self, pending: Pending) -> None:
        """Chooses the tokens of all sessions."""
        self._pending = pending
        self._follow_walks()
        self._descend()

    def commit(self, place: int, into: StepCommit) -> None:
        """Adds the tokens that a plan part's session commits; raises why it cannot."""
        if place in self._failed:
            raise self._failed[place]
        part, (chosen, has_rivals) = self.parts[place], self._chosen[place]
        session = part.session
        kept = session.accept(chosen)
        if session.request.sampling.logprobs is not None:
            session.read_logprobs(kept, self._read_at(place)[: len(kept)])
        origins = _ACCEPTED * (len(chosen) - 1) + _origin(part.num_guesses, has_rivals)
        into.add(session.number, session.num_generated, kept, origins[: len(kept)], self._chances.get(place))

    def _follow_walks(self) -> None:
        walked = self._pending.follow(self.walks)
        tokens = walked.tokens.tolist()
        columns = (self.walks.rows.tolist(), walked.counts.tolist(), walked.rivals.tolist())
        for place, row, count, has_rivals in zip(self._plain, *columns, strict=True):
            if count:
                self._chosen[place] = tokens[row : row + count], has_rivals
            else:
                self._failed[place] = self._why_nothing(place)

    def _why_nothing(self, place: int) -> Exception:
        """Why a session's row has no token to choose, or why that is unknown."""
        try:
            return _unusable(self.parts[place].session, self._pending.logits(self._rows_of(place)))
        except Exception as error:  # noqa: BLE001 - what one session lacks must not end the others
            return error

    def _descend(self) -> None:
        descents = {place: self._descent(place) for place in self._others}
        going = [*descents.values()]
        while going:
            rows = self._pending.logits([each.row for each in going])
            ready = np.array([each.change(row) for each, row in zip(going, rows, strict=True)], np.bool_)
            if not ready.all():
                going, rows = [each for each in going if each.error is None], rows[ready]
            chosen, chances = _choose(rows, going)
            for each, row, token_id, chance in zip(going, rows, chosen.tolist(), chances.tolist(), strict=True):
                each.take(token_id, chance, row)
            going = [each for each in going if each.goes_on]
        for place, each in descents.items():
            if each.error is not None:
                self._failed[place] = each.error
                continue
            self._chosen[place] = each.path, each.has_rivals
            if each.session.tree.chain:
                self._chances[place] = each.chances

    def _descent(self, place: int) -> _TreeWalk:
        return _TreeWalk(self.parts[place].session, self._plan.guesses_of(place), self.firsts[place])

    def _read_at(self, place: int) -> Logits:
        """The rows, as the model gave them, that a session's tokens were chosen from; some more come with them."""
        if place not in self._read:
            wanted, left = dict[int, list[int]](), READ_ROWS
            for each, (token_ids, _) in sorted(self._chosen.items()):
                if each >= place and self.parts[each].session.request.sampling.logprobs is not None:
                    left -= len(token_ids)
                    if wanted and left < 0:
                        break
                    wanted[each] = self._rows_down(each, token_ids)
            logits = self._pending.logits([*chain.from_iterable(wanted.values())])
            self._read = dict(zip(wanted, np.split(logits, np.cumsum([*map(len, wanted.values())])), strict=False))
        return self._read[place]

    def _rows_down(self, place: int, token_ids: Sequence[int]) -> list[int]:
        """The rows that a session's tokens were chosen from."""
        descent = self._descent(place)
        rows = [descent.row]
        for token_id in token_ids[:-1]:
            descent.step(token_id)
            rows.append(descent.row)
        return rows


class _TreeWalk:
    """A session's way down its guesses.

    Args:
        first: The row of its last committed token.

    Attributes:
        path: Tokens chosen so far.
        has_rivals: Whether there were guesses in the last one's place.
        chances: As of `StepCommit`, of its first tokens.
        goes_on: Whether the last token was guessed.
        error: Why it cannot go on.
    """

    def __init__(self, session: TargetSession, guesses: Guesses, first: int) -> None:
        self.session = session
        self.goes_on = True
        self.error: Exception | None = None
        self._tokens, self._parents = guesses.tokens.tolist(), guesses.parents.tolist()
        self._first, self._at = first, ROOT
        self.path: list[int] = []
        self.has_rivals = False
        self.chances: list[float] = []

    @property
    def row(self) -> int:
        return self._first + 1 + self._at

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.session.committed_len + len(self.path)

    @property
    def drawn_from(self) -> SparseDraft:
        """Distribution that a guess of the next token was drawn from, verified or not; nothing under other rules."""
        return self.session.tree.drafts.get(self.position, _NOT_DRAWN)

    @property
    def guess(self) -> int:
        """The next token of a chain; NOTHING: none is verified."""
        return next((token for token, _ in self._below()), step_kernels.NOTHING)

    @property
    def uniforms(self) -> tuple[float, float]:
        """As of `step_kernels.choose`."""
        return self.session.uniforms_at(self.position) if self.session.tree.chain else _BY_NOISE

    def change(self, row: Logits) -> bool:
        """Changes the next row as the request asks; False: that has failed."""
        try:
            self.session.change(row, self.path)
        except Exception as error:  # noqa: BLE001 - what one request asks for must not end the others
            self.error = error
        return self.error is None

    def take(self, token_id: int, chance: float, row: Logits) -> None:
        """Goes on by a token, chosen from a row."""
        if token_id == step_kernels.NOTHING:
            self.error, self.goes_on = _unusable(self.session, row[None]), False
            return
        if self.drawn_from is not _NOT_DRAWN:
            self.chances.append(chance)
        self.step(token_id)

    def step(self, token_id: int) -> None:
        below = self._below()
        self.path.append(token_id)
        self.has_rivals = bool(below)
        self._at = next((place for token, place in below if token == token_id), NONE)
        self.goes_on = self._at != NONE

    def _below(self) -> list[tuple[int, int]]:
        """Tokens and places of the guesses below where it stands."""
        return [
            (token, place)
            for place, (token, parent) in enumerate(zip(self._tokens, self._parents, strict=True))
            if parent == self._at
        ]


def _choose(rows: Logits, descents: Sequence[_TreeWalk]) -> tuple[Longs, Floats]:
    """The next token of each session, and the chance of a guess of it where that is known."""
    drawn = [each.drawn_from for each in descents]
    chosen, chances = np.empty(len(descents), np.int64), np.zeros(len(descents))
    chains, vocab_size = any(each.session.tree.chain for each in descents), rows.shape[1]
    step_kernels.choose(
        rows,
        np.array([each.position for each in descents], np.int64),
        choices_of([each.session.choice for each in descents]),
        np.array([each.guess for each in descents], np.int64),
        np.array([each.uniforms for each in descents], np.float64).reshape(-1, 2),
        np.cumsum([len(each.token_ids) for each in drawn], dtype=np.int64),
        np.array([token for each in drawn for token in each.token_ids], np.int64),
        np.array([weight for each in drawn for weight in each.weights], np.float64),
        working_space(vocab_size),
        np.empty(vocab_size if chains else 0),
        chosen,
        chances,
    )
    return chosen, chances


def _origin(num_guesses: int, has_rivals: bool) -> bytes:
    """How a token of the target's own came about."""
    if not num_guesses:
        return _PLAIN
    return _RECOVERED if has_rivals else _BONUS


def _unusable(session: TargetSession, rows: Logits) -> Exception:
    """Says why there is nothing to choose at one of these rows."""
    for largest in rows.max(axis=1).tolist():
        try:
            session.require_usable(largest)
        except Exception as error:  # noqa: BLE001
            return error
    raise AssertionError("a token can be chosen at all of these rows")
