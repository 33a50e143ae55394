"""Whether a verifier drafts or decodes plainly: measured at each load, not derived.

In `PLAIN` nothing of speculation runs. In `DRAFTING` drafters and the sources inside the verifier work, and steps
verify the guesses that pay. The better mode is the one whose steps commit more tokens a second, all costs included:

    rate[load][mode] = committed tokens / seconds of whole steps, with forgetting.

The other mode is tried now and then, by one rule: trials may lose a small share of the time. A trial begins when what
it is expected to lose has been saved up, so at once where it is expected to win, and ends early when it loses clearly.

Tokens count by session, and seconds in plain steps of the start-up profile, so that steps over five sessions and over
eight compare: a rate of 1 is that of plain decoding as the profile has it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.target_events import Reason

# Steps after which an observation counts half.
HALF_LIFE = 200
# Share of the time that trials may lose.
EXPLORATION = 0.005
# Steps of a trial that count: before it may be called off, usually, and at most.
LEAST_STEPS, USUAL_STEPS, MOST_STEPS = 6, 16, 64
# The most that do not count: drafters read what they have missed, and prompts are read.
MOST_UNCOUNTED = 64
# The most that a trial may lose, in plain steps: 2 % of the first 200 of a load.
MOST_LOST = 4.0
# Standard errors that make a difference clear when a trial begins; the longer it lasts, the smaller a difference will
# do. And the least spread of single steps, as a share of their mean.
CLEAR, LEAST_SPREAD = 3.0, 0.05
# Sessions up to which a load that was never seen begins with drafting: alone, a session nearly always gains.
BEGIN_DRAFTING = 2
# Sessions up to which the first trial is on loan where drafters lend their verifier cores. With more, a step that
# drafts took as long as nine plain ones there, and half a dozen of them a fifth of what such sessions do in their first
# seconds.
MOST_ON_LOAN = 4
# Share by which drafting is taken to be slower while nothing is known of it.
UNKNOWN_LOSS = 1 / 3
# A load stays the same up to this factor, in powers of two.
SAME_LOAD = 0.7
# Octaves by which a load falls from one step to the next, at most. Between two waves of requests there are moments with
# few sessions: drafting for these, drafters on a verifier's cores read every prompt, which cost plain steps 4 %.
FALL = 1 / 8
# Octaves of sessions, and tokens of a session in the time of a plain step, beyond which nobody learns: decisions divide
# by rates.
MOST_LOAD, LEAST_RATE, MOST_RATE = 20, 1e-6, 1e6
# No step counts for more than this many times the usual one: such a delay is an accident.
MOST_DELAY = 3.0


class Mode(enum.Enum):
    """What a verifier does."""

    PLAIN = enum.auto()
    DRAFTING = enum.auto()

    @property
    def other(self) -> Mode:
        return Mode.PLAIN if self is Mode.DRAFTING else Mode.DRAFTING


class Rate:
    """Tokens over time, of steps of one mode at one load.

    Args:
        value: What is known from before; it stands for `LEAST_STEPS` steps. None: nothing.
    """

    def __init__(self, value: float | None = None) -> None:
        # Sums over steps of 1, tokens, time, tokens squared, tokens * time and time squared.
        self._sums = np.zeros(6)
        if value is not None:
            self._sums += LEAST_STEPS * np.array([1.0, value, 1.0, value * value, value, 1.0])

    def add(self, tokens: float, time: float) -> None:
        if self.steps >= LEAST_STEPS:
            time = min(time, MOST_DELAY * self.step_time)
        self._sums += (1.0, tokens, time, tokens * tokens, tokens * time, time * time)

    def keep(self, share: float) -> None:
        """Forgets all but this share."""
        self._sums *= share

    @property
    def steps(self) -> float:
        return float(self._sums[0])

    @property
    def step_time(self) -> float:
        return float(self._sums[2] / self._sums[0])

    @property
    def value(self) -> float:
        """Tokens over time, within the bounds of a rate."""
        return min(max(LEAST_RATE, float(self._sums[1] / self._sums[2])), MOST_RATE)

    @property
    def error(self) -> float:
        value, (steps, tokens, time, tokens2, cross, time2) = self.value, self._sums
        residual = tokens2 - value * (2.0 * cross - value * time2)
        return math.sqrt(max(residual, (LEAST_SPREAD * tokens) ** 2 / steps)) / float(time)


@dataclass(slots=True)
class Trial:
    """The other mode at work for a few steps.

    Args:
        most_lost: What it may lose, in plain steps.

    Attributes:
        counted: Steps that count.
        lost: What it has lost, in plain steps.
    """

    most_lost: float = MOST_LOST
    counted: int = 0
    steps: int = 0
    lost: float = 0.0


@dataclass(slots=True)
class Load:
    """What is known of steps over about so many sessions.

    Args:
        mode: That in use, trials apart.
        loss: Share that drafting is taken to be slower by, before it was tried.
        on_loan: The first trial need not be saved up for: it is paid off later.
        most_lost: What a trial may lose that is not saved up, in plain steps.

    Attributes:
        rates: Of both modes.
        saved: What a trial may lose now, in plain steps; less than 0: what the last ones lost beyond that.
        cut_off: What the last trial had lost when it was cut off before it could show anything.
    """

    mode: Mode
    loss: float = UNKNOWN_LOSS
    on_loan: bool = False
    most_lost: float = MOST_LOST
    rates: dict[Mode, Rate] = field(default_factory=lambda: {mode: Rate() for mode in Mode})
    saved: float = 0.0
    cut_off: float = 0.0
    trial: Trial | None = None

    @property
    def at_work(self) -> Mode:
        """The mode of the next step."""
        return self.mode if self.trial is None else self.mode.other

    def tried(self, mode: Mode) -> bool:
        """Whether a mode's rate is known."""
        return self.rates[mode].steps > 0.0

    def observe(self, tokens: float, time: float, *, reads: bool, answered: bool) -> None:
        """Updates the mode at work with a step; see `DraftingMode.observe`."""
        if not reads:
            self.saved += EXPLORATION * time
            if answered:
                self.count(self.at_work, tokens, time)
        if self.trial is not None:
            self._go_on(self.trial, tokens, time, reads=reads, answered=answered)
        elif self.rates[self.mode].steps >= LEAST_STEPS and (self.on_loan or self._expected_loss() <= self.saved):
            self.trial = Trial(most_lost=max(self.most_lost, self.saved))
            other = self.rates[self.mode.other]
            if other.steps > LEAST_STEPS:
                # The machine and the texts may have changed since.
                other.keep(LEAST_STEPS / other.steps)

    def count(self, mode: Mode, tokens: float, time: float) -> None:
        """Takes a step of a mode into its rate."""
        for rate in self.rates.values():
            # What little is left is kept: better than nothing.
            if rate.steps > 1.0:
                rate.keep(0.5 ** (1.0 / HALF_LIFE))
        self.rates[mode].add(tokens, time)

    def begin_again(self) -> None:
        """Decides by what is known of both modes, which a few steps are enough to change."""
        for rate in self.rates.values():
            rate.keep(min(1.0, LEAST_STEPS / max(rate.steps, 1.0)))
        if all(map(self.tried, Mode)):
            self.mode, self.on_loan = max(Mode, key=lambda mode: self.rates[mode].value), False

    def _go_on(self, trial: Trial, tokens: float, time: float, *, reads: bool, answered: bool) -> None:
        ours, other = self.rates[self.mode], self.rates[self.mode.other]
        trial.steps += 1
        trial.lost += time - tokens / ours.value
        trial.counted += answered and not reads
        over = (
            trial.lost > trial.most_lost or trial.counted >= MOST_STEPS or trial.steps - trial.counted >= MOST_UNCOUNTED
        )
        if trial.counted < LEAST_STEPS:
            if over:
                self.end_trial()
            return
        gain, error = other.value - ours.value, math.hypot(ours.error, other.error)
        if over or abs(gain) > CLEAR * (1.0 - trial.counted / MOST_STEPS) * error:
            self.end_trial(won=gain > 0.0)

    def end_trial(self, *, won: bool = False) -> None:
        """Ends a trial, if there is one, and pays for it."""
        if self.trial is None:
            return
        # Nothing is saved up for several trials in a row.
        self.saved = min(0.0, self.saved - max(0.0, self.trial.lost))
        self.on_loan = self.on_loan and self.trial.steps < LEAST_STEPS and self.trial.lost <= self.most_lost
        self.cut_off = self.trial.lost if self.trial.counted < LEAST_STEPS else 0.0
        self.trial = None
        if won:
            self.mode = self.mode.other

    def _expected_loss(self) -> float:
        """Plain steps that a trial is expected to lose; what is not sure of the mode in use speaks for it."""
        ours, other = self.rates[self.mode], self.mode.other
        if self.tried(other):
            loss = 1.0 - self.rates[other].value / (ours.value + ours.error)
        elif other is Mode.PLAIN:
            loss = 1.0 - 1.0 / (ours.value + ours.error)
        else:
            loss = self.loss
        # One that drafters took too long to answer gets twice as much.
        return max(2.0 * self.cut_off, loss * USUAL_STEPS * ours.step_time)


class DraftingMode:
    """Decides in which mode a verifier's next step runs.

    Args:
        most_on_loan: Sessions up to which a first trial is on loan.
        most_lost: What a trial may lose that is not saved up, in plain steps.

    Attributes:
        loads: By the logarithm of their sessions to the base 2.
        rehearsing: The mode of all steps at present, whatever pays; None: there is no rehearsal.
    """

    def __init__(self, most_on_loan: float = MOST_ON_LOAN, *, most_lost: float = MOST_LOST) -> None:
        self._most_on_loan, self._most_lost = most_on_loan, most_lost
        self.loads: dict[int, Load] = {}
        self.rehearsing: Mode | None = None
        self._at = 0
        # Octaves of sessions, falling slowly.
        self._recent = 0.0
        self._load: Load | None = None

    @property
    def mode(self) -> Mode:
        """That of the next step."""
        return Mode.PLAIN if self._load is None else self.rehearsing or self._load.at_work

    def rehearse(self, mode: Mode | None) -> None:
        """Steps are of one mode from now on, and show what it is worth; None: what they have shown decides again."""
        if self.rehearsing is not None and self._load is not None:
            self._load.begin_again()
        self._leave(None)
        self.rehearsing = mode

    @property
    def reason(self) -> Reason:
        """Why the next step runs in that mode."""
        load = self._load
        if load is None:
            return Reason.NO_DRAFTER
        if load.trial is not None or load.on_loan:
            return Reason.TRYING
        if load.mode is Mode.DRAFTING:
            return Reason.PAYS
        return Reason.DID_NOT_PAY if load.tried(Mode.DRAFTING) else Reason.TOO_LOADED

    def enter(self, num_sessions: int) -> Mode:
        """The next step is to be over so many sessions; 0: none of them may speculate. Returns its mode."""
        if not num_sessions:
            self._leave(None)
            return Mode.PLAIN
        exact = self._recent = max(math.log2(num_sessions), self._recent - FALL)
        if self._load is None or abs(exact - self._at) > SAME_LOAD:
            self._at = round(exact)
            load = self.loads.get(self._at)
            if load is None:
                load = self.loads[self._at] = self._new_load(self._at)
                load.most_lost = self._most_lost
            self._leave(load)
        return self.mode

    def observe(
        self, *, num_sessions: int, tokens: int, seconds: float, plain_s: float, reads: bool, answered: bool
    ) -> None:
        """Adds a step; one that brought no token, or took no time, is ignored.

        Args:
            num_sessions: Those that decoded.
            tokens: What they committed.
            seconds: From the end of the step before it, without what prompts took.
            plain_s: What a plain step over as many sessions takes by the start-up profile.
            reads: Whether it read many rows of prompts: such a step counts for neither mode.
            answered: Whether drafters have answered, if they are to: before, a step does not show what they are worth.
        """
        if self._load is None or not num_sessions or abs(math.log2(num_sessions) - self._at) > SAME_LOAD:
            # While a load falls, steps are of fewer sessions than it stands for.
            return
        each, time = tokens / num_sessions, seconds / plain_s
        if not 0.0 < LEAST_RATE * time <= each <= MOST_RATE * time:
            return
        if self.rehearsing is None:
            self._load.observe(each, time, reads=reads, answered=answered)
        elif answered and not reads:
            self._load.count(self.rehearsing, each, time)

    def _leave(self, load: Load | None) -> None:
        if load is None:
            self._recent = 0.0
        if self._load is not None and self._load is not load:
            self._load.end_trial()
        self._load = load

    def _new_load(self, at: int) -> Load:
        """How a load begins that was never seen: drafting gains less as load rises."""
        above = [known for place, known in self.loads.items() if place > at and known.tried(Mode.DRAFTING)]
        if any(known.mode is Mode.DRAFTING for known in above):
            return Load(Mode.DRAFTING)
        below = [
            known
            for place, known in self.loads.items()
            if place < at and known.mode is Mode.PLAIN and all(map(known.tried, Mode))
        ]
        if below:
            ratio = min(known.rates[Mode.DRAFTING].value / known.rates[Mode.PLAIN].value for known in below)
            return Load(Mode.PLAIN, loss=max(0.0, 1.0 - ratio))
        if 2**at <= BEGIN_DRAFTING:
            return Load(Mode.DRAFTING)
        return Load(Mode.PLAIN, on_loan=2**at <= self._most_on_loan)

    def learned(self) -> list[float]:
        """Of each load its logarithm and both rates, 0 for one that is not known; see `resume`."""
        rows = [
            (float(at), *(load.rates[mode].value if load.tried(mode) else 0.0 for mode in Mode))
            for at, load in sorted(self.loads.items())
        ]
        return [value for row in rows for value in row]

    def resume(self, learned: Sequence[float]) -> None:
        """Begins where a predecessor ended; a few steps are enough to change it.

        Raises:
            ValueError: It is not what `learned` gives.
        """
        loads: dict[int, Load] = {}
        for at, *values in zip(*[iter(learned)] * 3, strict=True):
            if not 0.0 <= at <= MOST_LOAD or not 0.0 <= min(values) <= max(values) <= MOST_RATE:
                raise ValueError(f"needs loads to {MOST_LOAD} and rates to {MOST_RATE:g}, got {at:g} with {values}")
            rates = {mode: Rate(value or None) for mode, value in zip(Mode, values, strict=True)}
            mode = Mode.DRAFTING if values[1] > values[0] else Mode.PLAIN
            # What did not pay on a busy machine or with another drafter is tried anew, as if it were not known.
            on_loan = mode is Mode.PLAIN and 2**at <= self._most_on_loan
            loads[int(at)] = Load(mode, on_loan=on_loan, most_lost=self._most_lost, rates=rates)
        self.loads = loads
        self._leave(None)
