"""The messages between a proposer and its helper process, which `multiprocessing.connection` carries.

The proposer sends one message for each step of vLLM. The helper answers the awaited ones, and reports when the proposer
should start or stop waiting. Most steps are not awaited: the proposer finds its guesses on the helper's board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.params import MAX_DRAFT_TOKENS

# No step has this number.
NO_STEP = -1


class RowTokens(NamedTuple):
    """A row of vLLM's batch after a step; a tuple, since a step of many rows is pickled three times as fast.

    Attributes:
        session: Number of its session.
        base_len: Tokens of the session that the helper knows; 0: the session is opened, perhaps again.
        token_ids: The tokens after these.
        reads: Its prompt is still being read, so it takes no guesses in the next step.
        num_verified: Its guesses that the step verified.
        most_guesses: Most guesses that its request takes in a step; 0: speculation is off in it.
    """

    session: int
    base_len: int
    token_ids: Sequence[int]
    reads: bool = False
    num_verified: int = 0
    most_guesses: int = MAX_DRAFT_TOKENS

    @property
    def length(self) -> int:
        """Tokens of the session after the step."""
        return self.base_len + len(self.token_ids)

    @property
    def takes_guesses(self) -> bool:
        """Whether the next step may verify guesses of it."""
        return self.most_guesses > 0 and not self.reads


@dataclass(frozen=True, slots=True)
class Observed:
    """The helper's view of a vLLM step.

    Attributes:
        rows: Rows with a session, in vLLM's order.
        places: Index of each of them in vLLM's batch.
        closed: Sessions that have ended.
    """

    rows: Sequence[RowTokens]
    places: Sequence[int]
    closed: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """From the proposer: a step of vLLM has ended.

    Attributes:
        step: Number of the step.
        began_s: When vLLM asked for guesses, monotonic seconds of this host.
        awaited: The proposer waits for a `ChainsMessage` of this step.
        rows: In the order of vLLM's rows.
        closed: Sessions that have ended.
        taken: The guesses of each row that the proposer has found on the board, for the next step; of a step that is
            not awaited. No lists if it has not looked.
    """

    step: int
    began_s: float
    awaited: bool
    rows: Sequence[RowTokens] = ()
    closed: Sequence[int] = ()
    taken: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class ChainsMessage:
    """From the helper: guesses for the rows of a step.

    Attributes:
        step: Number of the step they are for.
        awaits: Whether the proposer should wait for guesses in the next steps; not while drafters are idle.
        chains: A list of guesses for each row, possibly empty; no lists if the step was not awaited.
    """

    step: int
    awaits: bool
    chains: Sequence[Sequence[int]] = ()
