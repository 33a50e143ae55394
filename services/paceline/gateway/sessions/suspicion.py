"""Whether a request ends the engines that run it: what is known from the attempts to run it.

Pure. An engine that dies tells which sessions its last step computed; a process that dies tells nothing, and others may
have killed it. So the first death is suspicion and no more, of whoever was computed, or may have been. Until it has a
token, a suspect runs in steps of its own, and its gateway hears before the first of them that it does; a second death
is then proof. A session that has given tokens before has been through an engine: it is allowed one death more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError

# Engines in a row that died without a token of the session, until it is not run again.
MOST_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What speaks against one session.

    Attributes:
        num_deaths: Engines in a row that died while they ran it and brought no token of it.
        has_tokens: Whether an engine ever brought one.
    """

    num_deaths: int = 0
    has_tokens: bool = False

    def after(self, error: PacelineError, *, ran: bool, unheard: bool = False, progressed: bool = False) -> Suspicion:
        """Returns what is known after one more attempt.

        Args:
            error: What ended it.
            ran: Whether the engine had said that it computes the session.
            unheard: Whether the verifier had taken the session, and was gone before it said anything of it.
            progressed: Whether it brought a token.
        """
        known = Suspicion(has_tokens=True) if progressed else self
        told = isinstance(error, EngineDiedError)
        # Whoever is no suspect may be computed before the process can say so; who waits for a place soon hears so.
        lost = isinstance(error, PeerLostError) and (ran or (unheard and not known.suspect))
        return replace(known, num_deaths=known.num_deaths + 1) if told or lost else known

    @property
    def suspect(self) -> bool:
        """Whether engines died with it, so that it is run alone."""
        return self.num_deaths > self.has_tokens

    @property
    def guilty(self) -> bool:
        """Whether it must not be run again."""
        return self.num_deaths >= MOST_DEATHS + self.has_tokens
