"""Chooses who drafts for a verifier's steps: measured at each load, not derived.

In `PLAIN` nothing of speculation runs. In `SOURCES` the sources inside the verifier guess alone. In `DRAFTING` drafters
work as well. The best mode is the one whose steps commit most tokens a second, all costs included:

    rate[load][mode] = committed tokens / seconds of whole steps, with forgetting.

Other modes are tried now and then, by one rule: trials may lose a small share of the time. Each load has an allowance
that grows by this share; a trial begins when the allowance covers its expected loss, and ends before the step that
would exceed it, or as soon as the difference is clear. A trial of drafting begins with a call: until drafters respond,
its steps are plain ones.

Tokens count by session, and seconds by the start-up profile's step of so many sessions, so that steps over five
sessions and over eight compare. Losses count in steps of the mode in use.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from paceline.core.step_time import MOST_FACTOR
from paceline.core.target_events import Reason

# Steps after which an observation counts half, and the most of a trial: so many count, or do not. With 200, eight
# sampled streams stayed for 80 steps in a mode that greedy ones had won, and lost 3 % of 190.
HALF_LIFE = MOST_STEPS = 64
# Steps of a trial that count before it may be called off, and usually.
LEAST_STEPS, USUAL_STEPS = 6, MOST_STEPS / 4
# Share of the time that trials may lose; and in steps, the allowance of a load that was never seen, and the least of it
# for which a mode of which nothing is known is tried, or that any trial may lose.
EXPLORATION, ALLOWANCE = 0.005, 2.5
LEAST_LOST = ALLOWANCE / 5
# Standard errors that make a difference clear when a trial begins; the longer it lasts, the smaller a difference will
# do. And the least spread of single steps, as a share of their mean.
CLEAR, LEAST_SPREAD = 3.0, 0.05
# Sessions up to which drafting is tried at once where drafters lend their verifier cores, and the share by which it is
# expected to be slower with more: there a step that drafts took as long as nine plain ones.
MAX_EAGER_BATCH, UNKNOWN_LOSS = 4, 1 / 3
# A load stays the same up to this factor, in powers of two, and falls by so many of them in a step, at most. Between
# two waves of requests there are moments with few sessions: drafting for these, drafters on a verifier's cores read
# every prompt, which cost plain steps 4 %.
SAME_LOAD, FALL = 0.7, 1 / 8
# No step counts for more than this many usual ones: a longer one is an accident.
MOST_DELAY = 3.0
# Rates, their inverses, and sessions beyond which nothing is learned: decisions divide by rates.
MOST_RATE = MOST_FACTOR
MOST_LOAD = int(math.log2(MOST_RATE))


class Mode(enum.StrEnum):
    """Origin of a step's guesses: none, sources inside the verifier, or drafters and sources."""

    PLAIN = "plain"
    SOURCES = "sources"
    DRAFTING = "drafting"


Modes = Collection[Mode]


class Rate:
    """Tokens over time, of steps of one mode at one load.

    Args:
        value: A rate known from before; it stands for `LEAST_STEPS` steps of a token each. 0: none.

    Attributes:
        num_seen: Steps that were ever added.
        steps: Their weight; older ones count less.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.num_seen = LEAST_STEPS if value else 0
        self.steps = float(self.num_seen)
        self._means = _moments(1.0, 1.0 / max(value, 1.0 / MOST_RATE)) if value else _moments(0.0, 0.0)

    def add(self, tokens: float, time: float) -> None:
        if self.steps >= LEAST_STEPS:
            time = min(time, MOST_DELAY * self.step_time)
        self.num_seen += 1
        self.steps += 1.0
        moments = zip(self._means, _moments(tokens, time), strict=True)
        self._means = [mean + (moment - mean) / self.steps for mean, moment in moments]

    @property
    def is_known(self) -> bool:
        return self.num_seen > 0

    @property
    def step_time(self) -> float:
        return self._means[1]

    @property
    def value(self) -> float:
        """Tokens over time; 0 before the first step."""
        return self._means[0] / self._means[1] if self.is_known else 0.0

    @property
    def error(self) -> float:
        """Standard error of that; 0 before the first step."""
        if not self.is_known:
            return 0.0
        value, (tokens, time, tokens2, cross, time2) = self.value, self._means
        variance = max(tokens2 - value * (2.0 * cross - value * time2), (LEAST_SPREAD * tokens) ** 2)
        return math.sqrt(variance / max(self.steps, 1.0 / MOST_RATE)) / time


def _moments(tokens: float, time: float) -> list[float]:
    return [tokens, time, tokens * tokens, tokens * time, time * time]


@dataclass(slots=True)
class Trial:
    """Another mode at work for a few steps.

    Attributes:
        call: Steps that do not count, as drafters have not responded.
        call_lost: Loss of these so far, in steps of the mode in use.
        steps: Those that count.
        lost: Loss of these.
    """

    mode: Mode
    call: Rate = field(default_factory=Rate)
    call_lost: float = 0.0
    steps: int = 0
    lost: float = 0.0


@dataclass(slots=True)
class Load:
    """The rates of steps over about so many sessions, and one allowance for all trials.

    Args:
        mode: The mode in use, trials apart.
        least_loss: Steps that a trial of drafting is expected to lose at least, before it has shown anything.

    Attributes:
        allowance: Loss that trials may still cause, in steps; less than 0: they have lost more.
        possible: Modes that the next step's sessions can be served in.
    """

    mode: Mode
    least_loss: float = 0.0
    rates: dict[Mode, Rate] = field(default_factory=lambda: {mode: Rate() for mode in Mode})
    allowance: float = ALLOWANCE
    trial: Trial | None = None
    possible: Modes = tuple(Mode)

    @property
    def current(self) -> Mode:
        """The mode of the next step."""
        return self.usual if self.trial is None else self.trial.mode

    @property
    def usual(self) -> Mode:
        """The mode in use, or the best one that is possible instead."""
        return self.mode if self.mode in self.possible else max(self.possible, key=self._value)

    def _value(self, mode: Mode) -> float:
        return self.rates[mode].value

    def allow(self, possible: Modes) -> None:
        """Limits the next step to some modes."""
        usual, self.possible = self.usual, possible
        if self.trial is not None and (self.trial.mode not in possible or usual is not self.usual):
            self.end_trial()

    def observe(self, tokens: float, time: float, *, has_prefill: bool, responded: bool) -> None:
        """Updates the current mode with a step; see `DraftingMode.observe`."""
        trial, usual = self.trial, self.rates[self.usual]
        # A step of the settled mode costs its time whether drafters have responded or not.
        counts = not has_prefill and (responded or (trial is None and usual.is_known))
        if counts:
            self.count(self.current, tokens, time)
        if not has_prefill and usual.is_known:
            self.allowance += EXPLORATION * min(time / usual.step_time, MOST_DELAY)
        if trial is not None:
            self._continue(trial, tokens, time, counts=counts)
        elif usual.steps >= LEAST_STEPS:
            self._begin_trial()

    def count(self, mode: Mode, tokens: float, time: float) -> None:
        """Adds a step of a mode to its rate; those of all modes count a little less."""
        for rate in self.rates.values():
            rate.steps *= 0.5 ** (1.0 / HALF_LIFE)
        self.rates[mode].add(tokens, time)

    def settle(self) -> None:
        """Decides by the known rates, which a few steps are enough to change."""
        for rate in self.rates.values():
            rate.steps = min(rate.steps, LEAST_STEPS)
        if self.rates[Mode.PLAIN].is_known and self.rates[Mode.DRAFTING].is_known:
            self.mode, self.least_loss = max(Mode, key=self._value), 0.0

    def _begin_trial(self) -> None:
        """Begins a trial if the allowance covers its expected loss: of a better mode, else of the one least known."""
        losses = {mode: self._expected_loss(mode) for mode in reversed(Mode) if mode in self.possible}
        del losses[self.usual]
        # Of equal ones, drafting.
        best = min(losses, key=lambda mode: (losses[mode] > 0.0 and self.rates[mode].steps, losses[mode]), default=None)
        if best is not None and losses[best] <= max(0.0, self.allowance):
            self.trial = Trial(best)
            # The machine and the texts may have changed since.
            self.rates[best].steps = min(self.rates[best].steps, LEAST_STEPS)

    def _expected_loss(self, mode: Mode) -> float:
        """Steps that a trial is expected to lose; the error of the mode in use speaks for it."""
        usual, rate, loss = self.rates[self.usual], self.rates[mode], LEAST_LOST
        if rate.is_known:
            loss = USUAL_STEPS * (1.0 - rate.value / (usual.value + usual.error))
        return max(loss, self.least_loss) if mode is Mode.DRAFTING and self.least_loss else loss

    def _continue(self, trial: Trial, tokens: float, time: float, *, counts: bool) -> None:
        usual, tried = self.rates[self.usual], self.rates[trial.mode]
        if counts:
            trial.steps += 1
            # A pause of the machine is no loss of the mode.
            trial.lost += min((time - tokens / usual.value) / usual.step_time, MOST_DELAY)
            # With one more step like those before.
            lost = trial.lost * (1.0 + 1.0 / trial.steps)
        else:
            # A call's steps are plain ones, and lose what is clear.
            trial.call.add(tokens, min(time, MOST_DELAY * usual.step_time))
            most = trial.call.value + math.hypot(trial.call.error, usual.error)
            lost = trial.call_lost = trial.call.steps * max(0.0, usual.value / most - 1.0)
        exceeds = lost > max(self.allowance, LEAST_LOST)
        over = exceeds or max(trial.steps, trial.call.steps) >= MOST_STEPS
        if not trial.steps:
            if over:
                # It has shown nothing, or at most that a call costs more than was allowed.
                self.least_loss = 2.0 * max(trial.call_lost, ALLOWANCE) if exceeds else ALLOWANCE
                self.allowance = min(self.allowance, trial.call_lost)
                self.end_trial()
            return
        if trial.mode is Mode.DRAFTING:
            self.least_loss = 0.0
        gain, error = tried.value - usual.value, math.hypot(usual.error, tried.error)
        is_known = trial.steps >= LEAST_STEPS
        if over or (is_known and abs(gain) > CLEAR * (1.0 - trial.steps / MOST_STEPS) * error):
            self.end_trial(won=is_known and gain > 0.0)

    def end_trial(self, *, won: bool = False) -> None:
        """Ends a trial, if there is one, and takes its loss from the allowance."""
        if self.trial is None:
            return
        trial, self.trial = self.trial, None
        # Nothing is saved up for several trials in a row.
        self.allowance = min(self.allowance, ALLOWANCE) - max(0.0, trial.call_lost + trial.lost)
        if won:
            self.mode = trial.mode


class DraftingMode:
    """Decides in which mode a verifier's next step runs.

    Args:
        max_eager_batch: Sessions up to which drafting is tried at once.

    Attributes:
        loads: By the logarithm of their sessions to the base 2.
        rehearsing: The mode of all steps at present, whatever pays; None: there is no rehearsal.
    """

    def __init__(self, max_eager_batch: float = MAX_EAGER_BATCH) -> None:
        self._max_eager_batch = max_eager_batch
        self.loads: dict[int, Load] = {}
        self.rehearsing: Mode | None = None
        self._at = 0
        # Octaves of sessions, falling slowly.
        self._recent = 0.0
        self._load: Load | None = None

    @property
    def mode(self) -> Mode:
        """The next step's mode."""
        if self._load is None or self.rehearsing is None:
            return Mode.PLAIN if self._load is None else self._load.current
        return self.rehearsing if self.rehearsing in self._load.possible else Mode.PLAIN

    @property
    def is_trying(self) -> bool:
        """Whether the next step is of a trial."""
        return self._load is not None and self._load.trial is not None

    @property
    def measured(self) -> tuple[int, dict[Mode, float]]:
        """About how many sessions the present load has, and the rates there of some steps; 0 and none at first.

        A first step or two, such as the last ones of a prompt, may seem a hundred times as fast as all others.
        """
        if self._load is None:
            return 0, {}
        rates = self._load.rates.items()
        return 2**self._at, {mode: rate.value for mode, rate in rates if rate.num_seen >= LEAST_STEPS}

    @property
    def reason(self) -> Reason:
        """Why the next step runs in that mode."""
        load = self._load
        if load is None or len(load.possible) == 1:
            return Reason.NO_DRAFTER
        if load.trial is not None or not load.rates[load.mode].is_known:
            return Reason.TRYING
        if load.mode is not Mode.PLAIN:
            return Reason.PAYS
        if any(rate.is_known for mode, rate in load.rates.items() if mode is not Mode.PLAIN):
            return Reason.DID_NOT_PAY
        return Reason.TOO_LOADED if load.least_loss > ALLOWANCE else Reason.TRYING

    def rehearse(self, mode: Mode | None) -> None:
        """Runs all steps in one mode from now on, which shows its rate; None: the known rates decide again."""
        for load in self.loads.values():
            load.settle()
        self._leave(None)
        self._recent, self.rehearsing = 0.0, mode

    def enter(self, num_sessions: int, possible: Modes = tuple(Mode)) -> Mode:
        """Announces a step over so many sessions, at least one, in any of some modes; returns which.

        Args:
            num_sessions: Running sessions, including those in prefill.
            possible: Modes that these sessions can be served in; `PLAIN` is always one.
        """
        exact = self._recent = max(math.log2(num_sessions), self._recent - FALL)
        if self._load is None or abs(exact - self._at) > SAME_LOAD:
            self._at = round(exact)
            if self._at not in self.loads:
                self.loads[self._at] = self._new_load(self._at)
            self._leave(self.loads[self._at])
        assert self._load is not None, "it was found, or made"
        self._load.allow(possible)
        return self.mode

    def observe(self, *, num_sessions: int, tokens: int, time: float, has_prefill: bool, responded: bool) -> None:
        """Adds a step; one that brought no token, or took no time, is ignored.

        Args:
            num_sessions: Sessions that decoded.
            tokens: Committed by these.
            time: From the end of the step before it, without prompts, by that of a profile's step over these sessions.
            has_prefill: Whether it read many rows of prompts: such a step counts for no mode.
            responded: Whether drafters have responded, if they are to: before, a step shows nothing of their worth.
        """
        if self._load is None or abs(math.log2(num_sessions) - self._at) > SAME_LOAD:
            # While a load falls, steps are of fewer sessions than it stands for.
            return
        each = tokens / num_sessions
        if not 0.0 < time <= each * MOST_RATE <= time * MOST_RATE**2:
            return
        if self.rehearsing is None:
            self._load.observe(each, time, has_prefill=has_prefill, responded=responded)
        elif responded and not has_prefill and self.rehearsing in self._load.possible:
            self._load.count(self.rehearsing, each, time)

    def _leave(self, load: Load | None) -> None:
        if self._load is not None and self._load is not load:
            self._load.end_trial()
        self._load = load

    def _new_load(self, at: int) -> Load:
        """How a load begins that was never seen: drafting gains less as load rises."""
        known = {place: load for place, load in self.loads.items() if load.rates[Mode.DRAFTING].is_known}
        if any(place > at and load.mode is Mode.DRAFTING for place, load in known.items()):
            return Load(Mode.DRAFTING)
        below = [
            load.rates[Mode.DRAFTING].value / load.rates[Mode.PLAIN].value
            for place, load in known.items()
            if place < at and load.mode is not Mode.DRAFTING and load.rates[Mode.PLAIN].is_known
        ]
        ratio = min(below, default=1.0 if 2**at <= self._max_eager_batch else 1.0 - UNKNOWN_LOSS)
        return Load(Mode.PLAIN, least_loss=max(0.0, USUAL_STEPS * (1.0 - ratio)))

    def learned(self) -> list[float]:
        """Each load's logarithm and rates of all modes, 0 for an unknown one; see `resume`."""
        rows = [(float(at), *(load.rates[mode].value for mode in Mode)) for at, load in sorted(self.loads.items())]
        return [value for row in rows for value in row]

    def resume(self, learned: Sequence[float]) -> None:
        """Begins where a predecessor ended; a few steps are enough to change it.

        Raises:
            ValueError: It is not the output of `learned`.
        """
        loads = dict[int, Load]()
        for at, *values in zip(*[iter(learned)] * (1 + len(Mode)), strict=True):
            if not 0.0 <= at <= MOST_LOAD or not 0.0 <= min(values) <= max(values) <= MOST_RATE:
                raise ValueError(f"needs loads to {MOST_LOAD} and rates to {MOST_RATE:g}, got {at:g} with {values}")
            rates = {mode: Rate(value) for mode, value in zip(Mode, values, strict=True)}
            mode, eager = max(Mode, key=lambda mode: rates[mode].value), 2**at <= self._max_eager_batch
            if mode is not Mode.DRAFTING and eager:
                # It may not have paid because the machine was busy, or with another drafter: it is tried anew.
                rates[Mode.DRAFTING] = Rate()
            waits = not eager and not rates[Mode.DRAFTING].is_known
            loads[int(at)] = Load(mode, least_loss=waits * USUAL_STEPS * UNKNOWN_LOSS, rates=rates)
        self.loads, self._recent = loads, 0.0
        self._leave(None)
