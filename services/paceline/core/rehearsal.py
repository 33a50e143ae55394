"""A rehearsal: sessions that nobody asked for show what steps take and bring, with drafters and without.

A state machine without clock or socket: it takes in what an engine has done, and says what the engine is to do. It may
stop at any step, and goes on with the steps that it has not seen. The engine tells its sessions by serials below 0:
their pages and calibrations are their own, and their steps teach its policy nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from statistics import median

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.step_profile import GUESSES, StepProfile, Take
from paceline.core.target_events import Cancel, Rehearse, Submit, TargetEvent, TargetOutput

# Sessions of which steps are seen, beside as many as have places.
LOADS = (1, 4, 16, 64, 256)
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 1024
# Of its sessions by turns.
TEMPERATURES = (0.0, 0.8)


class Rehearsal:
    """Runs every kind of step at every load.

    Args:
        drafter: Address of the drafter of its sessions.
        max_sessions: Those that have places.
        vocab_size: Of the target.
        context_len: Most tokens of a session.
        temperatures: Of the sessions by turns.

    Attributes:
        failed: Whether the engine refused a session, so that there is no profile.
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
        loads = [*(load for load in LOADS if load < max_sessions), max_sessions]
        self.takes = [Take(num_sessions=load, gamma=gamma) for load in loads for gamma in (None, *GUESSES)]
        self.failed = False
        self._drafter = drafter
        self._temperatures = temperatures
        self._vocab_size, self._output_tokens = vocab_size, min(OUTPUT_TOKENS, context_len - PROMPT_TOKENS)
        self._serials = count(-1, -1)
        self._running: set[int] = set()
        self._take: Take | None = None

    @property
    def at_work(self) -> bool:
        return bool(self._running)

    @property
    def is_done(self) -> bool:
        return all(take.is_done for take in self.takes)

    def go_on(self) -> list[TargetEvent]:
        """Begins, or goes on with what has not been seen; once there is nothing left, stops."""
        self._take = next((take for take in self.takes if not take.is_done), None)
        if self._take is None or self.failed:
            return self.stop()
        events: list[TargetEvent] = []
        if len(self._running) != self._take.num_sessions:
            events = [*self._cancel(), *(self._submit() for _ in range(self._take.num_sessions))]
        return [*events, Rehearse(take=self._take)]

    def saw(self, output: TargetOutput) -> list[TargetEvent]:
        """Takes in what the engine has done."""
        if self._take is None:
            return []
        if self._take.drafts:
            self._take.delays += output.report.round_trips_s
        events = list[TargetEvent]()
        for serial, each in output.committed:
            if serial not in self._running:
                continue
            if isinstance(each, PacelineError):
                self.failed = True
                return self.stop()
            if each.result is not None:
                self._running.discard(serial)
                events.append(self._submit())
        return [*events, *self.go_on()] if self._take.is_done else events

    def stop(self) -> list[TargetEvent]:
        """Ends its sessions; a take that is under way begins anew."""
        if self._take is not None and not self._take.is_done:
            self._take.steps.clear()
        self._take = None
        return [*self._cancel(), Rehearse(take=None)] if self._running else []

    def profile(self) -> StepProfile:
        """What was seen, once all of it was."""
        loads = sorted({take.num_sessions for take in self.takes})
        plain = {take.num_sessions: take for take in self.takes if not take.drafts}
        rows = [[take for take in self.takes if take.drafts and take.num_sessions == load] for load in loads]
        means = [[take.means() for take in row] for row in rows]
        delays = [[each for take in row for each in take.delays] for row in rows]
        return StepProfile(
            loads=tuple(map(float, loads)),
            plain=tuple(plain[load].means()[2] for load in loads),
            guesses=tuple(_increasing([guesses for guesses, _, _ in row]) for row in means),
            drafting=tuple(tuple(seconds for _, _, seconds in row) for row in means),
            tokens=tuple(tuple(tokens for _, tokens, _ in row) for row in means),
            delay=tuple(median(each) if each else 0.0 for each in delays),
        )

    def _cancel(self) -> list[TargetEvent]:
        running, self._running = self._running, set()
        return [Cancel(session_id=_name(serial), serial=serial) for serial in sorted(running)]

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


def _increasing(values: Sequence[float]) -> tuple[float, ...]:
    """The same, each a little more than the one before at least: a drafter may bring no more however many are asked."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] + 0.01) if found else value)
    return tuple(found)
