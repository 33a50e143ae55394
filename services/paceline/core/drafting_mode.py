"""Whether a verifier drafts or decodes plainly: what a profile promises, corrected by what traffic shows.

In `PLAIN` nothing of speculation runs. In `DRAFTING` drafters and the sources inside the verifier work, and steps
verify the guesses that pay. By load, a factor on each side of the comparison is learned from the steps of that mode:

    expected[plain]    = 1 / (plain factor * profile.plain(load))          tokens/s of a session
    expected[drafting] = drafting factor * profile.promise(load)

The mode changes once the other one has been expected to be better for a while. An account has the last word: what
drafting loses against plain decoding is taken from it, a small share of the time is paid in, and when it is overdrawn
steps are plain. When it is full, drafting is tried whatever is expected of it: machines and texts change.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.step_profile import StepProfile

# Weight of a new step in a factor, and steps that what is expected stands for.
WEIGHT, EXPECTED_STEPS = 0.02, 6
# How much better the other mode must be, and for how many steps.
BETTER, BETTER_STEPS = 1.03, 16
# Plain steps that the account holds at most, and that it may be overdrawn by: with what is paid in with every step, no
# 200 steps lose more than 5, and another one by the error of what plain steps take: 3 %.
MOST_SAVED, PAID_IN = 2.0, 0.005
# Sessions up to which drafting is begun with before plain steps were seen: alone, a session nearly always gains. And
# steps that draft after which plain ones are looked at again, as many as what is expected stands for.
BEGIN_DRAFTING, LOOK_AGAIN = 2, 1000
# A load stays the same up to this factor, in powers of two.
SAME_LOAD = 0.7
# No step counts for more than this many usual ones, or plain ones: such a delay is an accident. The first that draft
# may be as dear as that squared: one took as long as nine plain ones where drafters lend their cores.
MOST_DELAY = 3.0


class Mode(enum.Enum):
    """What a verifier does."""

    PLAIN = enum.auto()
    DRAFTING = enum.auto()

    @property
    def other(self) -> Mode:
        return Mode.PLAIN if self is Mode.DRAFTING else Mode.DRAFTING


@dataclass(slots=True)
class Factor:
    """What steps show over what a profile says: their mean at first, then with forgetting."""

    value: float = 1.0
    num_steps: int = EXPECTED_STEPS

    def add(self, seen: float) -> None:
        self.num_steps += 1
        self.value += max(WEIGHT, 1 / self.num_steps) * (seen - self.value)


@dataclass(slots=True)
class Load:
    """What steps over about so many sessions have shown: seconds of plain ones, and tokens/s of those that draft."""

    plain: Factor = field(default_factory=Factor)
    drafting: Factor = field(default_factory=Factor)


class DraftingMode:
    """Decides in which mode a verifier's next step runs.

    Args:
        profile: What steps take and bring.
        rehearsed: Whether that was seen, and not assumed.

    Attributes:
        mode: That of the next step.
        loads: By the logarithm of their sessions to the base 2.
        saved: What drafting may lose, in plain steps; less than 0: what it has lost beyond that.
    """

    def __init__(self, profile: StepProfile, *, rehearsed: bool = False) -> None:
        self.profile = profile
        self.rehearsed = self._plain_is_known = rehearsed
        self.mode = Mode.PLAIN
        self.loads: dict[int, Load] = {}
        self.saved = 0.0
        self._at: int | None = None
        # Steps in this mode, and the last ones in a row at which the other one was expected to be better.
        self._num_steps = self._num_better = 0
        # Plain steps that are still looked at, whatever is expected of drafting.
        self._num_looks = 0

    def enter(self, num_sessions: int) -> Mode:
        """The next step is to be over so many sessions; 0: none of them may speculate. Returns its mode."""
        if not num_sessions:
            self._at, self.mode = None, Mode.PLAIN
            return self.mode
        exact = math.log2(num_sessions)
        if self._at is None or abs(exact - self._at) > SAME_LOAD:
            self._at, self._num_better = round(exact), 0
            if self._at not in self.loads:
                self.loads[self._at] = self._new_load(self._at)
            wins = self.expected(Mode.DRAFTING, num_sessions) > BETTER * self.expected(Mode.PLAIN, num_sessions)
            self._change_to(Mode.DRAFTING if wins and self._may_lose else Mode.PLAIN)
            if not self._plain_is_known and num_sessions > BEGIN_DRAFTING:
                self._look_at_plain(self.loads[self._at])
        return self.mode

    def _look_at_plain(self, load: Load) -> None:
        self._plain_is_known = True
        self._change_to(Mode.PLAIN)
        self._num_looks = load.plain.num_steps = EXPECTED_STEPS

    def _change_to(self, mode: Mode) -> None:
        if mode is not self.mode:
            self.mode, self._num_steps, self._num_better, self._num_looks = mode, 0, 0, 0

    @property
    def _may_lose(self) -> bool:
        """Whether the account has room for a plain step."""
        return self.saved >= 1.0 - MOST_SAVED

    def _new_load(self, at: int) -> Load:
        """A load that was never seen begins as the nearest one that was."""
        if not self.loads:
            return Load()
        near = self.loads[min(self.loads, key=lambda known: abs(known - at))]
        return Load(Factor(near.plain.value), Factor(near.drafting.value))

    def expected(self, mode: Mode, num_sessions: int) -> float:
        """Tokens/s of a session in a step over so many, once `enter` has announced such steps."""
        assert self._at is not None, "enter() comes first"
        load = self.loads[self._at]
        if mode is Mode.DRAFTING:
            return load.drafting.value * self.profile.at(num_sessions).promise
        return 1.0 / (load.plain.value * self.profile.at(num_sessions).plain_s)

    def observe(self, *, num_sessions: int, tokens: int, seconds: float, reads: bool, answered: bool) -> None:
        """Takes in a step.

        Args:
            num_sessions: Those that decoded.
            tokens: What they committed.
            seconds: From the end of the step before it.
            reads: Whether it read prompts: such a step shows nothing of either mode.
            answered: Whether drafters have answered, if they are to: before, a step does not show what they are worth.
        """
        if self._at is None or reads or not num_sessions:
            return
        load, steps = self.loads[self._at], self.profile.at(num_sessions)
        self._num_steps += 1
        full, self.saved = self.saved >= MOST_SAVED, self.saved + PAID_IN
        if self.mode is Mode.PLAIN:
            load.plain.add(min(seconds / steps.plain_s, MOST_DELAY * load.plain.value))
        else:
            lost = seconds * self.expected(Mode.PLAIN, num_sessions) - tokens / num_sessions
            self.saved -= min(lost, MOST_DELAY if self._num_steps > EXPECTED_STEPS else MOST_DELAY**2)
            if answered:
                load.drafting.add(tokens / num_sessions / seconds / steps.promise)
        self.saved = min(self.saved, MOST_SAVED)
        self._decide(load, num_sessions, full=full, answered=answered)

    def _decide(self, load: Load, num_sessions: int, *, full: bool, answered: bool) -> None:
        other, mine = (self.expected(mode, num_sessions) for mode in (self.mode.other, self.mode))
        self._num_better = self._num_better + 1 if answered and other > BETTER * mine else 0
        better = self._num_better >= BETTER_STEPS
        if self.mode is Mode.PLAIN:
            looked, self._num_looks = self._num_looks == 1, max(0, self._num_looks - 1)
            if full or (self._may_lose and (better or (looked and other > mine))):
                self._change_to(Mode.DRAFTING)
        elif better or self.saved < -MOST_SAVED:
            # Whatever was expected: it is not better than plain steps.
            load.drafting.value *= min(1.0, other / mine / BETTER)
            self._change_to(Mode.PLAIN)
        elif self._num_steps >= LOOK_AGAIN:
            self._look_at_plain(load)

    def learned(self) -> list[float]:
        """Of each load its logarithm and both factors; see `resume`."""
        rows = [(float(at), load.plain.value, load.drafting.value) for at, load in sorted(self.loads.items())]
        return [value for row in rows for value in row]

    def resume(self, learned: Sequence[float]) -> None:
        """Begins where a predecessor ended; a few steps are enough to change it.

        Raises:
            ValueError: It is not what `learned` gives.
        """
        loads: dict[int, Load] = {}
        for at, *factors in zip(*[iter(learned)] * 3, strict=True):
            if not all(map(math.isfinite, (at, *factors))) or at < 0 or min(factors) <= 0.0:
                raise ValueError(f"needs loads of at least 0 and factors above 0, got {at:g} with {factors}")
            loads[int(at)] = Load(*map(Factor, factors))
        self.loads, self._plain_is_known = loads, self.rehearsed or bool(loads)
