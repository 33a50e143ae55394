"""Where an output stands in the text that its client has predicted; pure.

A verifier guesses what the prediction says next; a gateway counts how much of it came true, whichever engine runs the
session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Tokens of a prediction that are looked at, its first ones: a file of some 100 KiB.
MAX_PREDICTED_TOKENS = 32_768
# Tokens that must agree behind a deviation, for the output to be back in the prediction.
LEAST_AGREED = 2
# Confidence that the output begins as predicted, in tokens that agree.
AGREED_AT_START = 8
# Tokens ahead in which a place is looked for, for each token that was not predicted: 10 us.
WINDOW = 4096


class PredictedText:
    """Follows an output along its prediction; what the output leaves out is passed over, and nothing counts twice.

    Args:
        token_ids: Tokens of the prediction.

    Attributes:
        at: Index of the next token in the prediction; None: the output has left it. It may be its end.
        num_agreed: Tokens up to there that agree.
        num_accepted: Tokens of the output that were predicted.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.at: int | None = 0
        self.num_agreed = AGREED_AT_START
        self.num_accepted = 0
        self._array = np.asarray(token_ids, dtype=np.int64)
        # Up to where the output has come.
        self._reached = 0
        self._last: int | None = None

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that were not in the output."""
        return len(self.token_ids) - self.num_accepted

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes further tokens of the output."""
        for token_id in token_ids:
            if self.at is not None and self.at < len(self.token_ids) and self.token_ids[self.at] == token_id:
                self.at += 1
                self._reached = self.at
                self.num_agreed += 1
                self.num_accepted += 1
            else:
                self.at = self._found(token_id)
                self.num_agreed = LEAST_AGREED
            self._last = token_id

    def _found(self, token_id: int) -> int | None:
        """Returns the nearest place ahead, behind the output's last two tokens."""
        if self._last is None:
            return None
        ahead = self._array[self._reached : self._reached + WINDOW]
        places = np.flatnonzero((ahead[:-1] == self._last) & (ahead[1:] == token_id))
        return self._reached + int(places[0]) + LEAST_AGREED if len(places) else None
