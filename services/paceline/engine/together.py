"""What a step's rows give all sessions at once that choose by logits alone.

The others, with penalties, grammars, log probabilities or another rule, are served one by one: `TargetSession.judge`,
`DraftSession.offer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.messages import TokenFate
from paceline.core.planned_step import StepPlan
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.sampler import Logits, working_space
from paceline.engine.target_session import TargetSession
from paceline.forest import Bools, Floats, Ints

_CHOICES = step_kernels.CHOICE


class Followed(NamedTuple):
    """The target's tokens.

    Attributes:
        token_ids: Accepted guesses, then one of its own.
        last: How that one came about.
    """

    token_ids: list[int]
    last: TokenFate


def follow(plan: StepPlan[TargetSession], logits: Logits, firsts: Sequence[int]) -> dict[int, Followed]:
    """Follows the target's tokens down the guesses of sessions that choose by their logits alone.

    Args:
        logits: float32 `[rows, vocab]`.
        firsts: Of each part, the row of its last committed token; those of its guesses follow.

    Returns:
        By place in `plan.parts`; a session whose logits leave nothing to choose is not there.
    """
    parts = plan.parts
    choices = {
        place: choice
        for place, part in enumerate(parts)
        if (choice := part.session.choice) is not None and part.commits
    }
    if not choices:
        return {}
    places, sizes = [*choices], np.array([part.num_guesses for part in parts])
    stops = np.cumsum(sizes)
    rows = np.array(firsts, np.int64)[places]
    chosen = np.empty(len(logits), np.int64)
    counts, rivals = np.empty(len(places), np.int64), np.empty(len(places), np.bool_)
    step_kernels.follow(
        logits,
        rows,
        np.array([parts[place].session.committed_len for place in places], np.int64),
        np.frombuffer(b"".join(choices.values()), _CHOICES),
        (stops - sizes)[places],
        stops[places],
        plan.guesses.tokens,
        plan.guesses.parents,
        working_space(logits.shape[1]),
        chosen,
        counts,
        rivals,
    )
    tokens, followed = chosen.tolist(), dict[int, Followed]()
    for place, row, count, has_rivals in zip(places, rows.tolist(), counts.tolist(), rivals.tolist(), strict=True):
        if count:
            own = TokenFate.RECOVERED if has_rivals else TokenFate.BONUS
            last = own if parts[place].num_guesses else TokenFate.PLAIN
            followed[place] = Followed(tokens[row : row + count], last)
    return followed


class Rankings(NamedTuple):
    """The best guesses at some rows, best first.

    Attributes:
        token_ids: int32 `[rows, NUM_RANKED]`, below 0 behind the last.
        confidences: float64 `[rows, NUM_RANKED]`.
        usable: bool `[rows]`, whether the logits leave something to choose.
    """

    token_ids: Ints
    confidences: Floats
    usable: Bools


def rank(logits: Logits, rows: Sequence[int], positions: Sequence[int], choices: Sequence[bytes]) -> Rankings:
    """Ranks guesses as each session's sampler would, and says how sure they are.

    Args:
        logits: float32 `[rows, vocab]`.
        positions: Absolute, of the tokens to guess.
        choices: A `CHOICE` for each.
    """
    how = np.frombuffer(b"".join(choices), _CHOICES)
    token_ids = np.full((len(rows), NUM_RANKED), step_kernels.NOTHING, np.int64)
    scores, largest = np.full(token_ids.shape, -np.inf), np.empty(len(rows))
    step_kernels.rank(
        logits,
        np.array(rows, np.int64),
        np.array(positions, np.int64),
        how,
        working_space(logits.shape[1]),
        token_ids,
        scores,
        largest,
    )
    usable = np.isfinite(largest)
    weights = np.exp(scores - np.where(usable, scores[:, 0], 0.0)[:, None])
    return Rankings(token_ids.astype(np.int32), confidences(weights, greedy=how["greedy"]), usable)
