"""The verifier's end of a session as a state machine: messages in, messages out.

It is the authority on committed tokens, and knows no sockets, clocks or models. Every message names its session by a
number that is never used again, and how many committed tokens its sender knew; nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.core.errors import LocalProtocolError, RemoteProtocolError
from paceline.core.grammar import OutputGrammar
from paceline.core.messages import (
    Drafts,
    GenerateRequest,
    OpenSession,
    SpeculationRecord,
)
from paceline.core.params import COUPLED, METHODS, REJECTION
from paceline.core.tree import DraftTree
from paceline.forest import Committed, Forest, Ints, Merged, rows_of


@dataclass(slots=True)
class SpeculationTally:
    """Running counts behind a session's `SpeculationRecord`."""

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_hits: int = 0
    num_misses: int = 0
    batch_size_sum: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, *, num_draft_tokens: int, num_accepted: int, hit: bool, batch_size: int) -> None:
        """Takes in one step of the session; `num_accepted` as `num_accepted_of` gives it."""
        self.num_steps += 1
        self.batch_size_sum += batch_size
        if not num_draft_tokens:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        self.num_hits += hit
        self.num_misses += not hit
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1

    def record(self) -> SpeculationRecord:
        # By place: it is made for each session in each step.
        return SpeculationRecord(
            self.num_steps,
            self.num_spec_steps,
            self.num_draft_tokens,
            self.num_accepted,
            tuple(self.histogram),
            self.batch_size_sum / max(1, self.num_steps),
            self.num_hits,
            self.num_misses,
        )


def num_accepted_of(num_matched: int, token_ids: Sequence[int]) -> int:
    """Guesses that a step has accepted beside the one token that it commits in any case.

    A guess that ends the text takes the place of that token: nothing is committed after it.

    Args:
        num_matched: Verified guesses that were committed.
        token_ids: All that the step has committed, at least one.
    """
    return min(num_matched, len(token_ids) - 1)


class VerifierSession:
    """The authority's end: committed tokens, and the tree of guesses beyond them.

    Args:
        request: What to generate.
        forest: Where its tree is; None: in one of its own.
        calibrations: Numbers of those of the sources that draft for it; they learn from every commit. Others take
            effect with the next `open`.
        acceptance: Name of the rule that judges guesses.
        grammar: What its output follows, moved on by whoever chooses its tokens; None: none.

    Attributes:
        committed_len: Prompt and generated tokens.
    """

    def __init__(
        self,
        request: GenerateRequest,
        forest: Forest | None = None,
        calibrations: Mapping[str, int] | None = None,
        acceptance: str = COUPLED,
        grammar: OutputGrammar | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        self.acceptance = acceptance
        self.calibrations = calibrations or {}
        self.session_id = request.session_id
        self.epoch = request.epoch
        self.tokens = [*request.prompt_token_ids, *request.committed_token_ids]
        self.committed_len = len(self.tokens)
        self.prompt_len = len(request.prompt_token_ids)
        chain = acceptance == REJECTION
        # A chain is judged by the distribution its guesses were drawn from; dropping a guess unjudged would bias that.
        can_follow = None if grammar is None or chain else grammar.permits
        self.tree = DraftTree(
            Forest(METHODS) if forest is None else forest,
            self.tokens,
            self.calibrations,
            chain=chain,
            can_follow=can_follow,
        )
        self.tally = SpeculationTally()

    @property
    def num_generated(self) -> int:
        """Generated tokens, those of earlier owners included."""
        return self.committed_len - self.prompt_len

    def open(self, number: int, *, price: float, room: int) -> OpenSession:
        """Everything a drafter needs to start, or to start anew; the tree starts anew with it, as node ids do.

        Args:
            number: Its name in all other messages.
            price: Least survival worth drafting for; 1: the drafter idles.
            room: Nodes that it may have in the tree.
        """
        self.tree.open(self.tokens, self.calibrations)
        return OpenSession(
            session_id=self.session_id,
            epoch=self.epoch,
            number=number,
            token_ids=tuple(self.tokens),
            prompt_len=self.prompt_len,
            # Of no use to a drafter, and up to 128 KiB.
            sampling=replace(self.request.sampling, grammar=""),
            price=price,
            room=room,
            acceptance=self.acceptance,
            cache_salt=self.request.cache_salt,
            traceparent=self.request.traceparent,
        )

    def check(self, base_len: int, *, has_distributions: bool) -> None:
        """Checks what a drafter says of itself with its guesses.

        Args:
            base_len: Committed tokens that it knew.
            has_distributions: Whether each guess has one.

        Raises:
            RemoteProtocolError: The drafter claims to know tokens that were never committed, or leaves out the
                distributions where the acceptance rule needs them.
        """
        if self.tree.chain and not has_distributions:
            raise RemoteProtocolError(
                f"Drafts.distributions: session {self.session_id} is judged by the rule {self.acceptance}, and needs"
                " that of every guess"
            )
        if not 1 <= base_len <= len(self.tokens):
            raise RemoteProtocolError(
                f"Drafts.base_lens: {base_len} of session {self.session_id} is not within its {len(self.tokens)}"
                " committed tokens"
            )


def merge(
    forest: Forest, source: str, rows: Ints, drafts: Drafts, filtered: Mapping[int, DraftTree] | None = None
) -> Merged:
    """Adds a drafter's guesses that passed `VerifierSession.check` to the trees.

    Args:
        forest: Of the sessions.
        source: The drafter's method.
        rows: Theirs, in the order of the guesses.
        filtered: Trees that filter their guesses, by the places of their sessions in the rows.
    """
    filtered = filtered or {}
    firsts = [tree.num_nodes for tree in filtered.values()]
    merged = forest.merge(
        forest.number_of[source],
        rows,
        drafts.base_lens,
        drafts.ends,
        drafts.ids,
        drafts.parent_ids,
        drafts.tokens,
        drafts.confidences,
    )
    for first, (place, tree) in zip(firsts, filtered.items(), strict=True):
        start = int(drafts.ends[place - 1]) if place else 0
        num_masked = tree.filter_guesses(first, drafts, slice(start, int(drafts.ends[place])))
        merged.counts[place] += np.array((-num_masked, 0, num_masked), np.int32)
    return merged


class NewTokens(NamedTuple):
    """What a step commits to a session.

    Attributes:
        token_ids: At least one.
        chances: For each, the probability that the guess in its place was accepted, where the acceptance rule knows it;
            None: a guess matched or did not.
    """

    session: VerifierSession
    token_ids: Sequence[int]
    chances: Sequence[float] | None = None

    @property
    def all_chances(self) -> Sequence[float]:
        """One for each token, -1 where it is not known."""
        known = self.chances or ()
        return [*known, *[-1.0] * (len(self.token_ids) - len(known))]


def commit(forest: Forest, commits: Sequence[NewTokens]) -> Committed:
    """Appends newly committed tokens to sessions, scores guesses by them, and prunes the trees.

    Raises:
        LocalProtocolError: There is no token to commit.
    """
    if not all(each.token_ids for each in commits):
        raise LocalProtocolError("a commit holds at least one token")
    for each in commits:
        session = each.session
        session.tokens.extend(each.token_ids)
        session.committed_len += len(each.token_ids)
        if session.tree.filters_guesses:
            session.tree.follow_commit(session.committed_len)
    known = any(each.chances is not None for each in commits)
    return forest.commit(
        rows_of(each.session.tree.row for each in commits),
        np.cumsum([len(each.token_ids) for each in commits], dtype=np.int32),
        rows_of(token_id for each in commits for token_id in each.token_ids),
        np.array([chance for each in commits for chance in each.all_chances] if known else ()),
    )
