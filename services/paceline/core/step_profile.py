"""What steps take and bring at each load, with drafters and without: rehearsed, or assumed until then.

A profile is JSON. A verifier measures it (`paceline.verifier.rehearsal`), and its controller, the planner and simulated
devices read the same file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.step_time import Floats, StepCost

# Guesses of a session in the steps that a profile holds, and tokens that such steps are taken to bring to a session
# while nobody has seen one: a fair drafter's, so that drafting is tried wherever it may win.
GUESSES, ASSUMED_TOKENS = (0, 1, 3, 8), (1.0, 1.65, 2.7, 3.7)
ASSUMED_LOADS = tuple(2**each for each in range(10))
COLUMNS = ("loads", "plain", "guesses", "drafting", "tokens", "delay")
# Steps of one kind that a rehearsal sees: most, and fewer once they have taken so long; the first ones, while drafters
# read, do not count. Nor does any for more than so many usual ones.
MOST_STEPS, LEAST_STEPS, TAKE_S, UNCOUNTED, MOST_DELAY = 40, 12, 1.0, 2, 3.0
_Row = tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class Take:
    """Steps of one kind.

    Attributes:
        num_sessions: In each of them.
        gamma: Guesses of a session that they verify where it has as many; None: plain steps.
        steps: Guesses, tokens and seconds of those seen.
        delays: Seconds from commits to the first guesses that answered them.
    """

    num_sessions: int
    gamma: int | None
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    @property
    def drafts(self) -> bool:
        return self.gamma is not None

    def add(self, *, guesses: int, tokens: int, seconds: float) -> None:
        """Takes in a step."""
        self.steps.append((guesses, tokens, seconds))

    @property
    def is_done(self) -> bool:
        long = len(self.steps) >= LEAST_STEPS and sum(seconds for _, _, seconds in self.steps) >= TAKE_S
        return long or len(self.steps) >= MOST_STEPS

    def means(self) -> tuple[float, float, float]:
        """Guesses and tokens of a session, and seconds, of a step."""
        counted = self.steps[UNCOUNTED:]
        most_s = MOST_DELAY * median(seconds for _, _, seconds in counted)
        guesses, tokens = (fmean(each[column] for each in counted) / self.num_sessions for column in (0, 1))
        return guesses, tokens, fmean(min(seconds, most_s) for _, _, seconds in counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSteps:
    """Steps at one load, as a profile has them.

    Attributes:
        plain_s: Seconds of a plain step.
        guesses: Guesses of a session in the steps that draft, `[points]`.
        seconds: Of these steps, `[points]`.
        promise: The most tokens/s of a session that drafting promises.
    """

    plain_s: float
    guesses: Floats
    seconds: Floats
    promise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Steps at some loads; between two of them everything is linear in the logarithm of the sessions.

    Args:
        loads: Sessions, increasing.
        plain: Seconds of a step without drafters, `[loads]`.
        guesses: Guesses of a session in the steps that draft, `[loads][points]`, increasing.
        drafting: Seconds of these steps, waits for guesses included, `[loads][points]`.
        tokens: What they commit to a session, `[loads][points]`.
        delay: Seconds from a commit to the first guess that follows it, `[loads]`.

    Raises:
        ConfigError: The columns do not fit one another, or hold what no step takes.
    """

    loads: _Row
    plain: _Row
    guesses: tuple[_Row, ...]
    drafting: tuple[_Row, ...]
    tokens: tuple[_Row, ...]
    delay: _Row
    _known: dict[int, LoadSteps] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        count, tables = len(self.loads), (self.guesses, self.drafting, self.tokens)
        widths = {len(row) for table in tables for row in table}
        if not count or {len(self.plain), len(self.delay), *map(len, tables)} != {count} or len(widths) != 1:
            raise ConfigError("step profile: needs as many rows as loads in every column, got others")
        everything = [*self.loads, *self.plain, *(each for table in tables[1:] for row in table for each in row)]
        if not all(math.isfinite(each) and each > 0.0 for each in everything):
            raise ConfigError("step profile: loads, seconds and tokens must be more than 0")
        if any(np.any(np.diff(row) <= 0) for row in (self.loads, *self.guesses)):
            raise ConfigError("step profile: loads and guesses must increase")

    @classmethod
    def assumed(cls, plain: StepCost, drafting: StepCost, tried_up_to: float = math.inf) -> StepProfile:
        """What is taken to be true before a rehearsal, by the times of steps without drafters and sessions.

        Args:
            plain: While drafters idle.
            drafting: While they work.
            tried_up_to: Sessions up to which drafting is taken to be worth it.
        """
        seconds = [[drafting.with_guesses(load, load * guesses)[-1] for guesses in GUESSES] for load in ASSUMED_LOADS]
        tokens = [ASSUMED_TOKENS if load <= tried_up_to else (1.0,) * len(GUESSES) for load in ASSUMED_LOADS]
        return cls(
            loads=ASSUMED_LOADS,
            plain=tuple(plain.at(load) for load in ASSUMED_LOADS),
            guesses=(GUESSES,) * len(ASSUMED_LOADS),
            drafting=tuple(map(tuple, seconds)),
            tokens=tuple(tokens),
            delay=(0.0,) * len(ASSUMED_LOADS),
        )

    def at(self, load: int) -> LoadSteps:
        """Steps over so many sessions."""
        known = self._known.get(load)
        if known is None:
            guesses, seconds, tokens = (
                np.array([self._between(column, load) for column in zip(*table, strict=True)])
                for table in (self.guesses, self.drafting, self.tokens)
            )
            known = self._known[load] = LoadSteps(
                plain_s=self._between(self.plain, load),
                guesses=guesses,
                seconds=seconds,
                promise=float(np.max(tokens / seconds)),
            )
        return known

    def over(self, cost: StepCost, load: int) -> tuple[Floats, Floats]:
        """Guesses of a session, and the seconds of steps with them over those by their rows alone, `[points]` each."""
        ratios = [
            [
                each / (cost.at(round(rows * (1.0 + more))) + cost.node_s * rows * more)
                for more, each in zip(*row, strict=True)
            ]
            for rows, *row in zip(self.loads, self.guesses, self.drafting, strict=True)
        ]
        return self.at(load).guesses, np.array([self._between(column, load) for column in zip(*ratios, strict=True)])

    def learned(self) -> dict[str, Any]:
        """What a profile's file holds."""
        return {name: getattr(self, name) for name in COLUMNS}

    def _between(self, column: Sequence[float], load: int) -> float:
        return float(np.interp(math.log(load), np.log(self.loads), column))


def step_profile_from(given: Mapping[str, Any]) -> StepProfile:
    """A profile from the object in its file.

    Raises:
        ConfigError: It is no profile; the message names what is wrong.
    """
    try:
        columns: dict[str, Any] = {
            name: tuple(tuple(map(float, row)) if isinstance(row, list | tuple) else float(row) for row in given[name])
            for name in COLUMNS
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"step profile: needs lists of numbers as {', '.join(COLUMNS)}, got {error!r}") from None
    return StepProfile(**columns)
