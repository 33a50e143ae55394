"""Whether a request ends the engines that run it: what is known from the attempts to run it.

Pure. An engine that dies tells which sessions its last step computed; a process that dies tells nothing, and others may
have killed it. Once under suspicion a session runs in steps of its own until it has a token, so that a second death is
proof of its guilt, and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError

# Engines in a row that died without a token of the session: of those that named it, and of all, for what kills those
# that only vanish may be something else.
MOST_TOLD = 2
MOST_LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """What speaks against one session.

    Attributes:
        num_deaths: Engines in a row that died while they ran it and brought no token of it.
        num_told: How many of them named the session.
    """

    num_deaths: int = 0
    num_told: int = 0

    def after(self, error: PacelineError, *, ran: bool, progressed: bool) -> Suspicion:
        """Returns what is known after one more attempt.

        Args:
            error: What ended it.
            ran: Whether the engine had computed something of it.
            progressed: Whether it brought a token.
        """
        known = Suspicion() if progressed else self
        told = isinstance(error, EngineDiedError)
        if not told and not (ran and isinstance(error, PeerLostError)):
            return known
        return replace(known, num_deaths=known.num_deaths + 1, num_told=known.num_told + told)

    @property
    def suspect(self) -> bool:
        """Whether an engine died with it."""
        return self.num_deaths > 0

    @property
    def guilty(self) -> bool:
        """Whether it must not be run again."""
        return self.num_told >= MOST_TOLD or self.num_deaths >= MOST_LOST
