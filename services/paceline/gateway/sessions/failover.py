"""Who runs a session, and who goes on with it: places it on a verifier, and on another when that one is lost.

What has been committed goes along under a higher epoch; the same seed gives the same tokens there, so whoever reads
sees a pause and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from paceline.core.errors import (
    EndsEnginesError,
    InvalidRequestError,
    MovedError,
    OverloadedError,
    PacelineError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import VERIFIER, CommittedTokens, GenerateRequest
from paceline.gateway.fleet.ejection import Ejections
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.full_verifiers import ToldFull
from paceline.gateway.fleet.routing import Router
from paceline.gateway.fleet.verifier_client import RunningCall, VerifierClient
from paceline.gateway.sessions.output import sum_of_records
from paceline.gateway.sessions.records import SessionTrail
from paceline.gateway.sessions.request import SessionRequest
from paceline.obs import attributes as names
from paceline.obs.tracing import OFF, Attributes, Span, SpanKind, Tracer, ended, start_span, traceparent_of
from paceline.store.base import Replica

# Pauses before a session looks again for a verifier where none is there, and before it tries again those that have all
# just failed it: attempts are few, and are not all spent within the moment in which something is wrong everywhere.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
LAST_PAUSE_OF_FAILED_S = 4.0
# A verifier that left the registry may only have lost its way to it; its sessions go when it is silent as well, for
# longer than between two signs of life.
SILENT_S = 2.5
# Failures in a row, without a token, after which a session is not tried again; waits for a place are none.
MOST_FAILURES = 10
# What a verifier says of the request itself, and any other would say as well.
_ABOUT_THE_REQUEST = (InvalidRequestError, StaleEpochError)


@dataclass(slots=True, kw_only=True)
class _Search:
    """Where a session has been in vain since its last token, and until when it may go on looking."""

    until_s: float
    pause_s: float = FIRST_PAUSE_S
    num_failures: int = 0
    failed: set[str] = field(default_factory=set)

    @property
    def once_round(self) -> bool:
        """Whether all verifiers there were have failed it, and it has begun to wait."""
        return self.pause_s > FIRST_PAUSE_S


class Placer:
    """Runs sessions on the verifiers of a fleet.

    Args:
        fleet: The replicas.
        router: Chooses among verifiers.
        client: Calls verifiers.
        failover_s: How long a session looks for a verifier after its last token; 0: one round of all of them.
        max_wait_s: Longest expected wait for a place at a verifier; a request may ask for less.
        on_failover: Called with the reason when a session leaves a verifier.
        on_ejected: Called with its replica id when a verifier gets no sessions for a while.
        tracer: Records spans, if it does.
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
        on_ejected: Callable[[str], None] = lambda _: None,
        tracer: Tracer = OFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._client = client
        self._failover_s = failover_s
        self._max_wait_s = max_wait_s
        self._on_failover = on_failover
        self._tracer = tracer
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._ejections = Ejections(clock, on_ejected)
        self._told_full = ToldFull(clock)

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Sessions of this gateway by the replica ids of their verifiers."""
        return self._in_flight

    def check_room(self, request: SessionRequest) -> None:
        """Refuses a new session while all verifiers say that it would wait too long; one that has begun waits.

        Raises:
            OverloadedError: They do; says when to come again.
        """
        if not request.resumed:
            able = self._fleet.verifiers(request.model.identity.name)
            self._told_full.check((each.replica_id for each in able), self._max_wait_of(request))

    def _max_wait_of(self, request: SessionRequest) -> float:
        return self._max_wait_s if request.max_wait_s is None else min(request.max_wait_s, self._max_wait_s)

    async def committed(self, request: SessionRequest, trail: SessionTrail) -> AsyncGenerator[CommittedTokens, None]:
        """Yields what verifiers commit beyond the trail, and puts it there; its last message has a result.

        Raises:
            EndsEnginesError: Engines died of it, one after another.
            PacelineError: A verifier refused the session, or none was found in time.
        """
        search = self._new_search()
        epoch = request.epoch
        while True:
            verifier = await self._verifier(request, trail, search)
            generate = self._generate(request, trail, epoch)
            assert verifier.identity is not None, "a verifier without identity is never chosen"
            running = self._client.running(verifier.address, generate, verifier.identity.vocab_size)
            known = len(trail.token_ids)
            earlier = trail.speculation
            try:
                async with aclosing(self._on_verifier(verifier, running, generate, trail, request.span)) as steps:
                    async for step in steps:
                        trail.extend(step.token_ids)
                        if step.speculation is not None:
                            trail.speculation = sum_of_records([earlier, step.speculation])
                        yield step
                self._ejections.served(verifier.replica_id)
                return
            except PacelineError as error:
                if isinstance(error, _ABOUT_THE_REQUEST) or self._client.aborted:
                    raise
                progressed = len(trail.token_ids) > known
                if progressed:
                    search = self._new_search()
                suspicion = trail.suspicion.after(
                    error, ran=running.ran, unheard=running.unheard, progressed=progressed
                )
                trail.suspect(suspicion)
                self._note_failure(
                    verifier, search, error, max_wait_s=self._max_wait_of(request), progressed=progressed
                )
                await self._before_next(request, trail, search, error)
            epoch += 1

    def _note_failure(
        self, verifier: Replica, search: _Search, error: PacelineError, *, max_wait_s: float, progressed: bool
    ) -> None:
        """Remembers what a failed attempt says of the verifier."""
        search.failed.add(verifier.replica_id)
        if isinstance(error, OverloadedError):
            self._told_full.told(verifier.replica_id, error, max_wait_s)
        if isinstance(error, OverloadedError | MovedError):
            return
        search.num_failures += 1
        self._router.forget(verifier.replica_id)
        if progressed:
            self._ejections.served(verifier.replica_id)
        self._ejections.failed(verifier.replica_id)

    def move_away(self) -> None:
        """Lets sessions go on elsewhere whose verifier drains or has vanished, where there is another."""
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
        self._ejections.keep_only(self._fleet.replicas)
        self._told_full.keep_only(verifier.replica_id for verifier in verifiers.values())

    def _new_search(self) -> _Search:
        return _Search(until_s=self._clock() + self._failover_s)

    async def _verifier(self, request: SessionRequest, trail: SessionTrail, search: _Search) -> Replica:
        """The verifier to try next; waits for one where none is to be had.

        Raises:
            UnavailableError: None appeared in time.
        """
        name = request.model.identity.name
        while True:
            able = self._able(request, trail, search)
            if able:
                salt = request.prefix_salt
                return self._router.place(self._fleet.replicas, able, trail.token_ids, self._in_flight, salt)
            if self._clock() >= search.until_s:
                raise UnavailableError(f"no verifier of model {name!r} is there at the moment")
            await self._pause(search, LAST_PAUSE_S)
            search.failed.clear()

    def _able(self, request: SessionRequest, trail: SessionTrail, search: _Search) -> list[Replica]:
        """Verifiers to choose from; none that failed the session just now, or fails those of others."""
        able = [each for each in self._fleet.verifiers(request.model.identity.name) if trail.may_go_to(each)]
        capable = [each for each in able if each.identity is not None and request.fits(each.identity)]
        # Where none can serve it, one of them says what is too much.
        left = self._ejections.without(capable or able)
        return [each for each in left if each.replica_id not in search.failed]

    async def _before_next(
        self, request: SessionRequest, trail: SessionTrail, search: _Search, error: PacelineError
    ) -> None:
        """Returns when another try is worth it; raises the error when there is none."""
        if trail.suspicion.guilty:
            num_deaths = trail.suspicion.num_deaths
            raise EndsEnginesError(
                f"the request has ended {num_deaths} engines, one after another, and is not run again"
            ) from error
        if search.num_failures >= MOST_FAILURES:
            raise _given_up(error, request, trail) from error
        if not self._able(request, trail, search):
            # A new session that no verifier has room for is told so at once: it is not ours yet.
            refused = isinstance(error, OverloadedError) and not trail.committed_token_ids
            if refused:
                raise error
            if self._clock() >= search.until_s:
                raise _given_up(error, request, trail) from error
            await self._pause(search, LAST_PAUSE_OF_FAILED_S)
            search.failed.clear()
        elif search.once_round:
            await self._pause(search, LAST_PAUSE_OF_FAILED_S)
        self._on_failover(type(error).__name__)

    async def _pause(self, search: _Search, most_s: float) -> None:
        await asyncio.sleep(min(search.pause_s, most_s, max(0.0, search.until_s - self._clock())))
        search.pause_s = min(2 * search.pause_s, LAST_PAUSE_OF_FAILED_S)

    def _generate(self, request: SessionRequest, trail: SessionTrail, epoch: int) -> GenerateRequest:
        return GenerateRequest(
            session_id=request.session_id,
            epoch=epoch,
            prompt_token_ids=request.prompt_token_ids,
            committed_token_ids=trail.committed_token_ids,
            sampling=request.sampling,
            speculation=request.speculation,
            whole=request.whole,
            cache_salt=request.prefix_salt,
            suspect=trail.suspicion.suspect,
            priority=request.priority,
            max_wait_s=self._max_wait_of(request),
        )

    async def _on_verifier(
        self, verifier: Replica, running: RunningCall, generate: GenerateRequest, trail: SessionTrail, span: Span
    ) -> AsyncGenerator[CommittedTokens, None]:
        """Runs a session on one verifier, counted and recorded."""
        trail.placed(generate.epoch, verifier)
        self._in_flight[verifier.replica_id] += 1
        try:
            with ended(_placement_span(self._tracer, span, generate, verifier)) as placement:
                if traceparent := traceparent_of(placement):
                    generate = replace(generate, traceparent=traceparent)
                async with aclosing(self._client.generate(running, generate)) as steps:
                    async for step in steps:
                        yield step
        finally:
            self._in_flight[verifier.replica_id] -= 1
            self._router.follow(verifier, trail.token_ids, generate.cache_salt)


def _given_up(error: PacelineError, request: SessionRequest, trail: SessionTrail) -> PacelineError:
    """What a client is told that may have tokens already: verifiers fail it, and it may come for the rest later."""
    begun = request.resumed or trail.committed_token_ids
    if not begun or isinstance(error, UnavailableError | OverloadedError):
        return error
    return UnavailableError(f"no verifier goes on with the session; the last one failed it so: {error}")


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
