"""What the target chooses in a step, at once for all sessions that ask for nothing but its own tokens.

The others, with penalties, grammars, log probabilities or another rule, are judged one by one: `TargetSession.judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.messages import TokenFate
from paceline.core.planned_step import StepPlan
from paceline.engine.backends.cpu import verdict_kernels
from paceline.engine.sampler import Logits, working_space
from paceline.engine.target_session import TargetSession


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
        plan: The step.
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
    verdict_kernels.follow(
        logits,
        rows,
        np.array([parts[place].session.committed_len for place in places], np.int64),
        np.frombuffer(b"".join(choices.values()), verdict_kernels.CHOICE),
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
