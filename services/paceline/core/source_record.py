"""Sources inside the verifier that take time: how long calls last, and what they bring.

Places in the tree need no arbiter: every commit scores the guesses of all sources (full information, as in 2510.20064),
and calibrated survival gives the places to the best. What is left to decide is time: a source is called for sessions
where that is worth it (`paceline.core.goodput`). A gain is what its guesses add to the survivals for which a session's
tree has room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.goodput import MovingAverage, may_try

# Tokens that a source is taken to add before it was called.
FIRST_GAIN = 1.0
# Weight of a new look in the times of calls and in the gain of all sessions, and in that of one.
MEAN_SMOOTHING, GAIN_SMOOTHING = 0.1, 0.3
# Calls at first that are not learned from; how much slower than usual one may be; and how far numbers of sessions must
# differ, as a share of their mean, before their times are believed.
UNCOUNTED_CALLS, MOST_DELAY, DOUBT = 2, 4.0, 0.1
# After about 32 commits without a call a session is taken to be like the others again.
FORGETTING = 1 / 32
# A source that was worth no call is not weighed for this number of steps: weighing takes a twentieth of a small model's
# step.
LEFT_ALONE = 4


class CallCost:
    """Time of a call, a line through its number of sessions, learned online with forgetting.

    Until calls of several sizes were seen, half of their time is taken to be the same for any number. The first calls
    pay for compilation, and are not learned from; a call that the machine held up counts as a slow one only.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._count = MovingAverage(0.0, MEAN_SMOOTHING)
        self._seconds = MovingAverage(0.0, MEAN_SMOOTHING)
        self._variance = self._covariance = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """A call for `count` sessions took `seconds`."""
        self._num_calls += 1
        if self._num_calls <= UNCOUNTED_CALLS:
            return
        if self._num_calls == UNCOUNTED_CALLS + 1:
            self._count.value, self._seconds.value = float(count), seconds
            return
        seconds = min(seconds, MOST_DELAY * self(count))
        off_count, off_seconds = count - self._count.value, seconds - self._seconds.value
        self._count.add(count)
        self._seconds.add(seconds)
        keep = 1.0 - MEAN_SMOOTHING
        self._variance = keep * (self._variance + MEAN_SMOOTHING * off_count * off_count)
        self._covariance = keep * (self._covariance + MEAN_SMOOTHING * off_count * off_seconds)

    def __call__(self, count: int) -> float:
        """Expected seconds of a call for `count` sessions; 0 while nothing is known."""
        usual_count, usual_s = self._count.value, self._seconds.value
        if not usual_count:
            return 0.0
        proportional = usual_s / usual_count
        doubt = (DOUBT * usual_count) ** 2
        slope = (self._covariance + doubt * proportional / 2) / (self._variance + doubt)
        slope = min(max(slope, 0.0), proportional)
        return max(0.0, usual_s + slope * (count - usual_count))


@dataclass(slots=True)
class Gain:
    """Tokens that a source adds to a step: to a session that is empty-handed, and to one with guesses in hand."""

    empty_handed: float = FIRST_GAIN
    otherwise: float = FIRST_GAIN

    def of(self, held: float) -> float:
        """The gain of a session with `held` expected draft tokens in hand."""
        return self.otherwise if held else self.empty_handed

    def move(self, held: float, toward: float, weight: float) -> None:
        """Takes in what was gained with `held` expected tokens in hand."""
        if held:
            self.otherwise += weight * (toward - self.otherwise)
        else:
            self.empty_handed += weight * (toward - self.empty_handed)


@dataclass(slots=True)
class SourceRecord:
    """What is known of a source that takes time.

    Attributes:
        mean: Gain of all sessions.
        call_s: Time of a call.
        called_s: When it was called last.
        num_left_alone: Steps for which it is not weighed.
    """

    mean: Gain = field(default_factory=Gain)
    call_s: CallCost = field(default_factory=CallCost)
    called_s: float = 0.0
    num_left_alone: int = 0

    @property
    def merit(self) -> float:
        """Tokens a second for an empty-handed session; sources of more are asked first."""
        seconds = self.call_s(1)
        return self.mean.empty_handed / seconds if seconds else math.inf

    def new_session(self) -> Gain:
        """A session is taken to be like the others."""
        return Gain(self.mean.empty_handed, self.mean.otherwise)

    def begin_step(self) -> bool:
        """A step begins; returns whether the source is weighed in it."""
        if self.num_left_alone:
            self.num_left_alone -= 1
            return False
        return True

    def was_worth_none(self) -> None:
        """No session was worth a call: it is left alone for a while."""
        self.num_left_alone = LEFT_ALONE

    def is_due(self, count: int, now_s: float) -> bool:
        """Whether a call for `count` sessions would be a small share of the time since the last one."""
        return may_try(self.call_s(count), now_s - self.called_s)

    def called(self, count: int, *, seconds: float, now_s: float) -> None:
        """A call for `count` sessions ended."""
        self.call_s.observe(count, seconds)
        self.called_s = now_s

    def gained(self, session: Gain, held: float, gain: float) -> None:
        """A session that held `held` expected tokens gained `gain` by the call."""
        session.move(held, gain, GAIN_SMOOTHING)
        self.mean.move(held, gain, MEAN_SMOOTHING)

    def left_out(self, session: Gain, held: float) -> None:
        """There was no call for a session: what is known of it grows old."""
        session.move(held, self.mean.of(held), FORGETTING)
