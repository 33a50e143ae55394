"""Places a session on a verifier, and on another one when that verifier is lost.

The committed tokens go along under a higher epoch. The same seed gives the same tokens there, so the client sees only a
pause.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.core.errors import (
    EndsEnginesError,
    InvalidRequestError,
    MovedError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.grammar import FIELD as GRAMMAR_FIELD
from paceline.core.messages import VERIFIER, GenerateRequest, SessionEvent, SpeculationRecord
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.routing import Router
from paceline.gateway.fleet.verifier_client import OnCommit, RunningCall, VerifierClient
from paceline.gateway.sessions.output import sum_of_records
from paceline.gateway.sessions.recorded import RecordedSession
from paceline.gateway.sessions.request import SessionRequest
from paceline.obs import attributes as names
from paceline.obs.tracing import OFF, Attributes, Span, SpanKind, Tracer, ended, start_span, traceparent_of
from paceline.store.base import Replica

# Pauses before a session looks again for a verifier when there is none, and before it tries verifiers again that have
# all just failed it: the few attempts must not all fall into a moment in which everything is broken.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
LAST_PAUSE_OF_FAILED_S = 4.0
# New sessions whose engine died begin again one after another: the one that ended the engine must not take the others
# with it once more, or all would be refused. Each has its turn until its first token, and waits no longer than this for
# it; sessions of several gateways begin within the second time, each at another moment.
LONGEST_TURN_S, PART_S = 5.0, 1.0
# A verifier that left the registry may only have lost its connection to it. Its sessions move once it has also been
# silent for longer than the interval between its messages.
SILENT_S = 2.5
# Failures in a row, without a token, after which a session is given up; waiting for a place is no failure.
MOST_FAILURES = 10
# Errors of the request itself: any other verifier would raise them as well.
_OF_THE_REQUEST = (InvalidRequestError, StaleEpochError)


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """A session, the verifiers that have failed it since its last token, and until when it may look for another."""

    request: SessionRequest
    recorded: RecordedSession
    # Turns of new sessions whose engine died.
    turns: asyncio.Lock
    has_turn: bool = False
    until_s: float
    pause_s: float = FIRST_PAUSE_S
    num_failures: int = 0
    failed: set[str] = field(default_factory=set)

    @property
    def has_waited(self) -> bool:
        """Whether it has waited already because all verifiers had failed it."""
        return self.pause_s > FIRST_PAUSE_S

    async def wait_for_turn(self) -> None:
        """Returns when its turn has come, or would take too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_TURN_S):
                await self.turns.acquire()
                self.has_turn = True

    def end_turn(self) -> None:
        """Ends its turn, if it has one."""
        if self.has_turn:
            self.has_turn = False
            self.turns.release()

    def restart(self, until_s: float) -> None:
        """Forgets past failures: the session has a new token."""
        self.until_s, self.pause_s, self.num_failures = until_s, FIRST_PAUSE_S, 0
        self.failed.clear()


class Failover:
    """Runs sessions on the verifiers of a fleet.

    Args:
        fleet: The replicas.
        router: Chooses among verifiers.
        client: Calls verifiers.
        failover_s: Time that a session looks for a verifier after its last token; 0: each verifier is tried once.
        max_wait_s: Longest expected wait for a place at a verifier; a request may ask for less.
        on_failover: Called with the reason when a session leaves a verifier.
        tracer: Records spans, if tracing is on.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: Router,
        client: VerifierClient,
        failover_s: float,
        max_wait_s: float,
        on_failover: Callable[[str], None] = lambda _: None,
        tracer: Tracer = OFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._health = fleet.health
        self._router = router
        self._client = client
        self._failover_s = failover_s
        self._max_wait_s = max_wait_s
        self._on_failover = on_failover
        self._tracer = tracer
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._turns = asyncio.Lock()

    def check_room(self, request: SessionRequest) -> None:
        """Refuses a new session while it would wait too long at every verifier; a resumed session waits.

        Raises:
            OverloadedError: It would; names the time after which to try again.
        """
        if not request.resumed:
            able = self._fleet.verifiers(request.model.identity.name)
            self._health.check_room((each.replica_id for each in able), self._max_wait_of(request))

    def _max_wait_of(self, request: SessionRequest) -> float:
        return self._max_wait_s if request.max_wait_s is None else min(request.max_wait_s, self._max_wait_s)

    async def run(self, request: SessionRequest, recorded: RecordedSession, take: OnCommit) -> None:
        """Runs what the record lacks of a session, on one verifier after another, and adds it to the record.

        Args:
            take: Takes what verifiers commit, see `RunningCall`; the last has a result, unless `take` has all it wants.

        Raises:
            EndsEnginesError: Several engines in a row died of it.
            PacelineError: A verifier refused the session, none was found in time, or the gateway ended it.
        """
        until_s = self._clock() + self._failover_s
        attempts = _Attempts(request=request, recorded=recorded, turns=self._turns, until_s=until_s)
        try:
            await self._try_verifiers(attempts, take)
        finally:
            attempts.end_turn()

    async def _try_verifiers(self, attempts: _Attempts, take: OnCommit) -> None:
        """Does the work of `run`; its last turn may not have ended."""
        request, recorded = attempts.request, attempts.recorded
        epoch = request.epoch
        while True:
            if recorded.deaths.parts:
                await attempts.wait_for_turn()
            verifier = await self._verifier(attempts)
            assert verifier.identity is not None, "a verifier without identity is never chosen"
            generate = self._generate(request, recorded, epoch)
            add = partial(self._add, verifier, attempts, recorded.speculation, take)
            running = self._client.running(verifier.address, generate, verifier.identity.vocab_size, add)
            known = len(recorded.token_ids)
            try:
                await self._on_verifier(verifier, running, recorded, request.span)
                self._health.served(verifier.replica_id)
                return
            except PacelineError as error:
                attempts.end_turn()
                self._note_reach(running, verifier, error)
                if isinstance(error, InvalidRequestError) and error.field == GRAMMAR_FIELD:
                    raise InvalidRequestError(request.grammar_field, error.problem) from None
                if isinstance(error, _OF_THE_REQUEST) or self._client.aborted or _ended_here(running):
                    raise
                progressed = len(recorded.token_ids) > known
                if progressed:
                    attempts.restart(self._clock() + self._failover_s)
                recorded.failed(error, ran=running.ran, unheard=running.unheard, progressed=progressed)
                self._note_failure(verifier, attempts, error, progressed=progressed)
                await self._before_next(attempts, error)
            epoch += 1

    def _add(
        self,
        verifier: Replica,
        attempts: _Attempts,
        earlier: SpeculationRecord | None,
        take: OnCommit,
        token_ids: tuple[int, ...],
        origins: bytes,
        event: SessionEvent,
    ) -> bool:
        """Adds to the record what a verifier has committed, and hands it on."""
        self._health.heard(verifier.replica_id)
        if token_ids:
            attempts.end_turn()
            attempts.recorded.extend(token_ids)
        if event.speculation is not None:
            attempts.recorded.speculation = sum_of_records([earlier, event.speculation])
        return take(token_ids, origins, event)

    def _note_reach(self, running: RunningCall, verifier: Replica, error: PacelineError) -> None:
        """Remembers whether the verifier was there to fail; a call that the gateway ended shows nothing."""
        if isinstance(error, PeerLostError):
            self._health.lost(verifier.replica_id)
        elif running.ended_by is None:
            self._health.heard(verifier.replica_id)

    def _note_failure(self, verifier: Replica, attempts: _Attempts, error: PacelineError, *, progressed: bool) -> None:
        """Remembers what a failed attempt shows about the verifier."""
        attempts.failed.add(verifier.replica_id)
        if isinstance(error, OverloadedError):
            self._health.refused(verifier.replica_id, error, self._max_wait_of(attempts.request))
        if isinstance(error, OverloadedError | MovedError):
            return
        attempts.num_failures += 1
        self._router.forget(verifier.replica_id)
        if progressed:
            self._health.served(verifier.replica_id)
        self._health.failed(verifier.replica_id)

    def move_away(self) -> None:
        """Moves sessions whose verifier drains or has vanished, if there is another verifier."""
        verifiers = {each.address: each for each in self._fleet.replicas if each.role == VERIFIER}
        now_s = self._clock()

        def must_move(call: RunningCall) -> bool:
            replica = verifiers.get(call.address)
            if replica is not None:
                return replica.draining
            return now_s - call.heard_s >= SILENT_S

        if self._fleet.store_error is None and any(not each.draining for each in verifiers.values()):
            reason = "the verifier drains or has left the registry"
            self._client.end(must_move, MovedError(reason))

    async def _verifier(self, attempts: _Attempts) -> Replica:
        """Returns the verifier to try next; waits for one if there is none.

        Raises:
            UnavailableError: None appeared in time.
        """
        token_ids, salt = attempts.recorded.token_ids, attempts.request.prefix_salt
        while True:
            able = self._able(attempts)
            if able:
                return self._router.place(self._fleet.replicas, able, token_ids, self._in_flight, salt)
            if self._clock() >= attempts.until_s:
                raise UnavailableError(
                    f"no verifier of model {attempts.request.model.identity.name!r} is available now"
                )
            await self._pause(attempts, LAST_PAUSE_S)
            attempts.failed.clear()

    def _able(self, attempts: _Attempts) -> list[Replica]:
        """Returns the verifiers to choose from: none that has just failed this session, or is ejected."""
        request = attempts.request
        able = [
            each for each in self._fleet.verifiers(request.model.identity.name) if attempts.recorded.may_go_to(each)
        ]
        capable = [each for each in able if each.identity is not None and request.fits(each.identity)]
        # If none can serve it, one of them names the limit that it exceeds.
        left = self._health.without_ejected(capable or able)
        return [each for each in left if each.replica_id not in attempts.failed]

    async def _before_next(self, attempts: _Attempts, error: PacelineError) -> None:
        """Returns when it is time for another try; raises the error when the session is given up."""
        deaths = attempts.recorded.deaths
        if deaths.too_many:
            raise EndsEnginesError(
                f"{deaths.count} engines in a row died, or their processes were lost, while they ran the request; "
                "it is not run again"
            ) from error
        if attempts.num_failures >= MOST_FAILURES:
            raise _given_up(attempts, error) from error
        if not self._able(attempts):
            # A new session that no verifier has room for is refused at once.
            if isinstance(error, OverloadedError) and not attempts.recorded.committed_token_ids:
                raise error
            if self._clock() >= attempts.until_s:
                raise _given_up(attempts, error) from error
            await self._pause(attempts, LAST_PAUSE_OF_FAILED_S)
            attempts.failed.clear()
        elif attempts.has_waited:
            await self._pause(attempts, LAST_PAUSE_OF_FAILED_S)
        if deaths.parts:
            await asyncio.sleep(random.uniform(0.0, PART_S))
        self._on_failover(type(error).__name__)

    async def _pause(self, attempts: _Attempts, most_s: float) -> None:
        await asyncio.sleep(min(attempts.pause_s, most_s, max(0.0, attempts.until_s - self._clock())))
        attempts.pause_s = min(2 * attempts.pause_s, LAST_PAUSE_OF_FAILED_S)

    def _generate(self, request: SessionRequest, recorded: RecordedSession, epoch: int) -> GenerateRequest:
        return GenerateRequest(
            session_id=request.session_id,
            epoch=epoch,
            prompt_token_ids=request.prompt_token_ids,
            committed_token_ids=recorded.committed_token_ids,
            whole=request.whole and not request.may_stop_early,
            max_wait_s=self._max_wait_of(request),
            **request.of_caller(),
        )

    async def _on_verifier(
        self, verifier: Replica, running: RunningCall, recorded: RecordedSession, span: Span
    ) -> None:
        """Runs a session on one verifier, counted and recorded."""
        generate = running.request
        recorded.placed(generate.epoch, verifier)
        self._in_flight[verifier.replica_id] += 1
        try:
            with ended(_placement_span(self._tracer, span, generate, verifier)) as placement:
                if traceparent := traceparent_of(placement):
                    running.request = replace(generate, traceparent=traceparent)
                await self._client.run(running)
        finally:
            self._in_flight[verifier.replica_id] -= 1
            self._router.follow(verifier, recorded.token_ids, generate.cache_salt)


def _ended_here(running: RunningCall) -> bool:
    """Whether the gateway ended the session for good, such as one whose client does not read."""
    return running.ended_by is not None and not isinstance(running.ended_by, MovedError)


def _given_up(attempts: _Attempts, error: PacelineError) -> PacelineError:
    """Returns the error for the client; one that may have tokens already can come back for the rest."""
    begun = attempts.request.resumed or attempts.recorded.committed_token_ids
    if not begun or isinstance(error, UnavailableError | OverloadedError):
        return error
    return UnavailableError(f"no verifier could continue the session; the last one failed with: {error}")


def _placement_span(tracer: Tracer, span: Span, generate: GenerateRequest, verifier: Replica) -> Span:
    """Starts the span of one placement below the request's."""
    if not span.is_recording():
        return span
    attributes: Attributes = {
        names.SESSION_ID: generate.session_id,
        names.EPOCH: generate.epoch,
        names.VERIFIER: verifier.replica_id,
        names.SERVER_ADDRESS: verifier.address,
        names.NUM_COMMITTED_TOKENS: len(generate.committed_token_ids),
    }
    return start_span(tracer, "placement", parent=span, kind=SpanKind.CLIENT, attributes=attributes)
