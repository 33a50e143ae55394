"""A simulated verifier: the real allocator over real draft trees, with steps that take what a profile says.

It plans as `paceline.engine.target` does; what it lacks are a model, pages in memory and messages on a wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.allocator import Allocator, Demand
from paceline.core.calibration import Calibration, Calibrations
from paceline.core.holdings import Holdings
from paceline.core.link import Drafter, SessionLink
from paceline.core.messages import DraftNodes, GenerateRequest, ToDrafter
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.core.patience import Prospect, prospect
from paceline.core.session import VerifierSession
from paceline.core.step_cost import StepMode
from paceline.core.tree import Node, walk
from paceline.planning.guesses import RIGHT
from paceline.planning.profile import BLOCK, DeviceFacts

# As in the engine: smoothing of the step time that waiting is weighed against; the remainder that is not waited for.
STEP_SMOOTHING = 0.1
SHORT_REMAINDER = 10
# Nobody waits for less, or rounding could keep time from going on.
LEAST_WAIT_S = 1e-6


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request on its way through the fleet, and what became of it.

    Attributes:
        number: Which text it gets.
        num_steps, num_drafted, num_accepted: Of its decoding steps.
        pieces: When tokens came and how many, `(seconds, tokens)`.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_received(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.pieces)


@dataclass(slots=True, kw_only=True)
class SimulatedStream:
    """The stream to a drafter: how to tell it something, how fast it answers, what its guesses are worth."""

    send: Callable[[SimulatedSession, ToDrafter], None]
    drafter: Drafter = field(default_factory=Drafter)
    calibration: Calibration = field(default_factory=Calibration)


class SimulatedSession:
    """One session at its verifier.

    Args:
        asked: What is to be generated.
        cap: Most draft tokens a step verifies of it.
        stream: To its drafter; None: it decodes plainly.
    """

    def __init__(self, asked: Asked, cap: int, stream: SimulatedStream | None) -> None:
        self.asked = asked
        self.stream = stream
        known = {} if stream is None else {DRAFT_MODEL: stream.calibration}
        # Only the prompt's last token is there as a token; the others are rows to compute and KV to hold.
        request = GenerateRequest(
            session_id=str(asked.number),
            epoch=1,
            prompt_token_ids=(RIGHT,),
            sampling=SamplingParams(max_tokens=asked.num_output_tokens, ignore_eos=True),
            speculation=SpeculationParams(),
        )
        self.draft = VerifierSession(request, Calibrations(known))
        self.holdings = Holdings()
        self.computed = 0
        self.link = SessionLink(self.draft)
        if stream is not None:
            self.link.connect(stream.drafter)
        self.num_blocks = 0
        self._cap = cap if stream is not None else 0
        self._look: tuple[float, Prospect] | None = None

    @property
    def total_len(self) -> int:
        """Committed tokens, the whole prompt included."""
        return self.asked.num_prompt_tokens - 1 + self.draft.committed_len

    @property
    def is_decoding(self) -> bool:
        """True when only the root is left to compute, and a first token is out."""
        return self.draft.num_generated > 0 and self.total_len - self.computed == 1

    @property
    def num_left(self) -> int:
        """Tokens still to be generated."""
        return self.asked.num_output_tokens - self.draft.num_generated

    def cap(self) -> int:
        """Most nodes that may be verified now."""
        return max(0, min(self._cap, self.num_left - 1))

    def changed(self) -> None:
        """Its tree is another than it was."""
        self._look = None

    def prospect(self, price: float) -> Prospect:
        """See `paceline.core.patience`; looked up anew when the tree or the price have changed."""
        if self._look is None or self._look[0] != price:
            share = 1.0 if self.link.drafter is None else self.link.drafter.child_share
            look = prospect(self.draft.tree, self.cap(), price=price, child_share=share)
            self._look = (price, look)
        return self._look[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: nodes by session, prefill, and what it is expected to take."""

    decoding: Sequence[tuple[SimulatedSession, tuple[Node, ...]]]
    prefill: Sequence[tuple[SimulatedSession, int]]
    mode: StepMode
    rows: int
    seconds: float

    @property
    def num_prefill_rows(self) -> int:
        """Rows of prompts."""
        return sum(count for _, count in self.prefill)


class SimulatedVerifier:
    """Continuous batching over one target; events and steps are driven by the simulation.

    Args:
        facts: Of the target on its device.
        allocator: The policy of `core` that picks nodes and sets the price.
        overhead: Share by which steps take longer while drafters work.
        num_cohorts: Parts of the decoding sessions that take turns in steps; 1, as the engine has it: no turns.
        say: Takes messages for a session's drafter.
        on_end: Told of every session that has all its tokens.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        allocator: Allocator,
        *,
        overhead: float,
        num_cohorts: int = 1,
        say: Callable[[SimulatedSession, ToDrafter], None],
        on_end: Callable[[SimulatedSession], None],
    ) -> None:
        self.allocator = allocator
        self._num_cohorts = num_cohorts
        self._turn = 0
        self._on_end = on_end
        self._facts = facts
        self._overhead = overhead
        self._say = say
        self._waiting: deque[SimulatedSession] = deque()
        self._running: list[SimulatedSession] = []
        self._sessions: dict[str, SimulatedSession] = {}
        self._free_blocks = facts.kv_tokens // BLOCK
        self._step_s = 0.01
        self._idle_since_s = 0.0
        self._cycle_since_s: float | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions that wait or run."""
        return len(self._sessions)

    # Events

    def submit(self, session: SimulatedSession, now_s: float) -> None:
        """Takes in a session; its drafter is told to start when it gets a place, unless drafters rest."""
        self._sessions[session.draft.session_id] = session
        self._waiting.append(session)
        session.link.price = self.allocator.price

    def receive(self, message: DraftNodes, now_s: float) -> None:
        """Takes in what a drafter said."""
        session = self._sessions.get(message.session_id)
        if session is None or session.link.drafter is None:
            return
        session.link.drafter.silent = False
        session.link.receive(message, now_s)
        session.changed()

    # Waiting

    @property
    def has_work(self) -> bool:
        """True while sessions wait or run."""
        return bool(self._sessions)

    def patience_s(self, now_s: float) -> float:
        """Seconds for which drafts are worth waiting for; see `paceline.core.patience`."""
        sessions = self._delayable()
        return self._worth_waiting(sessions, [self._wait_s(session, now_s) for session in sessions], now_s)

    def drafts_pay(self, draft_s: float, now_s: float) -> bool:
        """Whether a draft step of so many seconds, for all sessions, is worth the delay."""
        sessions = self._delayable()
        waits = [draft_s if _may_wait(session) else None for session in sessions]
        return self._worth_waiting(sessions, waits, now_s) > 0.0

    def _delayable(self) -> list[SimulatedSession]:
        decoding = [session for session in self._running if session.is_decoding]
        if self._waiting or len(decoding) < len(self._running) or self._mode() is StepMode.PLAIN:
            return []
        return self._in_turn(decoding)

    def _worth_waiting(
        self, sessions: Sequence[SimulatedSession], waits: Sequence[float | None], now_s: float
    ) -> float:
        left_s = self._step_s - (now_s - self._idle_since_s)
        if not sessions or left_s < LEAST_WAIT_S or all(wait_s is None for wait_s in waits):
            return 0.0
        looks = [
            session.prospect(1.0 if wait_s is None else session.link.price)
            for session, wait_s in zip(sessions, waits, strict=True)
        ]
        gainful = [wait_s for wait_s, look in zip(waits, looks, strict=True) if wait_s is not None and look.gain]
        if not gainful or not self.allocator.waits(looks, wait_s=min(gainful), step_s=self._step_s):
            return 0.0
        return min(max(gainful), left_s)

    def _wait_s(self, session: SimulatedSession, now_s: float) -> float | None:
        if not _may_wait(session):
            return None
        session.link.silences(now_s)
        return session.link.wait_s(now_s)

    # Stepping

    def plan(self, now_s: float) -> StepPlan:
        """Plans a step over all sessions that have something to compute."""
        mode = self._mode()
        self._admit()
        decoding = self._plan_decoding(now_s)
        rows = sum(1 + len(nodes) for _, nodes in decoding)
        prefill = self._plan_prefill(self._facts.max_rows - rows)
        rows += sum(count for _, count in prefill)
        kv_tokens = sum(session.total_len for session, _ in decoding)
        seconds = self._facts.seconds(rows, num_sessions=len(decoding) + len(prefill), kv_tokens=kv_tokens)
        if mode is StepMode.DRAFTING:
            seconds *= 1.0 + self._overhead
        return StepPlan(decoding=decoding, prefill=prefill, mode=mode, rows=rows, seconds=seconds)

    def _mode(self) -> StepMode:
        drafted = any(session.cap() and session.link.drafter for session in self._sessions.values())
        return StepMode.DRAFTING if self.allocator.price < 1.0 and drafted else StepMode.PLAIN

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._facts.max_sessions:
            session = self._waiting[0]
            if not self._reserve(session, session.total_len + 1):
                return
            self._running.append(self._waiting.popleft())

    def _reserve(self, session: SimulatedSession, num_tokens: int) -> bool:
        needed = -(-num_tokens // BLOCK) - session.num_blocks
        if needed > self._free_blocks:
            return False
        if needed > 0:
            self._free_blocks -= needed
            session.num_blocks += needed
        return True

    def _release(self, session: SimulatedSession) -> None:
        self._free_blocks += session.num_blocks
        session.num_blocks = 0

    def _preempt(self) -> None:
        """Takes the pages of the youngest session; it will be computed anew when there is room."""
        session = self._running.pop()
        self._release(session)
        session.computed = 0
        self._waiting.appendleft(session)

    def _plan_decoding(self, now_s: float) -> list[tuple[SimulatedSession, tuple[Node, ...]]]:
        decoding = [session for session in self._running if session.is_decoding]
        for session in decoding:
            while session.num_blocks and not self._reserve(session, session.total_len):
                self._preempt()
        decoding = self._in_turn([session for session in decoding if session.num_blocks])
        joining = [session for session in self._running if not session.is_decoding]
        backlog = sum(session.total_len - session.computed for session in joining)
        budget = self._facts.max_rows
        other_rows = min(backlog, max(0, budget - len(decoding)))
        # A quarter of the rows is prefill's when it has need of them.
        share = max(0, (budget - min(backlog, budget // 4)) // max(1, len(decoding)) - 1)
        demands = [
            Demand(
                tree=each.draft.tree,
                cap=min(self._cap(each), share),
                drafted=each.link.drafter is not None,
                answered=each.link.has_answered,
                holdings=each.holdings,
            )
            for each in decoding
        ]
        allocation = self.allocator.allocate(demands, other_rows=other_rows, joining=len(joining))
        for session in self._running:
            session.link.look_ahead(allocation.price, self._cap(session), self._step_s)
            if not (session.link.told_len or session.is_decoding):
                self._tell(session, now_s)
        return [
            (session, self._fitting(session, nodes)) for session, nodes in zip(decoding, allocation.nodes, strict=True)
        ]

    def _in_turn(self, decoding: list[SimulatedSession]) -> list[SimulatedSession]:
        """Those whose cohort is next; of a cohort that has nothing to verify it is the next one's turn."""
        count = self._num_cohorts
        for turn in range(self._turn, self._turn + count):
            chosen = [session for session in decoding if (session.asked.number - turn) % count == 0]
            if chosen:
                return chosen
        return []

    def _fitting(self, session: SimulatedSession, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes, if there are pages for the deepest of them."""
        deepest = max((session.draft.tree.depth(node) for node in nodes), default=0)
        return nodes if self._reserve(session, session.total_len + deepest) else ()

    def _plan_prefill(self, room: int) -> list[tuple[SimulatedSession, int]]:
        chunks: list[tuple[SimulatedSession, int]] = []
        for session in self._running:
            if session.is_decoding or room <= 0:
                continue
            count = min(room, session.total_len - session.computed)
            chunks.append((session, count))
            room -= count
        return chunks

    def _cap(self, session: SimulatedSession) -> int:
        return min(session.cap(), self.allocator.max_nodes)

    # Committing

    def finish(self, plan: StepPlan, *, started_s: float, now_s: float) -> None:
        """Ends a step: commits what it verified, and tells the allocator what it took."""
        if plan.decoding:
            self._turn = plan.decoding[0][0].asked.number + 1
        for session, nodes in plan.decoding:
            tokens = walk(session.draft.tree.root, nodes, _choose)
            session.asked.num_steps += 1
            session.asked.num_drafted += len(nodes)
            session.asked.num_accepted += len(tokens) - 1
            session.computed += len(tokens)
            self._commit(session, tokens, now_s)
        for session, count in plan.prefill:
            session.computed += count
            if session.computed == session.total_len:
                self._commit(session, (RIGHT,), now_s)
        self._time(plan, started_s, now_s)

    def _time(self, plan: StepPlan, started_s: float, now_s: float) -> None:
        self._idle_since_s = now_s
        if not plan.num_prefill_rows:
            self._step_s += STEP_SMOOTHING * (now_s - started_s - self._step_s)
        if self._cycle_since_s is not None and 2 * plan.num_prefill_rows <= plan.rows:
            self.allocator.observe(
                rows=plan.rows,
                guesses=sum(len(nodes) for _, nodes in plan.decoding),
                mode=plan.mode,
                seconds=now_s - self._cycle_since_s,
                mixed=plan.num_prefill_rows > 0,
            )
        self._cycle_since_s = now_s if self._running else None

    def _commit(self, session: SimulatedSession, tokens: tuple[int, ...], now_s: float) -> None:
        session.draft.commit(tokens)
        session.changed()
        session.asked.pieces.append((now_s, len(tokens)))
        if session.num_left <= 0:
            self._drop(session)
        else:
            self._tell(session, now_s)

    def _drop(self, session: SimulatedSession) -> None:
        self._running.remove(session)
        self._release(session)
        del self._sessions[session.draft.session_id]
        closed = session.link.close()
        if closed is not None:
            self._say(session, closed)
        self._on_end(session)

    def _tell(self, session: SimulatedSession, now_s: float) -> None:
        message = session.link.tell(now_s)
        if message is not None:
            self._say(session, message)


def _choose(_: Node) -> int:
    return RIGHT


def _may_wait(session: SimulatedSession) -> bool:
    """False for sessions that must not be delayed for drafts."""
    return session.num_left >= SHORT_REMAINDER
