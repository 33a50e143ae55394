"""A session's record for the store, and whether the session ends the engines that run it. Pure.

An engine that dies names the sessions of its last step; a process that dies names none, so every session counts that
it computed or may have computed. A session that has brought tokens before has been through an engine, and may have been
beside another that ended it: it is allowed one death more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import EngineDiedError, PacelineError, PeerLostError, PeerSilentError
from paceline.core.messages import SpeculationRecord, distribution_only
from paceline.store.base import AdvanceSession, PutSession, Replica, SessionRecord, SessionState, SessionWrite

# Engines in a row that may die without a token of the session before it is not run again.
MOST_DEATHS = 2
# Between the names of several arithmetics.
AND = " + "


@dataclass(frozen=True, slots=True)
class EngineDeaths:
    """How often engines died with one session.

    Attributes:
        count: Engines in a row that died while they ran it, without a token of it.
        silent: Verifiers in a row that fell silent while they ran it.
        has_tokens: Whether an engine ever computed a token of it.
    """

    count: int = 0
    has_tokens: bool = False
    silent: int = 0

    def after(
        self, error: PacelineError, *, ran: bool, unheard: bool = False, progressed: bool = False
    ) -> EngineDeaths:
        """Returns them after one more attempt.

        Args:
            error: The error that ended it.
            ran: Whether the verifier had reported that its engine computes the session.
            unheard: Whether the verifier vanished soon after it had accepted the session, before its first message.
            progressed: Whether the attempt brought a token.
        """
        known = EngineDeaths(has_tokens=True) if progressed else self
        died = isinstance(error, EngineDiedError)
        # It may be computed before the process can report it.
        lost = isinstance(error, PeerLostError) and (ran or unheard)
        silent = lost and isinstance(error, PeerSilentError)
        # A silent verifier is not known to have died. If the next one falls silent, too, the session may be the cause.
        counts = died or (lost and (not silent or known.silent > 0))
        return replace(known, count=known.count + counts, silent=known.silent + silent)

    @property
    def parts(self) -> bool:
        """Whether it should not run beside other sessions of which this is true."""
        return self.count > 0 and not self.has_tokens

    @property
    def too_many(self) -> bool:
        """Whether it must not be run again."""
        return self.count >= MOST_DEATHS + self.has_tokens


class RecordedSession:
    """A session's record for the store; it does not write to the store itself.

    Attributes:
        record: The current record, except `committed_len`, which follows from the log.
        token_ids: Prompt and committed tokens.
        deaths: Deaths of engines that ran it.
        speculation: Speculation counts here, as far as verifiers reported them; not part of the record.
    """

    def __init__(
        self,
        record: SessionRecord,
        token_ids: Sequence[int],
        on_change: Callable[[RecordedSession], None],
        on_taken_over: Callable[[], None],
        *,
        keeps_tokens: bool = True,
    ) -> None:
        self.record = record
        self.token_ids = list(token_ids)
        self.deaths = EngineDeaths(record.engine_deaths, has_tokens=len(token_ids) > record.prompt_len)
        self.speculation: SpeculationRecord | None = None
        self._keeps_tokens = keeps_tokens
        self.on_taken_over = on_taken_over
        self._on_change = on_change
        # Tokens that the store has; None: it needs the whole record.
        self._logged_len: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""
        return self.record.state is not SessionState.RUNNING

    @property
    def committed_token_ids(self) -> tuple[int, ...]:
        """Generated tokens so far."""
        return tuple(self.token_ids[self.record.prompt_len :])

    @property
    def mixed(self) -> bool:
        """Whether verifiers of different arithmetic have computed it."""
        return AND in self.record.arithmetic

    @property
    def distribution_only(self) -> bool:
        """Whether a verifier took part that guarantees only a text's distribution, not its tokens."""
        return any(map(distribution_only, self.record.arithmetic.split(AND)))

    def may_go_to(self, verifier: Replica) -> bool:
        """Whether a verifier may continue it: its weights are those that the session began with.

        A session that promises the same tokens needs the same arithmetic as well; any other is marked as mixed.
        """
        identity, record = verifier.identity, self.record
        if identity is None or not record.weights_hash:
            return identity is not None
        same_bits = not self._keeps_tokens or identity.arithmetic in record.arithmetic.split(AND)
        return identity.weights_hash == record.weights_hash and same_bits

    def failed(self, error: PacelineError, *, ran: bool, unheard: bool, progressed: bool) -> None:
        """An attempt to run it has failed; see `EngineDeaths.after`."""
        self.deaths = self.deaths.after(error, ran=ran, unheard=unheard, progressed=progressed)
        self.record = replace(self.record, engine_deaths=self.deaths.count)

    def placed(self, epoch: int, verifier: Replica) -> None:
        """The session starts, or starts anew, on a verifier."""
        self.record = replace(
            self.record,
            epoch=epoch,
            verifier_id=verifier.replica_id,
            weights_hash=verifier.identity.weights_hash if verifier.identity else "",
            arithmetic=self._arithmetic_with(verifier),
        )
        self._logged_len = None
        self._on_change(self)

    def _arithmetic_with(self, verifier: Replica) -> str:
        mine, known = verifier.identity.arithmetic if verifier.identity else "", self.record.arithmetic
        if not self.committed_token_ids or mine in known.split(AND):
            return known if self.committed_token_ids else mine
        return f"{known}{AND}{mine}"

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed."""
        self.token_ids += token_ids
        self._on_change(self)

    def end(self, state: SessionState) -> None:
        """The session ended."""
        self.record = replace(self.record, state=state)
        self._on_change(self)

    def next_write(self, ttl_s: float) -> SessionWrite:
        """Returns the write that brings the store up to date."""
        record = self.record
        if self._logged_len is None:
            whole = replace(record, committed_len=len(self.token_ids) - record.prompt_len)
            return PutSession(record=whole, token_ids=tuple(self.token_ids), ttl_s=ttl_s)
        return AdvanceSession(
            session_id=record.session_id,
            epoch=record.epoch,
            owner=record.owner,
            base_len=self._logged_len,
            token_ids=tuple(self.token_ids[self._logged_len :]),
            state=record.state,
        )

    def wrote(self, write: SessionWrite) -> None:
        """The store has made a write; the session may have progressed since, even to another verifier."""
        if isinstance(write, AdvanceSession):
            if self._logged_len is not None:
                self._logged_len = write.base_len + len(write.token_ids)
        elif write.record.epoch == self.record.epoch:
            self._logged_len = len(write.token_ids)

    def lost(self) -> None:
        """The store no longer has the record."""
        self._logged_len = None
