"""The two ends of a session as state machines: messages in, messages out.

The verifier's end is the authority on committed tokens; the drafter's end is soft state that can be rebuilt from them
at any time. Neither knows sockets, clocks or models. Every message carries `(session_id, epoch, base_len)`; older
epochs are dropped, and nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.calibration import Calibrations
from paceline.core.errors import LocalProtocolError, RemoteProtocolError
from paceline.core.grammar import OutputGrammar
from paceline.core.messages import (
    Commit,
    DraftNodes,
    GenerateRequest,
    LaggingSession,
    OpenSession,
    SpeculationRecord,
)
from paceline.core.params import CHAIN_RULES, COUPLED, DRAFT_MODEL
from paceline.core.tree import DraftTree, GraftOutcome, Node, Pruning


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

    def record(self, *, lossy: bool = False) -> SpeculationRecord:
        """The counts so far, of a session that a lossy rule had a part in or not."""
        return SpeculationRecord(
            num_steps=self.num_steps,
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted,
            acceptance_histogram=tuple(self.histogram),
            mean_batch_size=self.batch_size_sum / max(1, self.num_steps),
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            lossy=lossy,
        )


def num_accepted_of(matched: Sequence[Node], token_ids: Sequence[int]) -> int:
    """Guesses that a step has accepted beside the one token that it commits in any case.

    A guess that ends the text takes the place of that token: nothing is committed after it.

    Args:
        matched: The verified guesses that were committed.
        token_ids: All that the step has committed, at least one.
    """
    return min(len(matched), len(token_ids) - 1)


class VerifierSession:
    """The authority's end: committed tokens, and the tree of guesses beyond them.

    Args:
        request: What to generate.
        calibrations: Of the sources that draft for it; they learn from every commit. Others take effect with the
            next `open`.
        acceptance: Name of the rule that judges guesses.
        grammar: What its output follows, moved on by whoever chooses its tokens; None: none.
    """

    def __init__(
        self,
        request: GenerateRequest,
        calibrations: Calibrations | None = None,
        acceptance: str = COUPLED,
        grammar: OutputGrammar | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        self.acceptance = acceptance
        self.calibrations = Calibrations() if calibrations is None else calibrations
        self.session_id = request.session_id
        self.epoch = request.epoch
        self.tokens = [*request.prompt_token_ids, *request.committed_token_ids]
        self.prompt_len = len(request.prompt_token_ids)
        self.tree = self._new_tree()
        self.tally = SpeculationTally()

    @property
    def committed_len(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Generated tokens, those of earlier owners included."""
        return len(self.tokens) - self.prompt_len

    def open(self, *, price: float = 0.0, room: int = 0) -> OpenSession:
        """Everything a drafter needs to start, or to start anew; the tree starts anew with it, as node ids do.

        Args:
            price: Least survival worth drafting for; 1: the drafter idles.
            room: Nodes that it may have in the tree.
        """
        self.tree = self._new_tree()
        return OpenSession(
            session_id=self.session_id,
            epoch=self.epoch,
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

    def _new_tree(self) -> DraftTree:
        chain = self.acceptance in CHAIN_RULES
        # A chain is judged by the law its guesses were drawn from; dropping a guess unjudged would bias that.
        can_follow = None if self.grammar is None or chain else self.grammar.permits
        return DraftTree(len(self.tokens), self.calibrations.probability, chain=chain, can_follow=can_follow)

    def commit(self, token_ids: Sequence[int], chances: Sequence[float] | None = None) -> Pruning:
        """Appends newly committed tokens, scores the guesses by them, and prunes the tree.

        Args:
            token_ids: The tokens.
            chances: See `DraftTree.outcomes`.

        Raises:
            LocalProtocolError: There is no token to commit.
        """
        if not token_ids:
            raise LocalProtocolError("a commit holds at least one token")
        for source, confidence, matched in self.tree.outcomes(token_ids, chances):
            self.calibrations.observe(source, confidence, matched=matched)
        self.tokens.extend(token_ids)
        return self.tree.advance(token_ids)

    def commit_message(self, since_len: int, *, price: float = 0.0, room: int = 0) -> Commit:
        """All that was committed since a drafter's `since_len` tokens; price and room as in `open`."""
        return Commit(
            session_id=self.session_id,
            epoch=self.epoch,
            base_len=since_len,
            token_ids=tuple(self.tokens[since_len:]),
            price=price,
            room=room,
        )

    def receive(self, message: DraftNodes, source: str = DRAFT_MODEL) -> GraftOutcome:
        """Takes in a drafter's guesses; those of another epoch are dropped and counted as stale.

        Raises:
            RemoteProtocolError: The drafter claims to know tokens that were never committed, or leaves out the
                distribution of a guess where the acceptance rule needs it.
        """
        if message.epoch != self.epoch:
            return GraftOutcome(num_added=0, num_late=0, num_stale=len(message.nodes))
        if self.acceptance in CHAIN_RULES and any(node.draft is None for node in message.nodes):
            raise RemoteProtocolError(
                f"DraftNodes.drafts: session {self.session_id} is judged by the rule {self.acceptance}, and needs the"
                " distribution of every guess"
            )
        return self.tree.graft(message.nodes, message.base_len, self.tokens, source)


class DrafterSession:
    """The mirror's end: the committed tokens that it received; what it grows beyond them is in its forest."""

    def __init__(self, opened: OpenSession) -> None:
        if not opened.token_ids:
            raise RemoteProtocolError(f"session {opened.session_id} was opened without tokens")
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.tokens = list(opened.token_ids)
        self.prompt_len = opened.prompt_len
        self.sampling = opened.sampling
        self.chain = opened.acceptance in CHAIN_RULES
        self.price = opened.price
        self.room = opened.room

    def receive(self, commit: Commit) -> tuple[int, ...] | LaggingSession | None:
        """Applies a commit.

        Returns:
            Its tokens that are new; a `LaggingSession` to send back when tokens before it are missing; None when it
            brought nothing new (an old epoch, or a message received twice).

        Raises:
            RemoteProtocolError: It contradicts tokens that were committed before.
        """
        if commit.epoch < self.epoch:
            return None
        if commit.epoch > self.epoch:
            return LaggingSession(session_id=self.session_id, epoch=commit.epoch, have_len=0)
        have_len = len(self.tokens)
        if commit.base_len > have_len:
            return LaggingSession(session_id=self.session_id, epoch=self.epoch, have_len=have_len)
        known = self.tokens[commit.base_len : commit.base_len + len(commit.token_ids)]
        if tuple(known) != commit.token_ids[: len(known)]:
            raise RemoteProtocolError(
                f"session {self.session_id}: commit at {commit.base_len} contradicts earlier ones"
            )
        fresh = commit.token_ids[len(known) :]
        if not fresh:
            return None
        self.price, self.room = commit.price, commit.room
        self.tokens.extend(fresh)
        return fresh
