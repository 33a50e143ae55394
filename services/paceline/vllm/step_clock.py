"""How long vLLM's steps take, from one request for guesses to the next, by rows and guesses.

Nothing can be measured beforehand. The first steps show how fast this vLLM is; the shape of the table is a default
and factors on it are learned. Steps that read prompts are ignored, since their number of rows is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from paceline.core.draft_policy import Goodput
from paceline.core.step_time import DEFAULT_STEP_COST, StepCost
from paceline.service.learned import learning

# Steps without guesses that show how fast this vLLM is, before anything is drafted; and the slow first ones, which are
# left out.
FIRST_STEPS, WARM_UP_STEPS = 8, 2
# Cost of a guess besides its row, which is unknown: assumed, in plain steps.
NODE_SHARE = 0.02


class StepClock:
    """Teaches a policy how long steps take.

    Attributes:
        plain: The cost that the policy began with; None before it is known.
    """

    def __init__(self, policy: Goodput) -> None:
        self.plain: StepCost | None = None
        self._policy = policy
        self._first: list[tuple[int, float]] = []
        self._began_s: float | None = None

    @property
    def knows(self) -> bool:
        """Whether enough is known to decide."""
        return self.plain is not None

    def end(self, began_s: float, *, roots: int, guesses: int, tokens: int, counts: bool) -> float | None:
        """A step has ended.

        Args:
            began_s: When vLLM asked for guesses.
            roots: Sessions in it.
            guesses: Guesses that it verified.
            tokens: Tokens that were committed.
            counts: Whether it only decoded, and followed directly on the one before.

        Returns:
            Its seconds, if it counts.
        """
        last_s, self._began_s = self._began_s, began_s
        if last_s is None or not counts or began_s <= last_s:
            return None
        seconds = began_s - last_s
        if self.plain is not None:
            with learning(self._policy.forget):
                self._policy.observe(roots=roots, guesses=guesses, tokens=tokens, step_s=seconds, cycle_s=seconds)
        elif not guesses:
            self._measure(roots, seconds)
        return seconds

    def _measure(self, rows: int, seconds: float) -> None:
        self._first.append((rows, seconds))
        if len(self._first) < WARM_UP_STEPS + FIRST_STEPS:
            return
        first = self._first[WARM_UP_STEPS:]
        self._start_from(
            DEFAULT_STEP_COST.scaled(median(taken / DEFAULT_STEP_COST.at(count) for count, taken in first))
        )

    def _start_from(self, plain: StepCost) -> None:
        self.plain = plain
        self._policy.start_from(replace(plain, node_s=NODE_SHARE * plain.seconds[0]))

    def learned(self) -> dict[str, list[float]]:
        """Returns the input of `resume`; empty before it is known."""
        return {} if self.plain is None else {"rows": [*self.plain.rows], "seconds": [*self.plain.seconds]}

    def resume(self, learned: Mapping[str, Sequence[Any]]) -> None:
        """Begins as a predecessor began; what that learned later belongs to the policy.

        Raises:
            ConfigError, KeyError, ValueError: The content is not that of `learned`.
        """
        self._start_from(StepCost(rows=tuple(map(int, learned["rows"])), seconds=tuple(map(float, learned["seconds"]))))
