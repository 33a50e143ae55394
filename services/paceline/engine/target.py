"""The verifier's engine: one step at a time, plan -> pack -> forward -> walk -> commit.

It runs in the engine thread and owns the target model. It knows sessions and messages as plain values, never a
socket; time comes from the clock it is given.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.allocator import Allocator, Demand
from paceline.core.calibration import Calibration, Calibrations
from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.pages import BlockPool, SlotPool
from paceline.core.params import TIER_METHODS
from paceline.core.patience import CHILD_SHARE, Prospect, prospect
from paceline.core.rules import Rules
from paceline.core.step_cost import StepCost, StepMode
from paceline.core.tree import Node, NodeState
from paceline.engine.budget import target_scratch_blocks
from paceline.engine.decoder import Decoder
from paceline.engine.growth import Growth
from paceline.engine.packing import BatchBuilder
from paceline.engine.profile import StepProfiler
from paceline.engine.sources import AnySource
from paceline.engine.step_plan import StepPlan, Verification, ancestor_slots
from paceline.engine.target_events import (
    Cancel,
    DraftsArrived,
    HeardOf,
    LinkChanged,
    Outcome,
    Paired,
    StepReport,
    Submit,
    TargetEvent,
    TargetLimits,
    TargetOutput,
)
from paceline.engine.target_session import TargetSession
from paceline.engine.tier import DrafterTier
from paceline.engine.turns import Turns, pause_s

logger = logging.getLogger(__name__)

# Smoothing of the step time that waiting is weighed against.
STEP_SMOOTHING = 0.1
# Drafters whose calibration is kept; clients may name any.
MAX_SOURCES = 256


class TargetEngine:
    """Continuous batching over the target model; see the module docstring.

    Args:
        decoder: The target model.
        identity: What it calls itself.
        num_blocks: Pages of committed KV.
        limits: Bounds.
        allocator: Which nodes a step verifies.
        clock: Seconds, monotonic.
        sources: What guesses inside the verifier, beside the drafters.
        rules: Acceptance rules that are served.
        use_threads: Sets this thread up for steps of a mode; called before every forward.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        identity: ModelIdentity,
        num_blocks: int,
        limits: TargetLimits,
        allocator: Allocator,
        clock: Callable[[], float],
        sources: Sequence[AnySource] = (),
        rules: Rules | None = None,
        use_threads: Callable[[StepMode], None] = lambda _: None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self._decoder = decoder
        self._identity = identity
        self._limits = limits
        self._allocator = allocator
        self._clock = clock
        self._rules = Rules() if rules is None else rules
        self._growth = Growth(sources, allocator, self._rules, clock)
        self._use_threads = use_threads
        scratch_blocks = target_scratch_blocks(limits.max_num_batched_tokens)
        self._cache = decoder.new_cache(num_blocks + scratch_blocks)
        self._tier = DrafterTier(identity.vocab_size, self._cache, decoder.states, clock)
        self._scratch = SlotPool(first_block=num_blocks, num_blocks=scratch_blocks)
        # Of this step's accepted nodes: scratch slots, and the slots of their positions.
        self._moves: list[tuple[int, int]] = []
        for source in sources:
            source.attach(self._cache, self._scratch)
        self._waiting: deque[TargetSession] = deque()
        self._running: list[TargetSession] = []
        self._sessions: dict[str, TargetSession] = {}
        self._calibrations: dict[tuple[str, bool, str], Calibration] = {}
        self._report = StepReport()
        self._num_reported = 0
        # Of a step that was begun and has not run yet.
        self._plan: StepPlan | None = None
        # Serials of the sessions that the step under way computes.
        self._in_step: tuple[int, ...] | None = None
        # What is to be told of sessions before the next step's tokens.
        self._outcomes: list[Outcome] = []
        self._turns = Turns()
        self._step_s = 0.01
        self._idle_since_s = clock()
        # Since when the engine has had the present step to do; None while it has nothing to decode.
        self._cycle_since_s: float | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions that wait or run."""
        return len(self._sessions)

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Serials of the sessions that a failure now is laid on: those of the step under way, or else all that run.

        To be read from another thread, too, once the engine's does not come back.
        """
        in_step = self._in_step
        return tuple(session.serial for session in self._running) if in_step is None else in_step

    # Events

    def handle(self, event: TargetEvent) -> None:
        """Takes in one event."""
        match event:
            case Submit():
                self._submit(event)
            case Cancel():
                session = self._sessions.get(event.session_id)
                if session is not None and session.serial == event.serial:
                    self._drop(session)
            case DraftsArrived():
                self._tier.receive(event, self._sessions, self._report)
            case LinkChanged():
                self._tier.change(event, self._sessions)
            case Paired():
                session = self._sessions.get(event.session_id)
                if session is not None and session.serial == event.serial:
                    self._pair(session, event.address)
            case HeardOf():
                session = self._sessions.get(event.session_id)
                if session is not None and session.serial == event.serial:
                    session.heard = True

    def _submit(self, event: Submit) -> None:
        try:
            session = self._new_session(event)
        except Exception as error:  # noqa: BLE001 - what one request holds must not end the others
            self._outcomes.append((event.serial, _blame(event.request.session_id, error)))
            return
        self._sessions[event.request.session_id] = session
        self._waiting.append(session)
        self._tier.connect(session)

    def _new_session(self, event: Submit) -> TargetSession:
        sources = self._growth.sources_of(event.request)
        return TargetSession(
            event.request,
            event.serial,
            self._identity,
            self._limits.max_model_len,
            self.pool,
            self._calibrations_for(event.request, event.request.drafter_address, sources),
            sources,
            self._rules.of(event.request.speculation),
            self._clock(),
            event.arrived_s,
            price=self._allocator.price,
        )

    def _pair(self, session: TargetSession, address: str) -> None:
        """Closes a session at its drafter and opens it at another; what the first may still send is not heard."""
        request = session.draft.request
        session.draft.calibrations = self._calibrations_for(request, address, self._growth.sources_of(request))
        self._tier.pair(session, address)

    def _calibrations_for(
        self, request: GenerateRequest, drafter_address: str, sources: Sequence[AnySource]
    ) -> Calibrations:
        """Drafters are told apart by their addresses, acceptance rules, and greedy sessions from others."""
        greedy = request.sampling.temperature == 0.0
        rule = self._rules.of(request.speculation).name
        known = {source.name: self._calibration_of((source.name, greedy, rule)) for source in sources}
        tier = dict.fromkeys(TIER_METHODS, self._calibration_of((drafter_address, greedy, rule)))
        return Calibrations({**tier, **known})

    def _calibration_of(self, key: tuple[str, bool, str]) -> Calibration:
        if key not in self._calibrations and len(self._calibrations) >= MAX_SOURCES:
            self._calibrations.pop(next(iter(self._calibrations)))
        return self._calibrations.setdefault(key, Calibration())

    def _drop(self, session: TargetSession) -> None:
        del self._sessions[session.draft.session_id]
        self._report.unverified_by.update(node.first_source for node in session.draft.tree.nodes())
        session.close()
        if session in self._running:
            self._running.remove(session)
        else:
            self._waiting.remove(session)
        self._tier.part(session)

    def profile(self, mode: StepMode) -> StepCost:
        """Measures steps of so many rows, for the allocator to start from; takes seconds, with no session about."""
        self._use_threads(mode)
        profiler = StepProfiler(self._decoder, self._cache, self._scratch, self._clock)
        return profiler.measure(self._limits.max_num_batched_tokens)

    # Stepping

    def has_work(self) -> bool:
        """True while sessions wait or run, or something is left to say or to report."""
        return bool(self._sessions or self._outcomes) or self._tier.has_work or self._num_reported > 0

    def pause_s(self) -> float:
        """Seconds without anything to compute, unless something happens; see `paceline.engine.turns`."""
        if self._turns.called_up is None or self._outcomes:
            return 0.0
        self._admit()
        return pause_s(self._running, self._clock())

    def patience_s(self) -> float:
        """Seconds for which drafts are worth waiting for, or none; see `paceline.core.patience`."""
        if (pause := self.pause_s()) > 0.0:
            return pause
        sessions, now_s = self._delayable(), self._clock()
        return self._worth_waiting(sessions, [self._wait_s(session, now_s) for session in sessions], now_s)

    def drafts_pay(self, draft_s: float) -> bool:
        """Whether a draft step of so many seconds, for all sessions, is worth the delay; the same objective."""
        sessions = self._delayable()
        waits = [draft_s if session.may_wait() and session.link.drafter else None for session in sessions]
        return self._worth_waiting(sessions, waits, self._clock()) > 0.0

    def _delayable(self) -> list[TargetSession]:
        """The decoding sessions; none when something else waits for the next step, or no drafts are to come."""
        if self._tier.has_work or self._waiting or self._mode() is StepMode.PLAIN:
            return []
        return self._running if all(session.is_decoding for session in self._running) else []

    def _worth_waiting(self, sessions: Sequence[TargetSession], waits: Sequence[float | None], now_s: float) -> float:
        """Seconds to wait, at most a step in all; by session those until its next nodes, None: never."""
        left_s = self._step_s - (now_s - self._idle_since_s)
        if left_s <= 0.0 or all(wait_s is None for wait_s in waits):
            return 0.0
        prospects: list[Prospect] = []
        gainful: list[float] = []
        for session, wait_s in zip(sessions, waits, strict=True):
            price = 1.0 if wait_s is None else session.link.price
            share = CHILD_SHARE if session.link.drafter is None else session.link.drafter.child_share
            look = prospect(session.draft.tree, self._cap(session), price=price, child_share=share)
            prospects.append(look)
            if wait_s is not None and look.gain:
                gainful.append(wait_s)
        if not gainful or not self._allocator.waits(prospects, wait_s=min(gainful), step_s=self._step_s):
            return 0.0
        return min(max(gainful), left_s)

    def _wait_s(self, session: TargetSession, now_s: float) -> float | None:
        if not session.may_wait():
            return None
        self._report.num_silenced += session.link.silences(now_s)
        return session.link.wait_s(now_s)

    def begin(self) -> TargetOutput | None:
        """Plans the next step; what is known before it runs goes out while it does, not after.

        That is what drafters are to be told, new prompts above all, and which sessions are computed for the first time.
        """
        self._plan = self._plan_step()
        outcomes = self._take_outcomes()
        return self._output(outcomes, StepReport()) if outcomes or self._tier.has_work else None

    def step(self) -> TargetOutput:
        """Runs the step that was begun, or one planned now, over all sessions that have something to compute."""
        plan, self._plan = self._plan or self._plan_step(), None
        committed = self._take_outcomes()
        if plan.num_rows:
            # A prompt is worth more than what drafters would guess meanwhile: its step takes their CPUs, too.
            self._use_threads(StepMode.PLAIN if self._is_mostly_prefill(plan.num_rows) else plan.mode)
            logits = self._decoder.forward(plan.builder.build(), self._cache).cpu().numpy()
            for each in plan.verifications:
                committed.append(self._verify(each, logits, plan.batch_size))
            for session, logit_index in plan.finishing:
                committed.append(self._first_token(session, logits[logit_index], plan.batch_size))
            self._move_accepted()
            self._growth.grow(self._report, self._clock() - plan.started_s)
            self._time_step(plan)
        for session in self._running:
            if session.prefilled_to > session.pages.num_computed:
                session.pages.mark_computed(session.prefilled_to)
        report, self._report = self._report, StepReport()
        report.num_rows, report.num_decoding = plan.num_rows, len(report.gammas)
        report.prefix_queries, report.prefix_hits = self.pool.take_counts()
        self._in_step = None
        return self._output(committed, report)

    def _take_outcomes(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _plan_step(self) -> StepPlan:
        started_s, mode, builder = self._clock(), self._mode(), BatchBuilder()
        self._admit()
        sessions = self._with_pages(self._turns.next(self._running, started_s))
        self._in_step = tuple(session.serial for session in sessions)
        verifications = self._plan_decoding(builder, sessions)
        reading, finishing = self._plan_prefill(builder, sessions)
        computed = [*(each.session for each in verifications), *reading, *(session for session, _ in finishing)]
        self._in_step = tuple(session.serial for session in computed)
        told = computed if self._turns.called_up is None else [*computed, self._turns.called_up]
        begun = [(session.serial, session.begins()) for session in told]
        self._outcomes += [(serial, said) for serial, said in begun if said is not None]
        return StepPlan(started_s, mode, builder, verifications, finishing)

    def _with_pages(self, sessions: Sequence[TargetSession]) -> Sequence[TargetSession]:
        """Has pages for what those that decode have committed; without those that lost theirs to it."""
        num_preempted = self._report.num_preempted
        for session in sessions:
            if not session.is_decoding:
                continue
            while session in self._running and not session.pages.reserve(session.draft.committed_len):
                self._preempt()
        if self._report.num_preempted == num_preempted:
            return sessions
        return [session for session in sessions if session in self._running]

    def _mode(self) -> StepMode:
        drafted = (self._cap(each) for each in self._sessions.values() if each.link.drafter)
        rest = self._allocator.price >= 1.0 or not any(drafted)
        return StepMode.PLAIN if rest else StepMode.DRAFTING

    def _is_mostly_prefill(self, num_rows: int) -> bool:
        return 2 * self._report.num_prefill_rows > num_rows

    def _time_step(self, plan: StepPlan) -> None:
        """Keeps the step's own time, and tells the allocator the whole cycle: events and waiting are paid for too."""
        now_s, num_rows = self._clock(), plan.num_rows
        self._idle_since_s = now_s
        self._report.seconds = now_s - plan.started_s
        if not self._report.num_prefill_rows:
            self._step_s += STEP_SMOOTHING * (self._report.seconds - self._step_s)
        # A row is a row; but where most of them are prefill, attention over long chunks is what is paid for.
        if self._cycle_since_s is not None and not self._is_mostly_prefill(num_rows):
            cycle_s, mixed = now_s - self._cycle_since_s, self._report.num_prefill_rows > 0
            guesses = sum(self._report.gammas)
            self._allocator.observe(rows=num_rows, guesses=guesses, mode=plan.mode, seconds=cycle_s, mixed=mixed)
        self._cycle_since_s = now_s if self._running else None

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            session = self._waiting[0]
            if not session.admit(self._clock()):
                return
            self._waiting.popleft()
            self._running.append(session)

    def _plan_decoding(self, builder: BatchBuilder, sessions: Sequence[TargetSession]) -> list[Verification]:
        decoding = [session for session in sessions if session.is_decoding]
        joining = [session for session in sessions if not session.is_decoding]
        backlog = sum(session.pages.num_missing for session in joining)
        budget = self._limits.max_num_batched_tokens
        other_rows = min(backlog, max(0, budget - len(decoding)))
        # A quarter of the rows is prefill's when it has need of them.
        share = max(0, (budget - min(backlog, budget // 4)) // max(1, len(decoding)) - 1)
        demands = [self._demand(session, share) for session in decoding]
        allocation = self._allocator.allocate(demands, other_rows=other_rows, joining=len(joining))
        self._set_price(allocation.price, sessions)
        return [self._pack(builder, session, nodes) for session, nodes in zip(decoding, allocation.nodes, strict=True)]

    def _demand(self, session: TargetSession, share: int) -> Demand:
        return Demand(
            tree=session.draft.tree,
            cap=min(self._cap(session), share),
            drafted=session.link.drafter is not None,
            answered=session.link.has_answered,
            own=session.own_survivals,
            holdings=session.holdings,
        )

    def _cap(self, session: TargetSession) -> int:
        return min(session.cap(), self._allocator.max_nodes)

    def _set_price(self, price: float, sessions: Sequence[TargetSession]) -> None:
        """Also for those whose prompts are read: their drafters read along, unless this price sends them to rest."""
        self._report.price = price
        for session in sessions:
            session.link.look_ahead(price, self._cap(session), self._step_s)
            if not (session.link.told_len or session.is_decoding):
                self._tier.tell(session)

    def _pack(self, builder: BatchBuilder, session: TargetSession, nodes: tuple[Node, ...]) -> Verification:
        length = session.draft.committed_len
        deepest = max((node.position for node in nodes), default=0)
        if not session.pages.reserve(deepest + 1):
            nodes = ()
        root_index = builder.add_prefix(session.pages, length - 1, length, wants_logits=True)
        assert root_index is not None, "the root's logits were asked for"
        logit_index = {id(session.draft.tree.root): root_index}
        slots: dict[int, int] = {}
        for node in nodes:
            slot = self._scratch.take()
            assert slot is not None, "scratch holds as many slots as a step has rows"
            slots[id(node)] = slot
            path = ancestor_slots(node, slots)
            logit_index[id(node)] = builder.add_node(
                session.pages,
                token_id=node.token_id,
                position=node.position,
                slot=slot,
                ancestors=path,
            )
        return Verification(session=session, nodes=nodes, slots=slots, logit_index=logit_index)

    def _plan_prefill(
        self, builder: BatchBuilder, sessions: Sequence[TargetSession]
    ) -> tuple[list[TargetSession], list[tuple[TargetSession, int]]]:
        """Adds prefill chunks while the step has room.

        Returns:
            Sessions whose prompts go on after this step, and those that get a token, with where their logits are.
        """
        reading: list[TargetSession] = []
        finishing: list[tuple[TargetSession, int]] = []
        for session in sessions:
            room = self._limits.max_num_batched_tokens - builder.num_rows
            if session.is_decoding or room <= 0:
                continue
            start, whole = session.pages.num_computed, session.draft.committed_len
            stop = min(start + room, whole)
            logit_index = builder.add_prefix(session.pages, start, stop, wants_logits=stop == whole)
            self._report.num_prefill_rows += stop - start
            if logit_index is None:
                session.prefilled_to = stop
                reading.append(session)
            else:
                finishing.append((session, logit_index))
        return reading, finishing

    def _preempt(self) -> None:
        """Takes the pages of the youngest session; it will be computed anew when there is room."""
        session = self._running.pop()
        session.pages.release()
        self._waiting.appendleft(session)
        self._report.num_preempted += 1

    # Committing

    def _verify(self, each: Verification, logits: np.ndarray, batch_size: int) -> Outcome:
        session = each.session
        base_len = session.draft.committed_len
        try:
            verdict = session.judge(each.nodes, lambda node: logits[each.logit_index[id(node)]])
        except Exception as error:  # noqa: BLE001 - one session's rule and sampler must not end the others
            self._free_scratch(each)
            return self._fail(session, error)
        pruning = session.draft.commit(verdict.token_ids, verdict.chances)
        accepted = [node for node in pruning.matched if id(node) in each.slots]
        if pruning.matched or pruning.dead:
            unverified = [node for node in (*pruning.matched, *pruning.dead) if id(node) not in each.slots]
            self._report.unverified_by.update(node.first_source for node in unverified)
        self._moves += [(each.slots[id(node)], session.pages.slot(node.position)) for node in accepted]
        self._free_scratch(each)
        session.pages.mark_computed(base_len + len(accepted))
        session.draft.tally.count(
            num_draft_tokens=len(each.nodes),
            num_accepted=len(accepted),
            hit=pruning.hit,
            batch_size=batch_size,
        )
        self._report.gammas.append(len(each.nodes))
        if each.nodes:
            self._report.accepted.append(len(accepted))
            # Those still alive lie beyond the end of the text: nothing was chosen in their place.
            judged = [node for node in each.nodes if node.state is not NodeState.LIVE]
            self._report.verified_by.update(node.first_source for node in judged)
            self._report.accepted_by.update(node.first_source for node in accepted)
            self._report.num_hits += pruning.hit
            self._report.num_misses += not pruning.hit
        outcome = self._hand_out(session, base_len)
        if session.traced:
            self._report.traced.append(session.round(len(each.nodes), len(accepted), batch_size))
        return outcome

    def _move_accepted(self) -> None:
        """Puts the KV of accepted nodes in place, before anything else is written to scratch slots."""
        if self._moves:
            sources, targets = np.array(self._moves, np.int64).T
            self._cache.copy_slots(np.ascontiguousarray(sources), np.ascontiguousarray(targets))
            self._moves.clear()

    def _free_scratch(self, each: Verification) -> None:
        for slot in each.slots.values():
            self._scratch.give_back(slot)

    def _fail(self, session: TargetSession, error: Exception) -> Outcome:
        """Ends one session with an error, such as that the model gave it nothing to choose from; the others go on."""
        # Whether a page of its own or one from the cache is at fault cannot be told: what others go on to compute from
        # the same pages is not relied on either.
        doubtful = set(session.pages.blocks)
        for each in self._running:
            if not doubtful.isdisjoint(each.pages.blocks):
                each.pages.forget()
        self._drop(session)
        return session.serial, _blame(session.draft.session_id, error)

    def _first_token(self, session: TargetSession, row: np.ndarray, batch_size: int) -> Outcome:
        base_len = session.draft.committed_len
        session.pages.mark_computed(base_len)
        try:
            verdict = session.judge((), lambda _: row)
        except Exception as error:  # noqa: BLE001 - as above
            return self._fail(session, error)
        session.draft.commit(verdict.token_ids, verdict.chances)
        session.draft.tally.count(num_draft_tokens=0, num_accepted=0, hit=False, batch_size=batch_size)
        outcome = self._hand_out(session, base_len)
        if session.traced:
            self._report.traced.append(session.start())
        return outcome

    def _hand_out(self, session: TargetSession, base_len: int) -> Outcome:
        now_s = self._clock()
        committed = session.hand_out(base_len, now_s)
        if committed.result is not None:
            self._drop(session)
        else:
            self._tier.tell(session)
            self._growth.add(session)
        return session.serial, committed

    def _output(self, committed: list[Outcome], report: StepReport) -> TargetOutput:
        self._tier.tell_states(self._running)
        report.num_running = len(self._running)
        report.num_waiting = len(self._waiting)
        report.lag_tokens = max((session.link.lag_tokens for session in self._running), default=0)
        report.kv_usage = self.pool.num_used / self.pool.num_blocks
        self._num_reported = len(self._sessions)
        to_drafters, broken = self._tier.take()
        return TargetOutput(committed=committed, to_drafters=to_drafters, broken_links=broken, report=report)


def _blame(session_id: str, error: Exception) -> PacelineError:
    """What a session is told of its failure; an error that no user may see is logged instead."""
    if isinstance(error, PacelineError):
        return error
    logger.error("a session failed", extra={"session_id": session_id}, exc_info=error)
    return PacelineError(f"the session failed in the verifier's engine ({type(error).__name__})")
