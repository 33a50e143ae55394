"""A rehearsal: a client runs sessions that nobody requested, and real steps teach the policy the rates of both modes.

It runs while nobody waits, and stops between two steps when a session comes. Its sessions have pages of their own, and
only drafters hear of them. Users begin with the calibrations they measure: on the demo pair the calibrations of both
are the same within their errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Cancel, SetMode, StepReport, Submit, TargetEvent, TargetOutput

logger = logging.getLogger(__name__)

# Time without others' sessions after which a rehearsal begins or goes on: requests one after another leave less.
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


class RehearsalClient:
    """Has an engine run both modes at 1, 2, 4, ... sessions.

    Args:
        identity: The target's identity.
        max_sessions: Number of places for sessions.
        numbers: For its sessions; no other session gets one of them.
        post: Hands the engine an event.
        busy: Whether others have sessions there.
        drafter: Drafter for its sessions; empty: the first one that is linked.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        *,
        max_sessions: int,
        numbers: Iterator[int],
        post: Callable[[TargetEvent], None],
        busy: Callable[[], bool],
        drafter: str = "",
    ) -> None:
        self._identity = identity
        self._numbers = numbers
        self._post = post
        self._busy = busy
        # In the order in which they were linked; the first one drafts.
        self._drafters = dict.fromkeys([drafter] if drafter else ())
        loads = [2**power for power in range(max_sessions.bit_length())]
        # Measurements to come, the next one last, and whether drafters have answered.
        self._left = [(load, drafts) for load in reversed(loads) for drafts in (True, False)]
        self._answered = False
        self._draft = ""
        # Its sessions, and those that were the last to be cancelled.
        self._sessions, self._cancelled = set[int](), set[int]()
        self._measurement = Measurement(0, drafts=False)
        self._spent_s, self._disturbed = 0.0, False
        self._over = asyncio.Event()

    async def run(self, draft: str) -> None:
        """Rehearses with a draft model; returns once all loads are known, or the engine has refused its sessions."""
        self._draft, ended = draft, False
        while not ended:
            # An engine without anything to report takes its last events within a turn.
            ended, self._disturbed = not self._left, self._busy()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), IDLE_S)
                return
            if self._left and self._drafters and not (self._sessions or self._disturbed):
                self._begin()

    def linked(self, address: str, *, up: bool) -> None:
        """A drafter was reached, or lost."""
        if up:
            self._drafters[address] = None
            return
        if address in [*self._drafters][:1]:
            self.interrupt()
        self._drafters.pop(address, None)

    def interrupt(self) -> None:
        """Others need the engine: cancels its sessions; the measurement under way begins anew when it goes on."""
        self._disturbed = True
        if not self._sessions:
            return
        for number in self._sessions:
            self._post(Cancel(number=number))
        self._cancelled, self._sessions = self._sessions, set()
        # A drafter that never answered has shown nothing.
        ends = self._answered and not self._left
        self._post(SetMode(drafts=None, over=self._draft if ends else ""))

    def takes(self, output: TargetOutput) -> bool:
        """Whether an output is of its sessions, which nobody is to see; begins what comes next after it."""
        if not self._sessions:
            if not self._left:
                # It has taken the last events.
                self._over.set()
            # Only those of the step under way still come.
            cancelled, self._cancelled = self._cancelled, set()
            return not cancelled.isdisjoint(output.commit.sessions)
        for error in output.commit.errors.values():
            logger.warning("the engine takes no session of a rehearsal", extra={"error": str(error)})
            self._answered = False
            self._end()
            return True
        for number, event in output.commit.events.items():
            if event.result is not None:
                self._sessions.discard(number)
                self._submit()
        self._measurement.add(output.report)
        self._spent_s += output.report.seconds
        if self._spent_s >= MOST_S:
            extra = {"seconds": round(self._spent_s), "load": self._measurement.load}
            logger.warning("the rehearsal takes too long and ends; larger loads are not rehearsed", extra=extra)
            self._end()
        elif self._measurement.is_over:
            self._left.pop()
            self._answered |= self._measurement.drafts and bool(self._measurement.num_counted)
            if self._left:
                self.interrupt()
                self._begin()
            else:
                self._end()
        return True

    def _begin(self) -> None:
        """Begins what comes next, with sessions that nothing was written of: contexts of both modes are alike."""
        self._measurement = Measurement(*self._left[-1])
        self._post(SetMode(drafts=self._measurement.drafts))
        for _ in range(self._measurement.load):
            self._submit()

    def _end(self) -> None:
        self._left.clear()
        self.interrupt()

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
                max_tokens=max(1, min(self._measurement.load * OUTPUT_TOKENS, longest)),
                temperature=temperatures[number % len(temperatures)],
                seed=number,
                ignore_eos=True,
            ),
            speculation=SpeculationParams(),
            cache_salt=name,
        )
        drafter = next(iter(self._drafters))
        self._post(Submit(request=request, number=number, drafter_address=drafter))
