"""The verifier's engine: one step at a time, plan -> pack -> forward -> judge -> commit.

It owns the target model, which it has computed where the device is (`engine.loop`). The plan of a step is the
scheduler's (`engine.scheduler`). It knows sessions and messages as plain values, never a socket; time comes from the
clock it is given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paceline.core.acceptance import rule_of
from paceline.core.calibration import CalibrationStore
from paceline.core.draft_policy import Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.errors import InvalidRequestError, MovedError, OverloadedError, PacelineError
from paceline.core.goodput import MovingAverage
from paceline.core.messages import (
    CommittedStates,
    GenerateRequest,
    ModelIdentity,
    PositionLogprobs,
    SessionEvent,
)
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool, target_scratch_blocks
from paceline.core.params import COUPLED, METHODS, TIER_METHODS
from paceline.core.step_time import PROMPT_STEP_S, StepCost
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    Paired,
    SetMode,
    StepReport,
    Submit,
    TargetEvent,
    TargetLimits,
    TargetOutput,
    TuningLoaded,
)
from paceline.engine.batch import Batch
from paceline.engine.draft_scheduler import VerifierMessages
from paceline.engine.drafter import DraftEngine
from paceline.engine.judging import READ_ROWS, Verification
from paceline.engine.loop import Compute, inline
from paceline.engine.model import Model, Pending
from paceline.engine.packing import BatchBuilder, PrefixRows
from paceline.engine.planned_step import Part, StepPlan
from paceline.engine.profile import profile_steps
from paceline.engine.scheduler import Scheduler
from paceline.engine.source_calls import SourceCalls
from paceline.engine.source_interface import AnySource
from paceline.engine.target_session import TargetSession
from paceline.forest import Forest, warm_up
from paceline.service.learned import Learned, resume

logger = logging.getLogger(__name__)

# Size of a hidden state's number on the wire.
STATE_WIRE_BYTES = 2
# Hidden states that a step hands to drafters at most, far within one message.
STATE_BYTES = 4 * 1024 * 1024
# Key under which drafter calibrations are kept, whatever their addresses were.
TIER = "tier"
# Stands for the address of a drafter inside the engine; no drafter of the tier can have it.
LOCAL = "in this verifier"
_LINK = 0
# Assumed time of a level of its guesses before the first is measured.
FIRST_DRAFT_S = 1e-4


class TargetEngine:
    """Runs the scheduler's steps on the target model; see the module docstring.

    Args:
        decoder: The target model.
        identity: The target's own name.
        num_blocks: Pages of committed KV.
        policy: Which nodes a step verifies.
        clock: Seconds, monotonic.
        sources: Sources of guesses inside the verifier, beside the drafters.
        default_rule: Acceptance rule of requests that name none.
        use_threads: Sets the device's thread up for steps while drafters work, or idle; called before every forward.
    """

    def __init__(
        self,
        *,
        decoder: Model,
        identity: ModelIdentity,
        num_blocks: int,
        limits: TargetLimits,
        policy: Goodput,
        clock: Callable[[], float],
        sources: Sequence[AnySource] = (),
        default_rule: str = COUPLED,
        use_threads: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self._decoder = decoder
        self._identity = identity
        self._limits = limits
        self._policy = policy
        self._clock = clock
        self._default_rule = default_rule
        # All of them, whichever are served: loops are compiled for a number of sources.
        self._forest = Forest(METHODS)
        warm_up(self._forest)
        self._sources = SourceCalls(sources, policy, default_rule, clock, self._forest)
        self._use_threads = use_threads
        scratch_blocks = target_scratch_blocks(limits.max_num_batched_tokens)
        self._cache = decoder.new_cache(num_blocks + scratch_blocks)
        self._scratch = SlotPool(first_block=num_blocks, num_blocks=scratch_blocks)
        for source in sources:
            source.attach(self._cache, self._scratch)
        self._state_width = decoder.state_width
        self.scheduler = Scheduler(
            pool=self.pool,
            scratch=self._scratch,
            limits=limits,
            policy=policy,
            tier=DrafterTier(identity.vocab_size, self._forest),
        )
        self._calibrations: CalibrationStore[tuple[str, bool, str]] = CalibrationStore(self._forest, self._kind)
        self._num_reported = 0
        # A step on the device before the tokens of the one before are read.
        self._ahead: _Launched | None = None
        self._in_step: StepPlan | None = None
        # Messages of drafters since the last step, or the last look at whether to wait.
        self._arrived: list[DraftsArrived] = []
        # A drafter inside, its model, seconds of a level of its guesses, and its time since the last report.
        self._inside: DraftEngine | None = None
        self._inside_model, self._draft_level, self._drafted_s = "", MovingAverage(FIRST_DRAFT_S), 0.0

    def draft_inside(self, draft: DraftEngine, *, wants_states: bool = False, draft_model: str = "") -> None:
        """Has a draft engine take turns with this one on the same device, instead of drafters of the tier.

        It is there for comparison, and for machines that have no second place for a drafter. Drafting delays verifying
        here, so it goes on only while waiting for drafts pays: a draft step is a wait that works.

        Args:
            wants_states: Whether it drafts from hidden states.
            draft_model: Name of its model, for metrics.
        """
        self._inside, self._inside_model = draft, draft_model
        self.handle(LinkChanged(address=LOCAL, up=True, wants_states=wants_states, draft_model=draft_model))

    @property
    def cache(self) -> Any:
        """The model's `new_cache` that steps write to."""
        return self._cache

    @property
    def num_sessions(self) -> int:
        """Sessions that wait or run."""
        return self.scheduler.num_sessions

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Numbers of the sessions that a failure now is attributed to: those of the step under way, or all that run."""
        plan = self._in_step
        sessions = self.scheduler.running if plan is None else [part.session for part in plan.parts]
        return tuple(session.number for session in sessions)

    @property
    def full_step_s(self) -> float:
        """Expected seconds of a step of all sessions that fit, with their guesses and a prompt beside them."""
        rows = min(self._limits.max_num_batched_tokens, self._policy.most_rows(self._limits.max_num_seqs))
        return max(PROMPT_STEP_S, 2.0 * self._policy.plain_s(rows))

    # Events

    def handle(self, event: TargetEvent) -> None:
        if isinstance(event, DraftsArrived):
            self._arrived.append(event)
            return
        self._receive()
        match event:
            case Submit():
                self._submit(event)
            case LinkChanged():
                self.scheduler.tier.change(event, self._clock())
            case SetMode():
                self._policy.rehearse(event.drafts, over=event.over)
                # Counts from earlier steps do not belong to the next report.
                self.scheduler.report = StepReport()
            case TuningLoaded():
                resume(self, event.learned, "another verifier")
            case Cancel() | Paired():
                session = self.scheduler.session(event.number)
                if session is not None:
                    self._handle_of(session, event)

    def _receive(self) -> None:
        """Merges drafters' messages that have arrived, all in one call."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self.scheduler.tier.receive(arrived, self.scheduler.report)

    def _handle_of(self, session: TargetSession, event: Cancel | Paired) -> None:
        match event:
            case Cancel():
                self.scheduler.drop(session)
            case Paired():
                sources = self._sources.sources_of(session.request)
                session.link.calibrations = self._calibrations_for(session.request, event.address, sources)
                self.scheduler.tier.pair(session.link, event.address, self._clock())

    def _submit(self, event: Submit) -> None:
        try:
            session = self._new_session(event)
        except Exception as error:  # noqa: BLE001 - what one request holds must not end the others
            self.scheduler.committed.errors[event.number] = _shown_error(event.request.session_id, error)
            return
        self.scheduler.submit(session)

    def _new_session(self, event: Submit) -> TargetSession:
        sources = self._sources.sources_of(event.request)
        return TargetSession(
            event.request,
            event.number,
            self._identity,
            drafter_address=event.drafter_address,
            max_model_len=self._identity.context_len,
            pool=self.pool,
            forest=self._forest,
            calibrations=self._calibrations_for(event.request, event.drafter_address, sources),
            sources=sources,
            acceptance=rule_of(event.request.speculation, self._default_rule),
            # Steps are not interrupted, so it may have come one ago.
            submitted_s=self._clock() if event.arrived_s is None else event.arrived_s,
            price=self._policy.price,
            grammar=event.grammar,
            tally=event.tally,
        )

    def _calibrations_for(
        self, request: GenerateRequest, drafter_address: str, sources: Sequence[AnySource]
    ) -> dict[str, int]:
        """Keeps apart drafters by address, greedy sessions from others, and acceptance rules."""
        greedy = request.sampling.temperature == 0.0
        rule = rule_of(request.speculation, self._default_rule)
        known = {source.name: self._calibrations.of((source.name, greedy, rule)) for source in sources}
        tier = dict.fromkeys(TIER_METHODS, self._calibrations.of((drafter_address, greedy, rule)))
        return {**tier, **known}

    def _kind(self, key: tuple[str, bool, str]) -> str:
        """Key of a calibration: drafters have other addresses after a restart, and are the same model."""
        source, greedy, rule = key
        kept_as = source if source in self._sources.names else TIER
        return f"{kept_as} {'greedy' if greedy else 'sampled'} {rule}"

    def learned(self) -> Learned:
        """Learned tuning for a successor."""
        return {"policy": self._policy.learned(), "calibrations": self._calibrations.learned()}

    def resume(self, learned: Learned) -> None:
        """Begins where a predecessor ended, after the profile and before the first session.

        Raises:
            KeyError, TypeError, ValueError: It is not what such an engine learns.
        """
        self._calibrations.resume(learned["calibrations"])
        self._policy.resume(learned["policy"])

    def profile(self) -> StepCost:
        """Measures steps for the policy and prompts to start from, while there are no sessions; takes seconds."""
        self._use_threads(False)
        most_rows = self._limits.max_num_batched_tokens
        cost = profile_steps(
            self._decoder,
            self._cache,
            self._scratch,
            self._clock,
            most_rows=most_rows,
            num_blocks=min(self.pool.num_blocks, (self._identity.context_len - 1) // BLOCK_SIZE),
        )
        self.scheduler.prompt_rows.start_from(cost)
        self._policy.start_from(cost)
        return cost

    # Stepping

    def has_work(self) -> bool:
        """True while sessions wait or run, or something is left to send or to report."""
        # A drafter may be the last to speak, of sessions that have ended: that is no work.
        self._receive()
        return self.scheduler.has_work or self._num_reported > 0

    def patience_s(self) -> float:
        """Seconds for which the next drafts are worth waiting for; 0: step now, as where a drafter is inside."""
        self._receive()
        waits = self._ahead is None and self._inside is None
        return self.scheduler.patience_s(self._clock()) if waits else 0.0

    async def _draft_inside(self, draft: DraftEngine, compute: Compute) -> None:
        """Drafts as long as that pays."""
        self._receive()
        while draft.has_work() and self._ahead is None:
            if not self.scheduler.drafts_pay(self._draft_level.value, self._clock()):
                break
            started_s, output = self._clock(), await draft.step(compute)
            now_s = self._clock()
            self._arrived += [
                DraftsArrived(address=LOCAL, messages=each, arrived_s=now_s) for each in output.to_verifiers.values()
            ]
            self._receive()
            self._drafted_s += sum(output.device_s.values())
            self._draft_level.add((now_s - started_s) / output.report.num_levels)

    async def step(self, compute: Compute = inline, tell: Callable[[DrafterNews], None] | None = None) -> TargetOutput:
        """Runs a step over all sessions that have something to compute: receive, plan, launch, judge, commit, tell."""
        # Draft: where a drafter is inside.
        if self._inside is not None:
            await self._draft_inside(self._inside, compute)
        scheduler, tier, now_s = self.scheduler, self.scheduler.tier, self._clock()
        # Receive: drafters' messages that have arrived go into the trees, in one call.
        self._receive()
        # A step that was launched ahead goes on while one of its sessions does.
        if self._ahead is not None and not scheduler.take_up(self._ahead.plan, now_s):
            self._ahead = None
        # Plan: sessions get places and pages, and the policy picks a mode (`Goodput.enter`) and the guesses of each
        # session (`Goodput.allocate`).
        plan = self._in_step = scheduler.plan(now_s) if self._ahead is None else self._ahead.plan
        # Tell: drafters read new prompts while the device does, and clients learn that these are computed.
        has_news = tier.has_work or not scheduler.committed.is_empty
        if tell is not None and has_news and not (begun := await self._output(StepReport(), compute)).is_empty:
            tell(begun)
        if plan.num_rows:
            # Pack here: beside the device, the thread that packs would take turns with this one.
            packed = None if self._ahead is not None else _pack(plan)
            # Launch, judge and commit where the device is.
            await compute(self._run, plan, packed)
            # Tell: drafters have nothing to do until they know what was committed.
            if tell is not None and tier.has_work and not (news := await self._news(compute)).is_empty:
                tell(news)
        # Streams to drafters write now.
        await asyncio.sleep(0)
        # Guess: sources inside the verifier, once drafters know the tokens.
        if self._sources.has_work:
            await (compute if self._sources.need_device else inline)(self._sources.grow, scheduler.report)
        # Learn: the policy sees tokens and seconds (`Goodput.observe`).
        scheduler.end_step(plan, self._clock())
        self._in_step = None
        if self._inside is not None:
            scheduler.report.count("paceline:draft_seconds", self._inside_model, LOCAL, by=self._drafted_s)
            self._drafted_s = 0.0
        # Tell: clients and metrics get the rest, once the device computes the next step.
        return await self._output(scheduler.take_report(plan), compute)

    def _run(self, plan: StepPlan, packed: _Packed | None) -> None:
        """The part of a step where the device is: launch, judge, commit."""
        scheduler = self.scheduler
        try:
            # Launch: the device computes, and goes on with the next step where that needs no guesses.
            launched = self._ahead if packed is None else self._launch(plan, *packed)
            assert launched is not None, "a step that is not launched ahead is packed"
            self._ahead = self._launch_ahead(launched)
            # Judge: the target's tokens, down the guesses of each session.
            launched.judging.follow(launched.pending)
        except MemoryError as error:
            self._ahead = None
            self._refuse_largest(plan, error)
            return
        # Commit: tokens go into sessions, trees and the columns for drafters and clients.
        committed, parts = scheduler.committed, list[Part]()
        for place, part in enumerate(launched.judging.parts):
            session = part.session
            if not scheduler.holds(session):
                continue
            try:
                if session.judges_prompt and part.judged:
                    judged = _prompt_judged(part, launched.judging.firsts[place], launched.pending)
                    committed.add_event(session.number, judged)
                if part.commits:
                    launched.judging.commit(place, committed)
                    parts.append(part)
            except Exception as error:  # noqa: BLE001 - what one session asks for must not end the others
                scheduler.give_up(part, request_at_fault=isinstance(error, InvalidRequestError | MovedError))
                committed.errors[session.number] = _shown_error(session.session_id, error)
        scheduler.commit(launched.plan, parts, self._clock())
        # Accepted nodes go to their places before anything else is written to scratch slots.
        self._cache.apply_moves(scheduler.moves)
        # Guess: where no drafter waits for these tokens, sources need no call of their own.
        self._sources.add([part.session for part in parts])
        if not scheduler.tier.has_work:
            self._sources.grow(scheduler.report)

    def _launch(self, plan: StepPlan, judging: Verification, batch: Batch) -> _Launched:
        # A prompt is worth more than what drafters would guess meanwhile: its step uses their CPUs, too.
        self._use_threads(plan.drafters_work and not plan.is_mostly_prefill)
        return _Launched(plan, judging, self._decoder.launch(batch, self._cache, judging.walks))

    def _launch_ahead(self, launched: _Launched) -> _Launched | None:
        """Launches the step after one that is not read yet; None: it has to wait, or the device."""
        plan = self.scheduler.plan_ahead(launched.plan) if launched.pending.runs_ahead else None
        if plan is None:
            return None
        judging = Verification(plan, range(len(plan.decoding)))
        try:
            pending = self._decoder.launch(_pack_ahead(plan, launched), self._cache, judging.walks)
        except MemoryError:
            # It comes again once there is nothing else that needs room.
            return None
        return _Launched(plan, judging, pending)

    def _refuse_largest(self, plan: StepPlan, error: MemoryError) -> None:
        """The device has no room for the step: the session with most rows ends, and the others' rows come again."""
        self.scheduler.abandon(plan)
        part = max(plan.parts, key=lambda each: each.num_rows)
        self.scheduler.drop(part.session)
        logger.error("a step does not fit the device's memory", extra={"rows": plan.num_rows}, exc_info=error)
        refused = OverloadedError(
            f"the device's memory has no room for a step of {plan.num_rows} rows, "
            f"of which this session had {part.num_rows}",
            retry_after_s=1.0,
        )
        self.scheduler.committed.errors[part.session.number] = refused

    def _send_states(self) -> None:
        """Queues hidden states for drafters that draft from them; at most `STATE_BYTES` a step."""
        left = STATE_BYTES // max(1, STATE_WIRE_BYTES * self._state_width)
        for session in self.scheduler.running:
            link = session.link
            if link.drafter is None or not link.drafter.wants_states:
                continue
            positions = link.next_states(session.pages.num_computed, left)
            left -= len(positions)
            if positions:
                self.scheduler.tier.queue(link.address, self._states(session, positions))

    def _states(self, session: TargetSession, positions: range) -> CommittedStates:
        slots = [session.pages.slot(position) for position in positions]
        return CommittedStates(
            number=session.number,
            start=positions.start,
            width=self._state_width,
            values=self._cache.state_bytes(slots, self._state_width),
        )

    async def _news(self, compute: Compute) -> DrafterNews:
        drafters = (each.link.drafter for each in self.scheduler.running if self._state_width)
        if any(each is not None and each.wants_states for each in drafters):
            await compute(self._send_states)
        to_drafters, broken = self.scheduler.tier.take()
        if self._inside is not None and (messages := to_drafters.pop(LOCAL, None)):
            self._inside.handle(VerifierMessages(link=_LINK, messages=messages))
        return DrafterNews(to_drafters=to_drafters, broken_links=broken)

    async def _output(self, report: StepReport, compute: Compute) -> TargetOutput:
        self._num_reported = self.num_sessions
        news, report = await self._news(compute), self.scheduler.describe(report)
        return TargetOutput(
            commit=self.scheduler.take_commit(),
            to_drafters=news.to_drafters,
            broken_links=news.broken_links,
            report=report,
        )


# A step that is to be launched: its judging, and its rows.
_Packed = tuple[Verification, Batch]


class _Launched(NamedTuple):
    """A step on the device."""

    plan: StepPlan
    judging: Verification
    pending: Pending


def _pack_ahead(plan: StepPlan, above: _Launched) -> Batch:
    """The rows of a step's tokens to come: those behind the last ones that are known."""
    builder = BatchBuilder()
    builder.add_trees([part.session.pages for part in plan.decoding], plan.guesses)
    known, places = builder.build(), {part.session.number: place for place, part in enumerate(above.judging.parts)}
    return replace(
        known,
        token_ids=np.array([places[part.session.number] for part in plan.decoding]),
        positions=known.positions + 1,
        slots=np.array([part.session.pages.slot(part.start) for part in plan.decoding]),
        context_lens=known.context_lens + 1,
        above=above.pending,
    )


def _pack(plan: StepPlan) -> _Packed:
    """The rows of a step; of each part the logits of its last committed token come first."""
    builder, firsts = BatchBuilder(), list[int]()
    if plan.decoding:
        firsts += builder.add_trees([part.session.pages for part in plan.decoding], plan.guesses)
    if plan.reading:
        firsts += builder.add_prefixes(
            [PrefixRows(part.session.pages, part.start, part.stop, part.commits, part.judged) for part in plan.reading]
        )
    return Verification(plan, firsts), builder.build()


def _prompt_judged(part: Part, first: int, pending: Pending) -> SessionEvent:
    """Log probabilities of tokens of the prompt; `first` is the row of the last committed token, if it has one."""
    stop, logprobs = first if part.commits else first + 1, list[PositionLogprobs]()
    rows = range(stop - len(part.judged), stop)
    for start in range(0, len(rows), READ_ROWS):
        some = slice(start, start + READ_ROWS)
        logprobs += part.session.judge_prompt(part.judged[some], pending.logits(rows[some]))
    return part.session.hand_out_prompt(logprobs)


def _shown_error(session_id: str, error: Exception) -> PacelineError:
    """The error that a session's client gets; one that no user may see is logged instead."""
    if isinstance(error, PacelineError):
        return error
    logger.error("a session failed", extra={"session_id": session_id}, exc_info=error)
    return PacelineError(f"the session failed in the verifier's engine ({type(error).__name__})")
