"""The path of every session, whichever door it came through: admission, placement, text, records, metrics.

It knows neither HTTP nor the messages of the gateway's gRPC service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from paceline.core.errors import EndsEnginesError, OverloadedError, PacelineError, StaleEpochError, UnavailableError
from paceline.core.messages import NO_EVENT, GenerateResult, SessionEvent
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.gateway.sessions.answer import OutputStream
from paceline.gateway.sessions.failover import Failover
from paceline.gateway.sessions.output import Ending, TakePiece
from paceline.gateway.sessions.recorded import RecordedSession
from paceline.gateway.sessions.records import RecordWriter
from paceline.gateway.sessions.request import SessionRequest
from paceline.obs.metrics import GatewayMetrics, ModelMetrics
from paceline.service.fair_shares import RETRY_AFTER_S, Caller, Shares
from paceline.store.base import SessionState, next_owner_epoch

SHUTTING_DOWN = "the gateway is shutting down"


class Sessions:
    """Runs sessions, a bounded number at a time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        client: VerifierClient,
        failover: Failover,
        records: RecordWriter,
        metrics: GatewayMetrics,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._failover = failover
        self._records = records
        self._metrics = metrics
        self._places = Shares(max_sessions, "sessions")
        # As many again: otherwise a gateway that is busy leaves the clients of one that died behind its own new ones.
        self._continued_places = Shares(max_sessions, "continued sessions")
        self._clock = clock
        self._stopping = False
        self._draining = False

    @property
    def stopping(self) -> bool:
        """Whether new sessions are refused for good."""
        return self._stopping

    @property
    def draining(self) -> bool:
        """Whether new sessions are refused."""
        return self._stopping or self._draining

    @property
    def num_running(self) -> int:
        """Sessions admitted and not yet ended."""
        return self._places.num_held + self._continued_places.num_held

    def model(self, name: str) -> ServedModel:
        """Returns a model by name.

        Raises:
            ModelNotFoundError: It is not served here.
            UnavailableError: No verifier of it is there.
        """
        return self._fleet.model(name)

    def count_error(self, error: Exception) -> None:
        """Counts a request that an error has ended."""
        self._metrics.request_errors.labels(type(error).__name__.lstrip("_")).inc()

    @contextmanager
    def admitted(self, num_sessions: int, caller: Caller, *, continued: bool = False) -> Iterator[None]:
        """Holds places for all sessions of a request.

        Args:
            num_sessions: How many.
            caller: Its sender.
            continued: Whether they began at another gateway, or in another call.

        Raises:
            OverloadedError: There are not that many places free, or they are reserved for other callers.
            UnavailableError: The gateway is shutting down.
        """
        if self._stopping:
            raise UnavailableError(SHUTTING_DOWN)
        if self._draining:
            raise UnavailableError("the gateway is draining; ask another")
        limit = caller.max_sessions
        held = self._places.held_by(caller) + self._continued_places.held_by(caller)
        if limit is not None and held + num_sessions > limit:
            raise OverloadedError(
                f"API key {caller.name!r} may run {limit} sessions at once and runs {held}, "
                f"{num_sessions} more were asked for",
                retry_after_s=RETRY_AFTER_S,
            )
        places = self._continued_places if continued else self._places
        with places.take(num_sessions, caller):
            yield

    async def run(self, request: SessionRequest, take: TakePiece) -> Ending:
        """Runs a session, and returns how it ended; cancelling it frees the session everywhere.

        Args:
            take: Takes each piece of the answer in the turn of the event loop in which its tokens come. An error that
                it raises ends the session.

        Raises:
            ResumeMismatchError: The client has other tokens than the session.
            PacelineError: The session could not be run to its end.
        """
        metrics = self._metrics.of(request.model.identity.name)
        with Stopwatch(metrics, self._clock) as stopwatch:
            request = request.resolved()
            # Before it has a record: the store is not asked about what is refused.
            self._failover.check_room(request)
            recorded = self._records.open(request, partial(self._taken_over, request))
            with _ended(recorded):
                output = OutputStream(request)
                add = partial(_add, output, stopwatch, take)
                metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                logged, event = request.committed_token_ids, _logged_end(request)
                if logged or event is not NO_EVENT:
                    add(logged, b"", event)
                if request.finished is None and not output.stopped:
                    await self._failover.run(request, recorded, add)
                ending = output.ending(recorded)
                stopwatch.ended(ending)
                recorded.end(SessionState(ending.finish_reason.value))
                return ending

    def drain(self, *, draining: bool) -> None:
        """Refuses new sessions while an operator wants it; health checks report it."""
        self._draining = draining

    async def finish(self, timeout_s: float, farewell_s: float) -> None:
        """Waits for running sessions, then ends the rest with an error.

        Args:
            timeout_s: Time that sessions get to end by themselves, in seconds.
            farewell_s: Time to deliver that error, in seconds.
        """
        self._stopping = True
        if not await self._wait_idle(timeout_s):
            self._client.abort(SHUTTING_DOWN)
            await self._wait_idle(farewell_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.emptied()
                await self._continued_places.emptied()
        except TimeoutError:
            return False
        return True

    def _taken_over(self, request: SessionRequest) -> None:
        """Ends the calls of a session that has another owner now, maybe a later call at this very gateway."""
        last_epoch = next_owner_epoch(request.epoch) - 1
        error = StaleEpochError(f"session {request.session_id} continues at another gateway")
        self._client.end(
            lambda call: call.request.session_id == request.session_id and call.request.epoch <= last_epoch, error
        )


def _add(
    output: OutputStream,
    stopwatch: Stopwatch,
    take: TakePiece,
    token_ids: tuple[int, ...],
    origins: bytes,
    event: SessionEvent,
) -> bool:
    """Adds to an answer what was committed; returns whether its text has ended it."""
    # The speculation record comes after the text's end.
    piece = None if output.stopped else output.take(token_ids, origins, event)
    if piece is not None:
        stopwatch.tokens(len(piece.token_ids))
        take(piece)
    return output.stopped


def _logged_end(request: SessionRequest) -> SessionEvent:
    """Returns how a session ended before this gateway got it, if it did."""
    if request.finished is None:
        return NO_EVENT
    # The log has no speculation record of it.
    result = GenerateResult(
        finish_reason=request.finished,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_generated_tokens=len(request.committed_token_ids),
    )
    return SessionEvent(result=result)


@contextmanager
def _ended(recorded: RecordedSession) -> Iterator[None]:
    """Records the end of a session, unless the block has recorded one."""
    state = SessionState.LEFT
    try:
        yield
    except EndsEnginesError:
        state = SessionState.REFUSED
        raise
    except PacelineError:
        state = SessionState.FAILED
        raise
    finally:
        if not recorded.ended:
            recorded.end(state)


class Stopwatch:
    """Observes one session; starts running when built, and counts as waiting from entry to its first token."""

    def __init__(self, metrics: ModelMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._last_s: float | None = None

    def __enter__(self) -> Self:
        self._metrics.num_requests_running.inc()
        self._metrics.num_requests_waiting.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.num_requests_running.dec()
        if self._last_s is None:
            self._metrics.num_requests_waiting.dec()

    def tokens(self, num_tokens: int) -> None:
        """Counts tokens that arrived now."""
        if not num_tokens:
            return
        now_s = self._clock()
        self._metrics.generation_tokens.inc(num_tokens)
        if self._last_s is None:
            self._metrics.num_requests_waiting.dec()
            self._metrics.time_to_first_token.observe(now_s - self._started_s)
        else:
            self._metrics.inter_token_latency.observe_alike((now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s

    def ended(self, ending: Ending) -> None:
        """Counts a session that ended well."""
        self._metrics.e2e_request_latency.observe(self._clock() - self._started_s)
        self._metrics.request_prompt_tokens.observe(ending.num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(ending.num_generated_tokens)
        self._metrics.request_success.labels(ending.finish_reason.value).inc()
        if ending.speculation is not None:
            self._metrics.speculation.add_session(
                num_draft_tokens=ending.speculation.num_draft_tokens,
                acceptance_histogram=ending.speculation.acceptance_histogram,
            )
