"""A rehearsal: sessions that nobody asked for run real steps, and teach the controller what both modes are worth.

A state machine without clock or socket: it takes in what an engine has done, and says what the engine is to do. It may
stop at any step: what was learned stays, and it goes on with what is left. The engine tells its sessions by serials
below 0: their pages and calibrations are their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Cancel, Rehearse, StepReport, Submit, TargetEvent, TargetOutput

PROMPT_TOKENS, OUTPUT_TOKENS = 8, 1024
# Steps of one mode at one load: most, and fewer once they have taken so long. Some pass while drafters read; six that
# count are as many as the controller goes by.
MOST_STEPS, LEAST_STEPS, TAKE_S = 40, 16, 1.0
# Of its sessions by turns.
TEMPERATURES = (0.0, 0.8)


class Rehearsal:
    """Runs steps of both modes over 1, 2, 4, ... sessions, up to as many as have places.

    Args:
        drafter: Address of the drafter of its sessions.
        max_sessions: Those that have places.
        vocab_size: Of the target.
        context_len: Most tokens of a session.
        temperatures: Of the sessions by turns.

    Attributes:
        failed: Whether the engine refused a session.
    """

    def __init__(
        self,
        *,
        drafter: str,
        max_sessions: int,
        vocab_size: int,
        context_len: int,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> None:
        loads = [2**power for power in range(max_sessions.bit_length())]
        # Those that are left, the next one last.
        self._takes = [(load, drafts) for load in reversed(loads) for drafts in (True, False)]
        self.failed = False
        self._drafter = drafter
        self._temperatures = temperatures
        self._vocab_size, self._output_tokens = vocab_size, min(OUTPUT_TOKENS, context_len - PROMPT_TOKENS)
        self._serials = count(-1, -1)
        self._running: set[int] = set()
        # Steps of the take under way, and their seconds.
        self._num_steps, self._seconds = 0, 0.0

    @property
    def at_work(self) -> bool:
        return bool(self._running)

    @property
    def is_over(self) -> bool:
        return self.failed or not self._takes

    def go_on(self) -> list[TargetEvent]:
        """Begins, or goes on with what is left; once nothing is, stops."""
        if self.is_over:
            return self.stop()
        load, drafts = self._takes[-1]
        self._num_steps, self._seconds = 0, 0.0
        # First of all: nobody is to see a step with these sessions.
        return [Rehearse(drafts=drafts), *(self._submit() for _ in range(load - len(self._running)))]

    def saw(self, output: TargetOutput) -> list[TargetEvent]:
        """Takes in what the engine has done."""
        events = list[TargetEvent]()
        for serial, outcome in output.committed:
            if serial not in self._running:
                continue
            if isinstance(outcome, PacelineError):
                self.failed = True
                return self.stop()
            if outcome.result is not None:
                self._running.discard(serial)
                events.append(self._submit())
        if self._running and self._is_done(output.report):
            self._takes.pop()
            events += self.go_on()
        return events

    def stop(self) -> list[TargetEvent]:
        """Ends its sessions; a take that is under way begins anew."""
        running, self._running = self._running, set()
        if not running:
            return []
        left = [Cancel(session_id=_name(serial), serial=serial) for serial in sorted(running)]
        return [*left, Rehearse(drafts=None, over=not self._takes)]

    def _is_done(self, report: StepReport) -> bool:
        """Counts a step; returns whether it was the last one of its kind."""
        if report.gammas and not report.num_prefill_rows:
            self._num_steps += 1
            self._seconds += report.seconds
        return self._num_steps >= (LEAST_STEPS if self._seconds >= TAKE_S else MOST_STEPS)

    def _submit(self) -> Submit:
        serial = next(self._serials)
        self._running.add(serial)
        luck = np.random.default_rng(-serial)
        request = GenerateRequest(
            session_id=_name(serial),
            epoch=0,
            prompt_token_ids=tuple(luck.integers(0, self._vocab_size, PROMPT_TOKENS).tolist()),
            sampling=SamplingParams(
                max_tokens=self._output_tokens,
                temperature=self._temperatures[serial % len(self._temperatures)],
                seed=-serial,
                ignore_eos=True,
            ),
            speculation=SpeculationParams(),
            cache_salt=_name(serial),
        )
        return Submit(request=request, serial=serial, drafter_address=self._drafter)


def _name(serial: int) -> str:
    return f"rehearsal{serial}"
