"""The drafter's step as arithmetic: which sessions it keeps, which rows are computed, and what verifiers receive.

Every step applies what was committed, expands the most promising nodes of all sessions at once, and pushes the new
nodes. It never waits for a verdict: while a verifier checks one path, the tree grows where survival is highest. All
state here is soft and can be rebuilt from committed tokens. It runs no model and reads no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from paceline.core.errors import LocalProtocolError, RemoteProtocolError
from paceline.core.goodput import MovingAverage
from paceline.core.messages import (
    CloseSession,
    Commit,
    Commits,
    CommittedStates,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.step_time import PromptRows
from paceline.engine.draft_plan import MOST_FRESH, CatchingUp, DraftPlan, Starts
from paceline.engine.draft_session import DraftSession
from paceline.engine.drafted_trees import DraftedTrees, FreshTokens, Messages
from paceline.forest import Floats, Ints

# A verifier's stream, and the number of a session there.
Key = tuple[int, int]

# Only sessions without a commit for this time give up their pages to others; more active ones would take them back at
# once.
QUIET_S = 1.0
# Fewest nodes of all sessions at which a step may begin.
LEAST_ROWS = 16
# Before they are seen: seconds of a level of guesses, and such a level's share of the time between two commits.
FIRST_LEVEL_S, FIRST_COST = 0.001, 1 / 16
LEAST_COST = 1e-3
# Refused sessions that are remembered.
MOST_REFUSED = 4096
# Where several verifiers are served, one call takes at most this share of the time between two commits of one, but a
# level in any case. By the planner four verifiers of 8 streams each (70B on 4 H100, 1B on an H100) keep 0.98 of their
# speed with drafters of their own; with 0.25 they kept 0.94, and with more than that less.
SHARE_OF_OTHERS = 0.15
# Least rows of prompts that a step reads; steps with no more than a round commits show nothing of prompts.
LEAST_READ = 2 * MOST_FRESH


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierMessages:
    """Messages that came over one verifier's stream."""

    link: int
    messages: Sequence[ToDrafter]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierLeft:
    """A verifier's stream ended; its sessions end here with it."""

    link: int


DraftEvent = VerifierMessages | VerifierLeft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Bounds of a drafter.

    Attributes:
        width: Children a node gets at most; 1 grows chains.
        max_rows: Most tree nodes at which one step begins; 0: as many as there are sessions, and at least 16.
        max_rows_per_session: Most of these for one session; the next step chooses better.
        max_levels: Most levels of guesses that one step drafts below them.
        max_num_batched_tokens: Most rows of a step, catching up included.
        max_num_seqs: Most sessions; more are left to decode without drafts.
    """

    width: int = 8
    max_rows: int = 0
    max_rows_per_session: int = 4
    max_levels: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 256


class DraftPace:
    """Time per level of guesses and row of a prompt, and how often each verifier commits."""

    def __init__(self) -> None:
        self._level = MovingAverage(FIRST_LEVEL_S)
        # Seconds per row of a prompt; None: none was read yet.
        self._read: MovingAverage | None = None
        # By their streams: seconds between commits, and when the last one came.
        self._rounds: dict[int, MovingAverage] = {}
        self._committed_s: dict[int, float] = {}

    def took(self, seconds: float, num_levels: int) -> None:
        """Adds the time of a step."""
        self._level.add(seconds / num_levels)

    def read(self, rows: int, seconds: float) -> None:
        """Adds the time of a step that mostly read prompts."""
        self._read = self._read or MovingAverage(seconds / rows)
        self._read.add(seconds / rows)

    def active(self, now_s: float) -> set[int]:
        """Streams of verifiers that have committed lately."""
        return {link for link, at_s in self._committed_s.items() if now_s - at_s < QUIET_S}

    def most_levels(self, links: Collection[int]) -> int:
        """Levels in one call that the commits of these verifiers may wait for."""
        return max(1, int(SHARE_OF_OTHERS / self.costs([*links]).max(initial=LEAST_COST)))

    def most_read(self, links: Collection[int]) -> float:
        """Rows of prompts in one step that the commits of these verifiers may wait for."""
        if self._read is None:
            return math.inf
        shortest_s = min((self._rounds[link].value for link in links if link in self._rounds), default=math.inf)
        # A row's time has its part of the step's fixed time, which is about a level: prompts may double that at least,
        # or they would get fewer rows with every step.
        bound_s = max(SHARE_OF_OTHERS * shortest_s, 2.0 * self._level.value)
        return max(LEAST_READ, bound_s / max(self._read.value, 1e-9))

    def committed(self, link: int, now_s: float) -> None:
        """A verifier has committed; after a pause that says nothing of its rounds."""
        before_s = self._committed_s.get(link)
        self._committed_s[link] = now_s
        if before_s is not None and now_s - before_s < QUIET_S:
            self._rounds.setdefault(link, MovingAverage(now_s - before_s)).add(now_s - before_s)

    def forget(self, link: int) -> None:
        """A verifier has left."""
        self._rounds.pop(link, None)
        self._committed_s.pop(link, None)
        if not self._rounds:
            # The steps of a warm-up compile.
            self._level, self._read = MovingAverage(FIRST_LEVEL_S), None

    def costs(self, links: Sequence[int]) -> Floats:
        """Time of a level as a share of that between two commits of verifiers, float64 `[links]`."""
        rounds_s = [
            self._rounds[link].value if link in self._rounds else self._level.value / FIRST_COST for link in links
        ]
        shares: Floats = np.clip(self._level.value / np.maximum(rounds_s, 1e-9), LEAST_COST, 1.0)
        return shares


class DraftScheduler:
    """The sessions of all verifiers at one drafter; see the module docstring.

    Args:
        pool: Pages for committed tokens.
        scratch: Slots for tree nodes.
        identity: The draft model.
        feature_width: Width of the features that it takes; 0: it takes tokens alone.

    Attributes:
        trees: Trees of all sessions.
        moves: KV that is to be moved before the next step, from slot to slot.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        scratch: SlotPool,
        limits: DraftLimits,
        identity: ModelIdentity,
        feature_width: int = 0,
    ) -> None:
        self.pool = pool
        self.trees = DraftedTrees(scratch, identity.context_len)
        self.moves: list[tuple[int, int]] = []
        self._limits = limits
        self._identity, self._feature_width = identity, feature_width
        self._sessions: dict[Key, DraftSession] = {}
        # How many of these each verifier has.
        self._held = Counter[int]()
        # Sessions that cannot be drafted for; commits to them are dropped until they are closed or opened anew. The
        # last refused are at the end.
        self._refused: dict[Key, None] = {}
        self._outgoing: dict[int, list[ToVerifier]] = {}
        self._broken: dict[int, RemoteProtocolError] = {}
        self._fresh: list[FreshTokens] = []
        # Sessions that catch up in the step under way.
        self._computing: list[DraftSession] = []
        self._pace = DraftPace()
        self._prompt_rows = PromptRows()
        # By streams, when a prompt was last read.
        self._last_read: dict[int, float] = {}
        self._planned_s = 0.0

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def has_work(self) -> bool:
        """True while a session lags or has a node worth expanding, or messages are left to send."""
        return bool(self._outgoing or self._broken) or self.trees.has_work

    @property
    def lag_tokens(self) -> int:
        """Committed tokens still to be computed, of the session with most; what cannot be computed is not counted."""
        return max([each.pages.num_missing for each in self.trees.behind if each.lags], default=0)

    # Events

    def handle(self, event: DraftEvent, now_s: float) -> None:
        """Handles one event; a verifier that breaks the protocol loses its stream, and no other does."""
        match event:
            case VerifierLeft():
                self._drop_link(event.link)
            case VerifierMessages():
                if any(isinstance(message, Commits) for message in event.messages):
                    self._pace.committed(event.link, now_s)
                try:
                    for message in event.messages:
                        self._receive(event.link, message, now_s)
                except RemoteProtocolError as error:
                    self._broken[event.link] = error
                    self._drop_link(event.link)
                self._follow()

    def _drop_link(self, link: int) -> None:
        for key in [key for key in self._sessions if key[0] == link]:
            self._close(key)
        self._refused = {key: None for key in self._refused if key[0] != link}
        self._outgoing.pop(link, None)
        self._last_read.pop(link, None)
        self._pace.forget(link)

    def _close(self, key: Key) -> None:
        """Frees a session; those that waited for its place may try again."""
        self._follow()
        session = self._sessions.pop(key)
        self._held[key[0]] -= 1
        if not self._held[key[0]]:
            del self._held[key[0]]
        session.pages.release()
        self.trees.remove(session)
        for each in (behind := self.trees.behind):
            each.parked = each.lost_features
        self.trees.place(*behind)

    def _refuse(self, key: Key) -> None:
        if key in self._sessions:
            self._close(key)
        self._refused[key] = None
        if len(self._refused) > MOST_REFUSED:
            # A commit to it has it opened, and refused, once more.
            del self._refused[next(iter(self._refused))]

    def _receive(self, link: int, message: ToDrafter, now_s: float) -> None:
        if isinstance(message, Commits):
            self._commit_all(link, message, now_s)
            return
        key = (link, message.number)
        known = self._sessions.get(key)
        match message:
            case OpenSession():
                self._open(key, known, message, now_s)
            case CloseSession():
                self._refused.pop(key, None)
                if known is not None:
                    self._close(key)
            case CommittedStates():
                if known is not None:
                    known.receive_states(message)
                    self.trees.place(known)

    def _open(self, key: Key, known: DraftSession | None, message: OpenSession, now_s: float) -> None:
        if known is not None:
            self._close(key)
        self._refused.pop(key, None)
        if not self._make_place(key[0]):
            return
        if not self._can_draft(message.token_ids, len(message.token_ids)):
            self._refuse(key)
            return
        try:
            session = DraftSession(message, self._identity, self.pool, self._feature_width)
        except LocalProtocolError:
            # A padded vocabulary of the target may be larger than ours, and its parameters name ids we lack.
            self._refuse(key)
            return
        session.link, session.touched_s = key[0], now_s
        self._sessions[key] = session
        self._held[key[0]] += 1
        self.trees.add(session)

    def _make_place(self, link: int) -> bool:
        """Whether a verifier gets a place; up to an equal share it takes the newest one of the verifier with most."""
        if self.num_sessions < self._limits.max_num_seqs:
            return True
        [(largest, most)] = self._held.most_common(1)
        share = self._limits.max_num_seqs // len({*self._held, link})
        if self._held[link] >= min(share, most):
            return False
        self._close(next(key for key in reversed(self._sessions) if key[0] == largest))
        return True

    def _can_draft(self, token_ids: Sequence[int], length: int) -> bool:
        """Whether the draft model knows these tokens, and takes a text of that length with them."""
        identity = self._identity
        return length <= identity.context_len and max(token_ids, default=0) < identity.vocab_size

    def _commit_all(self, link: int, commits: Commits, now_s: float) -> None:
        """Takes in the commits of a verifier's step; nearly all sessions simply go on."""
        known = self._can_draft(tokens := commits.tokens.tolist(), 0)
        sessions, fresh, start = self._sessions, self._fresh, 0
        columns = commits.numbers, commits.base_lens, commits.ends, commits.prices, commits.rooms
        for number, base_len, end, price, room in zip(*(each.tolist() for each in columns), strict=True):
            session, token_ids = sessions.get((link, number)), tokens[start:end]
            if known and session is not None and session.goes_on(base_len, len(token_ids)):
                session.touched_s, session.price, session.room = now_s, price, room
                session.tokens += token_ids
                fresh.append((session, base_len, token_ids))
            else:
                self._commit((link, number), Commit(number, base_len, token_ids, price, room), now_s)
                fresh = self._fresh
            start = end

    def _commit(self, key: Key, commit: Commit, now_s: float) -> None:
        session = self._sessions.get(key)
        if session is None:
            if key not in self._refused and self._make_place(key[0]):
                self._queue(key[0], LaggingSession(number=commit.number, have_len=0))
            return
        if not self._can_draft(commit.token_ids, max(len(session.tokens), commit.base_len + len(commit.token_ids))):
            self._refuse(key)
            return
        if session.lost_features:
            self._ask_again(key, session)
            return
        session.touched_s = now_s
        session.parked = False
        base_len = len(session.tokens)
        outcome = session.receive(commit)
        if isinstance(outcome, LaggingSession):
            self._queue(key[0], outcome)
        elif outcome:
            self._fresh.append((session, base_len, outcome))
            return
        self.trees.place(session)

    def _follow(self) -> None:
        """Follows the commits that came, all at once."""
        fresh, self._fresh = self._fresh, []
        if fresh:
            moves, nodes = self.trees.commit(fresh)
            self.moves += moves
            self._send(nodes)

    def _send(self, messages: Messages) -> None:
        for link, message in messages:
            self._queue(link, message)

    def _ask_again(self, key: Key, session: DraftSession) -> None:
        """Asks the verifier for the features of what was given up, once there is room: only the verifier has them."""
        needed = len(session.tokens) // BLOCK_SIZE + 1
        if not session.given_up and self.pool.num_used + needed <= self.pool.num_blocks:
            self._close(key)
            self._queue(key[0], LaggingSession(number=session.number, have_len=0))

    def _queue(self, link: int, message: ToVerifier) -> None:
        self._outgoing.setdefault(link, []).append(message)

    # Stepping

    def plan(self, now_s: float) -> DraftPlan:
        """Plans the next step; nothing while messages wait that a verifier may be waiting for."""
        self._planned_s = now_s
        if self._outgoing:
            return DraftPlan()
        limits = self._limits
        lagging = [each for each in self.trees.behind if each.lags]
        links = self._pace.active(now_s) | {each.link for each in lagging}
        catching_up = self._plan_catching_up(lagging, links, now_s)
        most = limits.max_rows or max(LEAST_ROWS, self.num_sessions)
        growing = self.trees.plan(most=most, most_each=limits.max_rows_per_session)
        starts = Starts.at_roots([each.session for each in catching_up if each.expands]) + growing
        return DraftPlan(catching_up, growing, starts, self._plan_levels(starts, links))

    def _plan_levels(self, starts: Starts, links: Collection[int]) -> Ints:
        costs = self._pace.costs([session.link for session in starts.sessions])[starts.each]
        most = self._limits.max_levels
        if len(links) > 1:
            # Other verifiers' commits wait for the end of this one's drafts.
            most = min(most, self._pace.most_levels(links))
        return self.trees.plan_levels(starts, most=most, costs=costs)

    def _plan_catching_up(
        self, lagging: Sequence[DraftSession], links: Collection[int], now_s: float
    ) -> list[CatchingUp]:
        """Plans committed tokens to compute.

        Args:
            lagging: Sessions that lack some.
            links: Streams of the verifiers that are served now.
        """
        planned: list[tuple[DraftSession, int, int]] = []
        started: list[DraftSession] = []
        room = self._prompt_rows.most(self._limits.max_num_batched_tokens)
        if len(links) > 1:
            # Rounds of all sessions have room in any case.
            room = min(room, int(min(room, self._pace.most_read(links))) + num_fresh(lagging))
        for session in self._in_turn(lagging):
            if room <= 0 or not self._reserve(session, started, now_s):
                continue
            started.append(session)
            start = session.pages.num_computed
            stop = min(start + room, session.computable_to)
            if stop <= start:
                continue
            room -= stop - start
            if session.pages.num_missing > MOST_FRESH:
                self._last_read[session.link] = now_s
            session.computed_to = stop
            planned.append((session, start, stop))
        self._computing = started
        wanted = self.trees.wants_drafts([session for session, _, _ in planned])
        return [
            CatchingUp(session, start, stop, wants and stop == len(session.pages.tokens))
            for (session, start, stop), wants in zip(planned, wanted, strict=True)
        ]

    def _in_turn(self, sessions: Sequence[DraftSession]) -> list[DraftSession]:
        """Sessions that lack what a round commits, then prompts: by turns of verifiers, the shortest of each first.

        A prompt takes many steps, and a verifier may wait for the others.
        """
        behind = sorted(sessions, key=num_missing)
        count = bisect_right(behind, MOST_FRESH, key=num_missing)
        turns, prompts = Counter[int](), list[tuple[int, float, int]]()
        for place, session in enumerate(behind[count:], start=count):
            prompts.append((turns[session.link], self._last_read.get(session.link, -math.inf), place))
            turns[session.link] += 1
        return behind[:count] + [behind[place] for *_, place in sorted(prompts)]

    def _reserve(self, session: DraftSession, started: Sequence[DraftSession], now_s: float) -> bool:
        """Pages for all its tokens, taken from others if need be: quiet sessions, and verifiers beyond an equal share.

        A session that finds no place is parked until its next commit, or until another one ends.
        """
        while not session.take_pages():
            others = [
                each
                for each in self._sessions.values()
                if each.pages.blocks and each is not session and each not in started
            ]
            quiet = [each for each in others if now_s - each.touched_s > QUIET_S]
            giving = quiet or self._beyond_share(session, others)
            if not giving or not session.fits(self.pool.num_blocks):
                self.give_up(session)
                return False
            self.give_up(min(giving, key=attrgetter("touched_s")))
        return True

    def _beyond_share(self, session: DraftSession, others: Sequence[DraftSession]) -> list[DraftSession]:
        """Sessions of the verifier with most pages, where a session's own verifier stays within an equal share."""
        held = Counter({session.link: -(-len(session.pages.tokens) // BLOCK_SIZE)})
        for each in self._sessions.values():
            if each is not session and each.pages.blocks:
                held[each.link] += len(each.pages.blocks)
        [(largest, most)] = held.most_common(1)
        share = self.pool.num_blocks // len(held)
        return [each for each in others if each.link == largest] if held[session.link] <= share < most else []

    def give_up(self, session: DraftSession) -> None:
        """A session gives up its KV and its tree until its next commit."""
        session.give_up_pages()
        self.trees.clear(session)
        self.trees.place(session)

    def abandon(self, plan: DraftPlan) -> None:
        """The step could not be computed: its sessions wait for their next commits."""
        self.trees.give_back(plan.kv)
        sessions = [each.session for each in (*plan.catching_up, *plan.growing)]
        for session in dict.fromkeys(sessions):
            self.give_up(session)

    def end_step(self, plan: DraftPlan, now_s: float) -> None:
        """The step is over: collects the nodes that are due."""
        if plan.num_rows and not plan.reads:
            self._pace.took(now_s - self._planned_s, plan.num_levels)
        num_read = sum(each.stop - each.start for each in plan.catching_up)
        # Steps that mostly grow trees show nothing of prompts.
        if 2 * num_read > plan.num_rows:
            seconds = (now_s - self._planned_s) / max(1, plan.num_levels)
            self._prompt_rows.observe(rows=num_read, seconds=seconds)
            if plan.reads:
                self._pace.read(num_read, seconds)
        computing, self._computing = self._computing, []
        for session in computing:
            session.settle()
        self.trees.place(*computing)
        self._send(self.trees.push())

    def take(self) -> tuple[dict[int, list[ToVerifier]], dict[int, RemoteProtocolError]]:
        """Messages to verifiers, by their streams, and the streams that are to be reset."""
        outgoing, self._outgoing = self._outgoing, {}
        broken, self._broken = self._broken, {}
        return outgoing, broken


def num_missing(session: DraftSession) -> int:
    """Committed tokens of a session that are not computed yet."""
    return session.pages.num_missing


def num_fresh(sessions: Sequence[DraftSession]) -> int:
    """Tokens of what a round commits that sessions lack, prompts left out."""
    return sum(count for count in map(num_missing, sessions) if count <= MOST_FRESH)
