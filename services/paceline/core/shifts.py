"""When drafters work and when they rest: by what they are expected to gain, and by trials where little is known."""

from __future__ import annotations

# Drafters that rest are called back for a gain of this much, and not before so many steps; they are sent to rest for
# none at all, and not before so many, or a few for a clear loss: the first steps after a call have no drafts yet.
WORTH_A_CALL, CLEAR_LOSS = 1.03, 0.95
LEAST_REST, LEAST_WORK, LEAST_TRIAL = 4, 12, 6
# Drafters that were called back in vain rest so many times as long the next time at such a load, up to so many steps:
# where plain steps have the drafters' CPUs as well, a call in vain costs several of them. Loads are alike within a
# factor of two: what a busy hour taught is not forgotten in a quiet minute. A gain far beyond what calls are made for
# ends any rest: the text that look-up served well has ended, and another one began.
REST_GROWTH, MOST_REST, WORTH_A_CALL_AT_ONCE = 4, 2048, 1.5
# A machine that got slow and drafters that slow it down look alike until drafters rest: so they do, as a control,
# after so many steps.
CONTROL_EVERY = 250
# To judge what drafters gain, and to set the price by it, is half of what the controller costs a step: so it is done
# in every so many.
JUDGE_EVERY = 4
# A load so many times the one that was judged, or that part of it, is another one, and is judged at once: eight
# requests at a time would else find drafters at work for the single one that ended a minute ago.
OTHER_LOAD = 2


class Shifts:
    """Whether the drafters of a verifier work or rest.

    Attributes:
        resting: They rest.
    """

    def __init__(self) -> None:
        self.resting = False
        # The first step is judged.
        self._steps_since_change = LEAST_WORK - 1
        self._num_sessions = 1
        # By load (digits of the number of sessions in base 2), how long drafters rest before they are called back.
        self._rests: dict[int, int] = {}

    def is_due(self, num_sessions: int, *, answered: bool) -> bool:
        """Counts a step in which so many sessions ran; whether to judge after it.

        Args:
            num_sessions: Sessions that share the steps to come.
            answered: Some drafter has answered since it was called: until then there is nothing to count.
        """
        other = self._is_other_load(num_sessions)
        if not (self.resting or answered or other):
            return False
        self._steps_since_change += 1
        return other or self._steps_since_change % JUDGE_EVERY == 0

    def judge(self, gain: float, num_sessions: int) -> None:
        """Calls drafters, or sends them to rest, for goodput with them over goodput without."""
        other, load = self._is_other_load(num_sessions), num_sessions.bit_length()
        rest = self._rests.get(load, LEAST_REST)
        brief = self._steps_since_change <= 2 * LEAST_WORK
        self._num_sessions = num_sessions
        if self._is_worth_a_call(gain, rest) if self.resting else self._is_worth_a_rest(gain, other_load=other):
            if not self.resting and gain <= 1.0 and brief and not other:
                self._rests[load] = min(REST_GROWTH * rest, MOST_REST)
            self._steps_since_change = 0
            self.resting = not self.resting
        elif not self.resting and gain > 1.0 and not brief:
            self._rests.pop(load, None)

    def _is_other_load(self, num_sessions: int) -> bool:
        less, more = sorted((num_sessions, self._num_sessions))
        return more >= OTHER_LOAD * less

    def _is_worth_a_call(self, gain: float, rest: int) -> bool:
        """Whether drafters at rest, so many steps where nothing else is known, are called back for such a gain."""
        return gain > (WORTH_A_CALL if self._steps_since_change >= rest else WORTH_A_CALL_AT_ONCE)

    def _is_worth_a_rest(self, gain: float, *, other_load: bool) -> bool:
        """Whether drafters at work that bring such a gain are sent to rest."""
        if self._steps_since_change >= CONTROL_EVERY:
            return True
        if other_load and gain <= CLEAR_LOSS:
            # They were not called for this load: there is no trial to wait for.
            return True
        least = LEAST_TRIAL if gain <= CLEAR_LOSS else LEAST_WORK
        return gain <= 1.0 and self._steps_since_change >= least
