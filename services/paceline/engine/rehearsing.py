"""A rehearsal: sessions that nobody asked for run real steps, and teach the policy what both modes are worth.

It goes on while nobody waits, and stops between two steps when a session comes. Its sessions have pages and
calibrations of their own, and only drafters hear of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    LinkChanged,
    Outcome,
    Rehearse,
    StepReport,
    Submit,
    TargetEvent,
    TargetOutput,
    Taught,
)
from paceline.engine.loop import Compute, Stepper, here

logger = logging.getLogger(__name__)

# Time without anything to do after which a rehearsal begins or goes on: requests one after another leave less.
IDLE_S = 1.0
# Of a session alone; of several, so many times as many, so that few steps read the prompt of the next one. Long greedy
# texts of small models turn in circles, which any drafter can follow.
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64
# Of its sessions by turns.
TEMPERATURES = (0.0, 0.8)
# Steps that count, of one mode at one load: as many as fit this time, within these bounds. The policy goes by six.
TAKE_S, LEAST_STEPS, MOST_STEPS = 0.7, 8, 64
# Steps that do not count: prompts are read, and drafters read what they have missed.
MOST_UNCOUNTED = 32


class RehearsingEngine:
    """An engine that rehearses once it is told that nobody of its kind has: at 1, 2, 4, ... sessions both modes.

    Args:
        engine: What runs the target model.
        identity: Of that.
        max_sessions: Those that have places.
        numbers: For its sessions; no other session gets one of them.
        clock: Seconds, monotonic.
        over: Called once both modes are known at all loads, or the engine takes no such session.
        drafter: Who drafts for its sessions; empty: the first one that is reached.
    """

    def __init__(
        self,
        engine: Stepper[TargetEvent, DrafterNews],
        identity: ModelIdentity,
        *,
        max_sessions: int,
        numbers: Iterator[int],
        clock: Callable[[], float],
        over: Callable[[], None] = lambda: None,
        drafter: str = "",
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._numbers = numbers
        self._clock = clock
        self._over = over
        self._drafter = drafter
        loads = [2**power for power in range(max_sessions.bit_length())]
        # What is left, the next one last.
        self._left = [(load, drafts) for load in reversed(loads) for drafts in (True, False)]
        self._told_to = False
        self._sessions: set[int] = set()
        self._take, self._output_tokens = _Take(), OUTPUT_TOKENS
        self._idle_since_s = clock()

    def handle(self, event: TargetEvent) -> None:
        match event:
            case Taught(learned=None):
                self._told_to = True
                return
            case Taught():
                self._left.clear()
            case Submit():
                self._stop()
            case LinkChanged():
                self._change_link(event)
        self._engine.handle(event)

    def _change_link(self, event: LinkChanged) -> None:
        if event.up:
            self._drafter = self._drafter or event.address
        elif event.address == self._drafter:
            self._stop()
            self._drafter = ""

    @property
    def _wants_to(self) -> bool:
        return bool(self._told_to and self._left and self._drafter)

    def has_work(self) -> bool:
        """Whether the engine has work, or it is to rehearse."""
        return self._engine.has_work() or self._wants_to

    def patience_s(self) -> float:
        """That of the engine; while it has nothing to do, the time until it rehearses."""
        if self._engine.has_work():
            return self._engine.patience_s()
        return max(0.0, self._idle_since_s + IDLE_S - self._clock())

    async def step(self, compute: Compute = here, tell: Callable[[DrafterNews], None] | None = None) -> DrafterNews:
        """Runs a step; of one that is rehearsed, what drafters are told is all that is handed on."""
        if not self._engine.has_work():
            self._begin()
        if not self._sessions:
            output = await self._engine.step(compute, tell)
            self._idle_since_s = self._clock()
            return output

        outcomes = list[Outcome]()

        def hide(news: DrafterNews) -> DrafterNews:
            outcomes.extend(news.committed if isinstance(news, TargetOutput) else ())
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
        if self._take.is_over(report):
            self._left.pop()
            self._stop()
            if self._left:
                self._begin()

    def _begin(self) -> None:
        """Begins what comes next, with sessions that nothing was written of: contexts of both modes are alike."""
        load, drafts = self._left[-1]
        self._take = _Take()
        self._engine.handle(Rehearse(drafts=drafts))
        longest = self._identity.context_len - PROMPT_TOKENS
        self._output_tokens = max(1, min(load * OUTPUT_TOKENS, longest))
        for _ in range(load):
            self._submit()

    def _stop(self, *, gives_up: bool = False) -> None:
        """Ends its sessions; a take that is under way begins anew when it goes on."""
        if not self._sessions:
            return
        for number in self._sessions:
            self._engine.handle(Cancel(number=number))
        self._sessions.clear()
        self._engine.handle(Rehearse(drafts=None, over=not self._left))
        if gives_up:
            self._left.clear()
        if not self._left:
            self._over()

    def _submit(self) -> None:
        number = next(self._numbers)
        self._sessions.add(number)
        luck = np.random.default_rng(number)
        size, name = self._identity.vocab_size, f"rehearsal-{number}"
        # Texts of simulated devices have one next token.
        temperatures: Sequence[float] = TEMPERATURES[:1] if self._identity.simulated else TEMPERATURES
        request = GenerateRequest(
            session_id=name,
            epoch=0,
            prompt_token_ids=tuple(luck.integers(0, size, PROMPT_TOKENS).tolist()),
            sampling=SamplingParams(
                max_tokens=self._output_tokens,
                temperature=temperatures[number % len(temperatures)],
                seed=number,
                ignore_eos=True,
            ),
            speculation=SpeculationParams(),
            cache_salt=name,
        )
        self._engine.handle(Submit(request=request, number=number, drafter_address=self._drafter))


class _Take:
    """Steps of one mode at one load."""

    def __init__(self) -> None:
        self._steps = self._counted = 0
        self._seconds = 0.0

    def is_over(self, report: StepReport) -> bool:
        """Adds a step; returns whether it was the last one."""
        if report.num_rows:
            self._steps += 1
            self._seconds += report.seconds
            self._counted += bool(report.gammas) and not report.num_prefill_rows and report.answered
        enough = self._counted >= LEAST_STEPS and self._seconds >= TAKE_S
        return enough or self._counted >= MOST_STEPS or self._steps - self._counted >= MOST_UNCOUNTED
