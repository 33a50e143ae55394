"""Who drafts: all drafters work, all idle, or a few sessions try what drafters would bring.

Drafters are a source like any other: they cost `T(drafting) - T(plain)` a step and bring what they put in hand. They
work while that is worth it, by the goodput with them over the goodput without. What is known of the other way grows
old meanwhile, so it is tried now and then (`paceline.core.goodput.may_try`). While drafters idle, a few sessions try
them: commits score their guesses as well as those of all sessions. While they work, all pause for a few steps, which
alone tells a machine that got slow from drafters that slow it down. A fleet that knows nothing begins with idle
drafters, and calls them at once where even modest guesses are worth it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.core.goodput import may_try

# Gain for which idle drafters are called to work: two percent less would be lost to the call. And the clear gain that
# is required at a load where both kinds of steps were never compared, or after a call in vain: beliefs may be off.
WORTH_A_CALL, CLEAR_GAIN = 1.03, 1.25
# Steps with answers that a trial takes, and drafters at work before a small loss ends it: one draft teaches little.
LEAST_STEPS = 12
# Steps of a pause in which drafters at work are compared with plain decoding, and of work before the first one.
REST_STEPS, FIRST_REST = 4, 64
# Steps without an answer from any drafter, after which those at work idle: they read long prompts, or hang.
MOST_UNANSWERED = 64
# Steps from one judgement to the next: to judge is half of what the controller costs a step.
JUDGE_EVERY = 4
# A load this many times the one that was judged, or less than it by this factor, is another one, and is judged at once.
OTHER_LOAD = 2


class Drafting(enum.Enum):
    """Which sessions have drafters at work."""

    NOBODY = enum.auto()
    SOME = enum.auto()
    ALL = enum.auto()


@dataclass(frozen=True, slots=True)
class Trial:
    """One that ended, or drafters called in vain: when, in seconds of steps, and what it cost."""

    ended_s: float = 0.0
    cost_s: float = 0.0


class DraftingSwitch:
    """Decides who drafts, for a verifier.

    Attributes:
        drafting: Who does.
        compared: Loads at which steps with drafters at work and without were seen, here or by a predecessor. A load is
            the number of sessions in binary digits: loads are alike within a factor of two.
    """

    def __init__(self) -> None:
        self.drafting = Drafting.NOBODY
        self.compared: set[int] = set()
        # Drafters pause for the sake of comparison only.
        self._compares = False
        # The first step is judged.
        self._num_steps = JUDGE_EVERY - 1
        self._num_unanswered = 0
        self._num_sessions = 1
        # Share of a step's time that drafters at work cost, guesses apart.
        self._lost = 0.0
        # Time of all steps, and when the present way began.
        self._now_s = self._since_s = 0.0
        self._trial: Trial | None = None
        # When no drafter answered: whatever the gain, calling them is no use.
        self._silence = Trial()
        # By load.
        self._in_vain: dict[int, Trial] = {}

    def observe(self, seconds: float) -> None:
        """Takes in the time of a step."""
        self._now_s += seconds

    def is_due(self, num_sessions: int, *, answered: bool) -> bool:
        """Counts a step; returns whether to judge after it.

        Args:
            num_sessions: Sessions that share the steps to come.
            answered: Some drafter has answered since it was called: until then there is nothing to count.
        """
        other = self._is_other_load(num_sessions)
        if not (self.drafting is Drafting.NOBODY or answered or other):
            self._num_unanswered += 1
            if self._num_unanswered >= MOST_UNANSWERED:
                self._silence = self._ended(self._lost)
                self._turn(Drafting.NOBODY)
            return False
        self._num_unanswered = 0
        self._num_steps += 1
        return other or self.drafting is Drafting.SOME or self._num_steps % JUDGE_EVERY == 0

    def judge(self, gain: float, *, most_gain: float, plain_s: float, drafting_s: float, num_sessions: int) -> None:
        """Decides who drafts from now on.

        Args:
            gain: Goodput with drafters at work over goodput without.
            most_gain: The same if every guess were sure to match: what cannot pay is not tried.
            plain_s: Time of a plain step.
            drafting_s: Time of a step with drafters at work, guesses apart.
            num_sessions: As in `is_due`.
        """
        other, self._num_sessions = self._is_other_load(num_sessions), num_sessions
        load, lost_s = num_sessions.bit_length(), max(0.0, drafting_s - plain_s)
        self._lost = lost_s / drafting_s
        match self.drafting:
            case Drafting.NOBODY:
                self._judge_rest(gain, lost_s, load, may_pay=most_gain > WORTH_A_CALL)
            case Drafting.SOME if self._num_steps >= LEAST_STEPS:
                self.compared.add(load)
                self._trial = self._ended(self._lost)
                self._turn(Drafting.ALL if gain > WORTH_A_CALL else Drafting.NOBODY)
            case Drafting.ALL if other and gain <= (1.0 if load in self.compared else CLEAR_GAIN):
                # They were not called for this load: it is not held against them.
                self._turn(Drafting.NOBODY)
            case Drafting.ALL:
                self._judge_work(gain, lost_s, drafting_s, load)

    def _judge_rest(self, gain: float, lost_s: float, load: int, *, may_pay: bool) -> None:
        known = load in self.compared and self._may_again(self._in_vain.get(load, Trial()))
        if self._compares:
            if self._num_steps >= REST_STEPS:
                self.compared.add(load)
                self._turn(Drafting.ALL if gain > 1.0 else Drafting.NOBODY)
        elif not self._may_again(self._silence):
            return
        elif gain > (WORTH_A_CALL if known else CLEAR_GAIN):
            self._turn(Drafting.ALL)
        elif may_pay and self._may_again(self._trial or Trial(cost_s=LEAST_STEPS * lost_s)):
            self._turn(Drafting.SOME)

    def _judge_work(self, gain: float, lost_s: float, drafting_s: float, load: int) -> None:
        if self._num_steps < LEAST_STEPS:
            return
        if gain <= 1.0:
            self._in_vain[load] = self._ended(1.0 - gain, most_s=LEAST_STEPS * drafting_s)
            self._turn(Drafting.NOBODY)
            return
        # The first steps after a pause are slow, and have no drafts yet.
        rest = Trial(self._since_s, REST_STEPS * (lost_s + drafting_s * (1.0 - 1.0 / gain)))
        if self._may_again(rest) or (self._num_steps >= FIRST_REST and load not in self.compared):
            self._turn(Drafting.NOBODY)
            self._compares = True

    def _is_other_load(self, num_sessions: int) -> bool:
        less, more = sorted((num_sessions, self._num_sessions))
        return more >= OTHER_LOAD * less

    def _may_again(self, last: Trial) -> bool:
        return may_try(last.cost_s, self._now_s - last.ended_s)

    def _ended(self, lost: float, most_s: float = float("inf")) -> Trial:
        """The time since the last change, of which the share `lost` was lost."""
        return Trial(self._now_s, lost * min(self._now_s - self._since_s, most_s))

    def _turn(self, drafting: Drafting) -> None:
        self.drafting, self._compares = drafting, False
        self._num_steps = self._num_unanswered = 0
        self._since_s = self._now_s
