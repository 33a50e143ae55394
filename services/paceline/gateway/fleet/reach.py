"""Which verifiers this gateway can reach, as its own calls show, whatever the registry says.

Calls that are lost make a verifier a suspect; anything that is heard of it afterwards clears it. A gateway that is not
ready gets no requests any more, which could show that all is well again: so suspects are asked for their health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from paceline.store.base import Replica
from paceline.store.view import Answers

# A verifier that restarts is back, or out of the registry, within this time.
UNREACHABLE_S = 5.0


class Reach:
    """What one gateway knows of its ways to verifiers.

    Args:
        answers: Asks a replica whether it serves.
        clock: Monotonic seconds.
    """

    def __init__(self, answers: Answers, clock: Callable[[], float]) -> None:
        self._answers = answers
        self._clock = clock
        # When the first call was lost since something was heard, by replica id.
        self._lost_s: dict[str, float] = {}

    def lost(self, replica_id: str) -> None:
        """A call to a verifier was lost: it could not be reached, broke off, or fell silent."""
        self._lost_s.setdefault(replica_id, self._clock())

    def heard(self, replica_id: str) -> None:
        """A verifier has answered, and be it with an error."""
        self._lost_s.pop(replica_id, None)

    def any_of(self, replicas: Iterable[Replica]) -> bool:
        """Whether one of these may be reached: it has answered within the last `UNREACHABLE_S`, or was not needed."""
        since_s = self._clock() - UNREACHABLE_S
        return any(self._lost_s.get(each.replica_id, self._clock()) > since_s for each in replicas)

    async def ask(self, replicas: Sequence[Replica]) -> None:
        """Asks the suspects among all replicas for their health; forgets those that have left."""
        suspects = [each for each in replicas if each.replica_id in self._lost_s]
        self._lost_s = {each.replica_id: self._lost_s[each.replica_id] for each in suspects}
        for replica, serves in zip(suspects, await asyncio.gather(*map(self._answers, suspects)), strict=True):
            if serves:
                self.heard(replica.replica_id)
