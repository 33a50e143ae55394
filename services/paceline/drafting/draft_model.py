"""Method `draft_model`: a small language model grows the trees of many sessions in shared batches.

Every step applies what was committed, expands the most promising nodes of all sessions in one forward pass, and
pushes the new nodes. It never waits for a verdict: while the verifier checks one path, the tree grows where survival
is highest. All state here is soft and can be rebuilt from committed tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.errors import LocalProtocolError, RemoteProtocolError
from paceline.core.messages import (
    CloseSession,
    Commit,
    CommittedStates,
    DraftNodes,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.processors import UnusableLogitsError
from paceline.core.tree import Node, Pruning
from paceline.drafting.drafted_session import DraftedSession
from paceline.drafting.features import Features
from paceline.engine.budget import draft_scratch_blocks
from paceline.engine.decoder import Decoder
from paceline.engine.packing import BatchBuilder

logger = logging.getLogger(__name__)

# Only sessions without a commit for so long give up their pages to others; younger ones would take them back at once.
QUIET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSaid:
    """Messages that came over one verifier's stream."""

    link: int
    messages: Sequence[ToDrafter]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierLeft:
    """A verifier's stream ended; its sessions end here with it."""

    link: int


DraftEvent = VerifierSaid | VerifierLeft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Bounds of the engine.

    Attributes:
        width: Children a node gets at most; 1 grows chains.
        max_rows: Most tree nodes expanded in one step.
        max_rows_per_session: Most of these for one session; the next step knows better where to go on.
        max_num_batched_tokens: Most rows of a step, catching up included.
        max_num_seqs: Most sessions; more are left to decode without drafts.
    """

    width: int = 8
    max_rows: int = 16
    max_rows_per_session: int = 4
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 256


@dataclass(slots=True)
class DraftReport:
    """What one step did, for metrics."""

    seconds: float = 0.0
    num_rows: int = 0
    num_nodes: int = 0
    num_sessions: int = 0
    lag_tokens: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """What one step has to say to the verifiers."""

    to_verifiers: dict[int, list[ToVerifier]]
    broken_links: dict[int, RemoteProtocolError]
    report: DraftReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expansion:
    """A node whose children this step computes, and where its logits are."""

    session: DraftedSession
    node: Node
    logit_index: int


class DraftEngine:
    """Grows draft trees with a small model; see the module docstring.

    Args:
        decoder: The draft model.
        identity: What it calls itself.
        num_blocks: Pages of committed KV; a quarter as many are added for tree nodes.
        limits: Bounds.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        identity: ModelIdentity,
        num_blocks: int,
        limits: DraftLimits,
        clock: Callable[[], float],
    ) -> None:
        scratch_blocks = draft_scratch_blocks(num_blocks)
        self.pool = BlockPool(num_blocks)
        self._decoder = decoder
        self._identity = identity
        self._limits = limits
        self._clock = clock
        self._cache = decoder.new_cache(num_blocks + scratch_blocks)
        self._scratch = SlotPool(first_block=num_blocks, num_blocks=scratch_blocks)
        self._sessions: dict[tuple[int, str], DraftedSession] = {}
        # Sessions that cannot be drafted for; they are left alone until they are closed or opened anew.
        self._refused: set[tuple[int, str]] = set()
        self._outgoing: dict[int, list[ToVerifier]] = {}
        self._broken: dict[int, RemoteProtocolError] = {}
        self._report = DraftReport()
        self._num_reported = 0

    @property
    def num_sessions(self) -> int:
        """Sessions of all verifiers."""
        return len(self._sessions)

    def handle(self, event: DraftEvent) -> None:
        """Takes in one event; a verifier that breaks the protocol loses its stream, nobody else's."""
        match event:
            case VerifierLeft():
                self._drop_link(event.link)
            case VerifierSaid():
                try:
                    for message in event.messages:
                        self._receive(event.link, message)
                except RemoteProtocolError as error:
                    self._broken[event.link] = error
                    self._drop_link(event.link)

    def _drop_link(self, link: int) -> None:
        for key in [key for key in self._sessions if key[0] == link]:
            self._close(key)
        self._refused = {key for key in self._refused if key[0] != link}
        self._outgoing.pop(link, None)

    def _close(self, key: tuple[int, str]) -> None:
        """Frees a session; those that waited for its place may try again."""
        self._sessions.pop(key).close()
        for session in self._sessions.values():
            session.parked = session.lost_features

    def _refuse(self, key: tuple[int, str]) -> None:
        if key in self._sessions:
            self._close(key)
        self._refused.add(key)

    def _receive(self, link: int, message: ToDrafter) -> None:
        key = (link, message.session_id)
        known = self._sessions.get(key)
        match message:
            case OpenSession():
                self._open(key, known, message)
            case CloseSession():
                self._refused.discard(key)
                if known is not None and message.epoch >= known.mirror.epoch:
                    self._close(key)
            case CommittedStates():
                if known is not None:
                    known.receive_states(message)
            case Commit() if key in self._refused:
                pass
            case Commit() if known is None:
                if self.num_sessions < self._limits.max_num_seqs:
                    self._say(link, LaggingSession(session_id=message.session_id, epoch=message.epoch, have_len=0))
            case Commit():
                self._commit(key, known, message)

    def _open(self, key: tuple[int, str], known: DraftedSession | None, message: OpenSession) -> None:
        if known is not None and message.epoch < known.mirror.epoch:
            return
        if known is not None:
            self._close(key)
        self._refused.discard(key)
        if self.num_sessions >= self._limits.max_num_seqs:
            return
        if not self._speaks(message.token_ids):
            self._refuse(key)
            return
        try:
            width = self._decoder.feature_width
            session = DraftedSession(message, self._identity, self.pool, self._scratch, width)
        except LocalProtocolError:
            # A padded vocabulary of the target may be larger than ours, and its parameters name ids we lack.
            self._refuse(key)
            return
        session.touched_s = self._clock()
        self._sessions[key] = session

    def _speaks(self, token_ids: Sequence[int]) -> bool:
        return max(token_ids, default=0) < self._identity.vocab_size

    def _commit(self, key: tuple[int, str], session: DraftedSession | None, message: Commit) -> None:
        assert session is not None, "the caller looked it up"
        if not self._speaks(message.token_ids):
            self._refuse(key)
            return
        if session.lost_features:
            self._ask_again(key, session, message)
            return
        session.touched_s = self._clock()
        session.parked = False
        match session.receive(message, self._cache):
            case LaggingSession() as lagging:
                self._say(key[0], lagging)
            case Pruning(hit=True):
                released = session.mirror.drain()
                if released is not None:
                    self._say(key[0], released)

    def _ask_again(self, key: tuple[int, str], session: DraftedSession, message: Commit) -> None:
        """Only the verifier has the features of what was given up; it is not asked for them while there is no place."""
        needed = len(session.mirror.tokens) // BLOCK_SIZE + 1
        if not session.given_up and self.pool.num_used + needed <= self.pool.num_blocks:
            self._close(key)
            self._say(key[0], LaggingSession(session_id=message.session_id, epoch=message.epoch, have_len=0))

    def _say(self, link: int, message: ToVerifier) -> None:
        self._outgoing.setdefault(link, []).append(message)

    def has_work(self) -> bool:
        """True while a session lags or has a node worth expanding, or something is left to say or to report."""
        if self._outgoing or self._broken or len(self._sessions) != self._num_reported:
            return True
        can_grow = self._scratch.num_free > 0
        context_len = self._identity.context_len
        return any(
            session.mirror.has_unsent or session.wants_step(context_len, can_grow)
            for session in self._sessions.values()
        )

    def patience_s(self) -> float:
        """A drafter never waits."""
        return 0.0

    def begin(self) -> None:
        """What is to be said first has a step of its own."""

    def step(self) -> DraftOutput:
        """Catches up with commits, expands the best nodes of all sessions, and collects the new nodes."""
        started_s = self._clock()
        self._report.lag_tokens = self._lag_tokens()
        builder = BatchBuilder()
        # What a commit asked for goes out first: a verifier may be waiting for it.
        expansions = [] if self._outgoing else self._plan_catching_up(builder) + self._plan_growth(builder)
        if builder.num_rows:
            logits = self._decoder.forward(builder.build(), self._cache).cpu().numpy()
            for each in expansions:
                self._expand(each, logits[each.logit_index])
        can_grow = self._scratch.num_free > 0
        for (link, _), session in self._sessions.items():
            session.settle()
            message = session.push(self._identity.context_len, can_grow)
            if message is not None:
                self._say(link, message)
        return self._output(started_s, builder.num_rows)

    def _plan_catching_up(self, builder: BatchBuilder) -> list[_Expansion]:
        expansions: list[_Expansion] = []
        started: list[DraftedSession] = []
        for session in self._sessions.values():
            room = self._limits.max_num_batched_tokens - builder.num_rows
            if not session.lags(self._identity.context_len) or room <= 0 or not self._reserve(session, started):
                continue
            started.append(session)
            start = session.pages.num_computed
            stop = min(start + room, session.computable_to)
            if stop <= start:
                continue
            wanted = stop == len(session.pages.tokens) and session.wants_drafts(self._identity.context_len)
            logit_index = builder.add_prefix(
                session.pages, start, stop, wants_logits=wanted, features=session.prefix_features(start, stop)
            )
            session.computed_to = stop
            if logit_index is not None:
                root = session.mirror.tree.root
                expansions.append(_Expansion(session=session, node=root, logit_index=logit_index))
        return expansions

    def _reserve(self, session: DraftedSession, started: Sequence[DraftedSession]) -> bool:
        """Pages for all its tokens, taken from sessions that have been quiet for a while if need be.

        A session that finds no place is parked until its next commit, or until another one ends.
        """
        while not session.take_pages():
            quiet = [
                each
                for each in self._sessions.values()
                if each.pages.blocks and each is not session and each not in started
                and self._clock() - each.touched_s > QUIET_S
            ]  # fmt: skip
            if not quiet or not session.fits(self.pool.num_blocks):
                session.forget()
                return False
            min(quiet, key=lambda each: each.touched_s).forget()
        return True

    def _plan_growth(self, builder: BatchBuilder) -> list[_Expansion]:
        limits = self._limits
        candidates = [
            (session.mirror.tree.survival(node), session, node)
            for session in self._sessions.values()
            for node in session.frontier(self._identity.context_len, limits.max_rows_per_session)
        ]
        candidates.sort(key=lambda entry: -entry[0])
        expansions: list[_Expansion] = []
        chosen = candidates[: min(limits.max_rows, self._scratch.num_free)]
        features = self._features_of([(session, node) for _, session, node in chosen])
        for index, (_, session, node) in enumerate(chosen):
            slot = self._scratch.take()
            assert slot is not None, "so many are free"
            logit_index = builder.add_node(
                session.pages,
                token_id=node.token_id,
                position=node.position - session.first_position,
                slot=slot,
                ancestors=session.ancestor_slots(node),
                features=None if features is None else features[index : index + 1],
            )
            session.slots[node.node_id] = slot
            expansions.append(_Expansion(session=session, node=node, logit_index=logit_index))
        return expansions

    def _features_of(self, nodes: Sequence[tuple[DraftedSession, Node]]) -> Features | None:
        """What the rows of nodes take beside their tokens: the states of their parents [nodes, width]."""
        if not self._decoder.feature_width or not nodes:
            return None
        slots = torch.tensor([session.parent_slot(node) for session, node in nodes])
        states: Features = self._cache.states[slots.to(self._cache.device)].float().cpu().numpy()
        return states

    def _expand(self, each: _Expansion, row: np.ndarray) -> None:
        try:
            each.session.expand(each.node, row, self._limits.width)
        except UnusableLogitsError:
            logger.warning("the draft model gave nothing to choose from; the session goes on without drafts")
            each.session.forget()
            each.session.given_up = True

    def _output(self, started_s: float, num_rows: int) -> DraftOutput:
        report, self._report = self._report, DraftReport()
        report.seconds = self._clock() - started_s
        report.num_rows = num_rows
        report.num_sessions = self._num_reported = len(self._sessions)
        report.kv_usage = self.pool.num_used / self.pool.num_blocks
        report.prefix_queries, report.prefix_hits = self.pool.take_counts()
        outgoing, self._outgoing = self._outgoing, {}
        said = [message for messages in outgoing.values() for message in messages]
        report.num_nodes = sum(len(message.nodes) for message in said if isinstance(message, DraftNodes))
        broken, self._broken = self._broken, {}
        return DraftOutput(to_verifiers=outgoing, broken_links=broken, report=report)

    def _lag_tokens(self) -> int:
        """Committed tokens still to be computed, of the session with most; what cannot be computed is not counted."""
        lagging = [each.pages.num_missing for each in self._sessions.values() if each.lags(self._identity.context_len)]
        return max(lagging, default=0)
