"""A rehearsal: sessions that nobody asked for run real steps, and teach the policy what both modes are worth.

It goes on while nobody waits, and stops between two steps when a session comes. Its sessions have pages of their own,
and only drafters hear of them. Users begin with the calibrations they measure: on the demo pair the calibrations of
both are the same within their errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    LinkChanged,
    Outcome,
    SetMode,
    StepReport,
    Submit,
    TargetEvent,
    TargetOutput,
    TuningLoaded,
)
from paceline.engine.loop import Compute, Stepper, inline

logger = logging.getLogger(__name__)

# Time without anything to do after which a rehearsal begins or goes on: requests one after another leave less.
IDLE_S = 1.0
# Tokens of a single session; n sessions have n times as many, so that few steps prefill the next one. Long greedy
# texts of small models turn in circles, which any drafter can follow.
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64
# Temperatures of its sessions by turns.
TEMPERATURES = (0.0, 0.8)
# Steps that count, of one mode at one load: as many as fit this time, within these bounds. The policy goes by six.
TAKE_S, LEAST_STEPS, MOST_STEPS = 0.7, 8, 64
# Longest rehearsal, its pauses left out. A quiet machine needs less than a minute; on one that others use, what the
# small loads have shown must do, and real traffic shows the rest.
MOST_S = 180.0
# Steps that do not count: prompts are read, and drafters read what they have missed.
MOST_UNCOUNTED = 32


@dataclass(slots=True)
class Measurement:
    """Steps of one mode at one load."""

    load: int
    drafts: bool
    num_steps: int = 0
    num_counted: int = 0
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        enough = self.num_counted >= LEAST_STEPS and self.seconds >= TAKE_S
        return enough or self.num_counted >= MOST_STEPS or self.num_steps - self.num_counted >= MOST_UNCOUNTED

    def add(self, report: StepReport) -> None:
        if report.num_rows:
            self.num_steps += 1
            self.seconds += report.seconds
            self.num_counted += bool(report.gammas) and not report.num_prefill_rows and report.responded


class RehearsingEngine:
    """An engine that rehearses when no engine of its kind has: at 1, 2, 4, ... sessions both modes.

    Args:
        engine: The engine that runs the target model.
        identity: The target's identity.
        max_sessions: Number of places for sessions.
        numbers: For its sessions; no other session gets one of them.
        clock: Seconds, monotonic.
        over: Called once the rehearsal has ended, or the engine has refused its sessions.
        drafter: Drafter for its sessions; empty: the first one that is reached.
    """

    def __init__(
        self,
        engine: Stepper[TargetEvent, DrafterNews],
        identity: ModelIdentity,
        *,
        max_sessions: int,
        numbers: Iterator[int],
        clock: Callable[[], float],
        over: Callable[[], None],
        drafter: str = "",
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._numbers = numbers
        self._clock = clock
        self._over = over
        # In the order in which they were reached; the first one drafts.
        self._drafters = dict.fromkeys([drafter] if drafter else ())
        loads = [2**power for power in range(max_sessions.bit_length())]
        # Measurements to come, the next one last, and whether drafters have answered.
        self._left = [(load, drafts) for load in reversed(loads) for drafts in (True, False)]
        self._answered = False
        # The draft model with which it is to rehearse; empty: not requested.
        self._told_to = ""
        self._sessions: set[int] = set()
        self._take = Measurement(0, drafts=False)
        self._idle_since_s = clock()
        self._spent_s, self._since_s = 0.0, clock()

    def handle(self, event: TargetEvent) -> None:
        match event:
            case TuningLoaded(learned=None):
                self._told_to = event.draft
                return
            case TuningLoaded():
                self._left.clear()
            case Submit():
                self._stop()
            case LinkChanged():
                self._change_link(event)
        self._engine.handle(event)

    @property
    def _drafter(self) -> str:
        return next(iter(self._drafters), "")

    def _change_link(self, event: LinkChanged) -> None:
        if event.up:
            self._drafters[event.address] = None
            return
        if event.address == self._drafter:
            self._stop()
        self._drafters.pop(event.address, None)

    @property
    def _wants_to(self) -> bool:
        return bool(self._told_to and self._left and self._drafter)

    def has_work(self) -> bool:
        """Whether the engine has work, or it is to rehearse."""
        return self._engine.has_work() or self._wants_to

    def patience_s(self) -> float:
        """The engine's patience; while it is idle, the time until it rehearses."""
        if self._engine.has_work():
            return self._engine.patience_s()
        return max(0.0, self._idle_since_s + IDLE_S - self._clock())

    async def step(self, compute: Compute = inline, tell: Callable[[DrafterNews], None] | None = None) -> DrafterNews:
        """Runs a step; of a rehearsed step, only messages to drafters are handed on."""
        if not self._engine.has_work():
            self._since_s = self._clock()
            self._begin()
        if not self._sessions:
            output = await self._engine.step(compute, tell)
            self._idle_since_s = self._clock()
            return output

        outcomes = list[Outcome]()

        def hide(news: DrafterNews) -> DrafterNews:
            outcomes.extend(news.outcomes() if isinstance(news, TargetOutput) else ())
            return DrafterNews(to_drafters=news.to_drafters, broken_links=news.broken_links)

        output = await self._engine.step(compute, None if tell is None else lambda news: tell(hide(news)))
        hidden = hide(output)
        self._go_on(outcomes, output.report if isinstance(output, TargetOutput) else StepReport())
        return hidden

    def _go_on(self, outcomes: Sequence[Outcome], report: StepReport) -> None:
        """Takes in what came of a step, and begins what comes next once it has shown enough."""
        for number, outcome in outcomes:
            if isinstance(outcome, PacelineError):
                logger.warning("the engine takes no session of a rehearsal", extra={"error": str(outcome)})
                self._stop(gives_up=True)
                return
            if outcome.result is not None:
                self._sessions.discard(number)
                self._submit()
        self._take.add(report)
        now_s = self._clock()
        self._spent_s, self._since_s = self._spent_s + now_s - self._since_s, now_s
        if self._spent_s >= MOST_S:
            extra = {"seconds": round(self._spent_s), "load": self._take.load}
            logger.warning("the rehearsal takes too long and ends; larger loads are not rehearsed", extra=extra)
            self._left.clear()
            self._stop()
        elif self._take.is_over:
            self._left.pop()
            self._answered |= self._take.drafts and bool(self._take.num_counted)
            self._stop()
            if self._left:
                self._begin()

    def _begin(self) -> None:
        """Begins what comes next, with sessions that nothing was written of: contexts of both modes are alike."""
        self._take = take = Measurement(*self._left[-1])
        self._engine.handle(SetMode(drafts=take.drafts))
        for _ in range(take.load):
            self._submit()

    def _stop(self, *, gives_up: bool = False) -> None:
        """Ends its sessions; a take that is under way begins anew when it goes on."""
        if not self._sessions:
            return
        for number in self._sessions:
            self._engine.handle(Cancel(number=number))
        self._sessions.clear()
        # A drafter that never answered has shown nothing.
        ends = self._answered and not self._left
        self._engine.handle(SetMode(drafts=None, over=self._told_to if ends else ""))
        if gives_up:
            self._left.clear()
        if not self._left:
            self._over()

    def _submit(self) -> None:
        number = next(self._numbers)
        self._sessions.add(number)
        luck = np.random.default_rng(number)
        size, name = self._identity.vocab_size, f"rehearsal-{number}"
        longest = self._identity.context_len - PROMPT_TOKENS
        # Texts of simulated devices have one next token.
        temperatures: Sequence[float] = TEMPERATURES[:1] if self._identity.simulated else TEMPERATURES
        request = GenerateRequest(
            session_id=name,
            epoch=0,
            prompt_token_ids=tuple(luck.integers(0, size, PROMPT_TOKENS).tolist()),
            sampling=SamplingParams(
                max_tokens=max(1, min(self._take.load * OUTPUT_TOKENS, longest)),
                temperature=temperatures[number % len(temperatures)],
                seed=number,
                ignore_eos=True,
            ),
            speculation=SpeculationParams(),
            cache_salt=name,
        )
        self._engine.handle(Submit(request=request, number=number, drafter_address=self._drafter))
