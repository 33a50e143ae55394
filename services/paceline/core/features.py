"""The target's fused hidden states on their way into the KV of a drafter that drafts from them (EAGLE-3).

The feature of a position is paired with the token after it: row i of such a drafter takes the token at i + 1 and the
feature of position i, so its pages hold one row less than there are tokens, and the first token has none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import CommittedStates

Features = npt.NDArray[np.float32]


class FeatureBuffer:
    """Features of the positions `start` to `stop` - 1; those before were used, those after have not come.

    Args:
        width: Numbers a feature.
        most: Positions that a session can have.
    """

    def __init__(self, width: int, most: int) -> None:
        self.start = 0
        self._width = width
        self._most = most
        self._rows: Features = np.empty((0, width), np.float32)

    @property
    def stop(self) -> int:
        """End of the stored positions, exclusive."""
        return self.start + len(self._rows)

    def add(self, message: CommittedStates) -> None:
        """Adds the next features; those that are known already are passed over.

        Raises:
            RemoteProtocolError: They have another width, or some before them are missing.
        """
        if message.width != self._width:
            raise RemoteProtocolError(f"CommittedStates.width: must be {self._width}, got {message.width}")
        if message.start > self.stop:
            raise RemoteProtocolError(f"CommittedStates.start: must be at most {self.stop}, got {message.start}")
        fresh = decode_states(message)[self.stop - message.start :]
        if self.stop + len(fresh) > self._most:
            raise RemoteProtocolError(f"CommittedStates: a session has at most {self._most} positions")
        self._rows = np.concatenate([self._rows, fresh])

    def rows(self, start: int, stop: int) -> Features:
        """Features of positions `start` to `stop` - 1, float32 [n, width]."""
        return self._rows[start - self.start : stop - self.start]

    def drop_before(self, position: int) -> None:
        """Drops the states before a position; nobody asks for them again."""
        if position > self.start:
            self._rows = self._rows[position - self.start :].copy()
            self.start = position


def decode_states(message: CommittedStates) -> Features:
    """The features of a message, float32 [n, width]; they come as bfloat16, the upper half of a float32."""
    bits = np.frombuffer(message.values, "<u2").astype(np.uint32)
    return (bits << 16).view(np.float32).reshape(-1, message.width)
