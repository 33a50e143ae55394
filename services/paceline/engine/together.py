"""What a step gives all sessions at once that choose by logits alone.

The others, with penalties, grammars, log probabilities or another rule, are served one by one: `TargetSession.judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.messages import TokenFate
from paceline.engine.pending import Walked, Walks, choices_of
from paceline.engine.planned_step import StepPlan


class Followed(NamedTuple):
    """The target's tokens.

    Attributes:
        token_ids: Accepted guesses, then one of its own.
        last: How that one came about.
    """

    token_ids: list[int]
    last: TokenFate


def walks_of(plan: StepPlan, firsts: Sequence[int]) -> tuple[list[int], Walks]:
    """The guesses of sessions that choose by their logits alone, and where these sessions are in `plan.parts`.

    Args:
        firsts: Of each part, the row of its last committed token; those of its guesses follow.
    """
    parts = plan.parts
    choices = {
        place: choice
        for place, part in enumerate(parts)
        if (choice := part.session.choice) is not None and part.commits
    }
    places = [*choices]
    sizes = np.array([part.num_guesses for part in parts], np.int64)
    stops = np.cumsum(sizes)
    walks = Walks(
        rows=np.array(firsts, np.int64)[places],
        positions=np.array([parts[place].session.committed_len for place in places], np.int64),
        choices=choices_of([*choices.values()]),
        starts=(stops - sizes)[places],
        stops=stops[places],
        tokens=plan.guesses.tokens,
        parents=plan.guesses.parents,
    )
    return places, walks


def followed(plan: StepPlan, places: Sequence[int], walks: Walks, walked: Walked) -> dict[int, Followed]:
    """The tokens of sessions by place in `plan.parts`; one whose logits leave nothing to choose is not there."""
    tokens, found = walked.tokens.tolist(), dict[int, Followed]()
    columns = (walks.rows.tolist(), walked.counts.tolist(), walked.rivals.tolist())
    for place, row, count, has_rivals in zip(places, *columns, strict=True):
        if count:
            own = TokenFate.RECOVERED if has_rivals else TokenFate.BONUS
            last = own if plan.parts[place].num_guesses else TokenFate.PLAIN
            found[place] = Followed(tokens[row : row + count], last)
    return found
