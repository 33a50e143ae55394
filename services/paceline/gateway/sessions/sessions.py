"""The one path of both front doors: admission, pairing, the verifier's stream, text, records, counts.

It knows neither HTTP nor the messages of the gateway's gRPC service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

from paceline.core.errors import EndsEnginesError, OverloadedError, PacelineError, StaleEpochError, UnavailableError
from paceline.core.messages import (
    CommittedTokens,
    FinishReason,
    GenerateResult,
    PositionLogprobs,
    SpeculationRecord,
)
from paceline.core.params import LAWFUL_RULES
from paceline.gateway.access.callers import Caller
from paceline.gateway.access.fair_shares import RETRY_AFTER_S, Shares
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.gateway.requests import ServedModel, SessionRequest
from paceline.gateway.sessions.failover import Placer
from paceline.gateway.sessions.known_tokens import KnownTokens
from paceline.gateway.sessions.output import Ending, Event, Piece
from paceline.gateway.sessions.records import RecordWriter, SessionTrail
from paceline.gateway.sessions.stopwatch import Stopwatch
from paceline.gateway.sessions.stream import TextStream
from paceline.obs.metrics import GatewayMetrics
from paceline.store.base import SessionState, next_owner_epoch

SHUTTING_DOWN = "the gateway is shutting down"


class Sessions:
    """Runs sessions, a bounded number at a time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        client: VerifierClient,
        placer: Placer,
        records: RecordWriter,
        metrics: GatewayMetrics,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._placer = placer
        self._records = records
        self._metrics = metrics
        self._places = Shares(max_sessions, "sessions")
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
        return self._places.num_held

    def model(self, name: str) -> ServedModel:
        """Returns a model by name.

        Raises:
            ModelNotFoundError: It is not served here.
            UnavailableError: No verifier of it is there.
        """
        return self._fleet.model(name)

    @contextmanager
    def errors_counted(self) -> Iterator[None]:
        """Counts by type what ends a block of one request; goes around all that can refuse or fail it."""
        try:
            yield
        except Exception as error:
            self.count_error(error)
            raise

    def count_error(self, error: Exception) -> None:
        """Counts a request that an error has ended."""
        self._metrics.request_errors.labels(type(error).__name__.lstrip("_")).inc()

    @contextmanager
    def admitted(self, num_sessions: int, caller: Caller) -> Iterator[None]:
        """Holds places for all sessions of a request.

        Raises:
            OverloadedError: There are not that many places free, or they are for other callers.
            UnavailableError: The gateway is shutting down.
        """
        if self._stopping:
            raise UnavailableError(SHUTTING_DOWN)
        if self._draining:
            raise UnavailableError("the gateway is draining; ask another")
        limit, held = caller.max_sessions, self._places.held_by(caller)
        if limit is not None and held + num_sessions > limit:
            raise OverloadedError(
                f"API key {caller.name!r} may run {limit} sessions at once and runs {held}, "
                f"{num_sessions} more were asked for",
                retry_after_s=RETRY_AFTER_S,
            )
        with self._places.take(num_sessions, caller):
            yield

    async def run(self, request: SessionRequest) -> AsyncGenerator[Event, None]:
        """Yields pieces of the answer, then its ending; closing the generator frees the session everywhere.

        Raises:
            PacelineError: The session could not be run to its end.
        """
        with Stopwatch(self._metrics.of(request.model.identity.name), self._clock) as stopwatch:
            async with aclosing(self._events(request, stopwatch)) as events:
                async for event in events:
                    yield event

    def drain(self, *, draining: bool) -> None:
        """Refuses new sessions while an operator wants it so; health tells."""
        self._draining = draining

    async def finish(self, timeout_s: float, farewell_s: float) -> None:
        """Waits for running sessions, then ends the rest with an error that says so.

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
        except TimeoutError:
            return False
        return True

    async def _events(self, request: SessionRequest, stopwatch: Stopwatch) -> AsyncGenerator[Event, None]:
        request = request.resolved()
        # Before it has a record: a store is not to be asked for what is refused.
        self._placer.check_room(request)
        trail = self._records.open(request, partial(self._taken_over, request))
        state = SessionState.LEFT
        try:
            async with aclosing(self._pieces(request, trail, stopwatch)) as events:
                async for event in events:
                    if isinstance(event, Ending):
                        state = SessionState(event.finish_reason.value)
                        trail.end(state)
                    yield event
        except EndsEnginesError:
            state = SessionState.REFUSED
            raise
        except PacelineError:
            state = SessionState.FAILED
            raise
        finally:
            if not trail.ended:
                trail.end(state)

    def _taken_over(self, request: SessionRequest) -> None:
        """Another owner has the session, maybe a later call at this very gateway: what the older one runs ends."""
        last_epoch = next_owner_epoch(request.epoch) - 1
        error = StaleEpochError(f"session {request.session_id} goes on at another gateway")
        self._client.end(lambda call: call.session_id == request.session_id and call.epoch <= last_epoch, error)

    async def _pieces(
        self, request: SessionRequest, trail: SessionTrail, stopwatch: Stopwatch
    ) -> AsyncGenerator[Event, None]:
        """Yields the answer beyond the tokens that the client has, and how it ended.

        Raises:
            ResumeMismatchError: The client has other tokens than these.
        """
        text_stream = TextStream(request)
        client = KnownTokens(request.offset, request.digest)
        self._metrics.of(request.model.identity.name).prompt_tokens.inc(len(request.prompt_token_ids))
        num_generated = 0
        result: GenerateResult | None = None
        stopped = lossy = False
        judged: list[PositionLogprobs] = []
        async with aclosing(self._committed(request, trail)) as steps:
            async for step in steps:
                lossy |= step.lossy
                if step.prompt_logprobs:
                    # A verifier that goes on for another begins anew with them.
                    judged[step.prompt_offset - 1 :] = step.prompt_logprobs
                if not step.token_ids and step.result is None:
                    continue
                offset, num_known = num_generated, client.take(step.token_ids)
                known = text_stream.feed(step.token_ids[:num_known])
                fed = known
                if not known.stopped:
                    fed = text_stream.feed(step.token_ids[num_known:], step.fates[num_known:])
                num_new = 0 if known.stopped or request.prompt_only else fed.num_tokens
                num_generated += known.num_tokens + num_new
                stopwatch.tokens(num_new)
                text, result, stopped = "" if known.stopped else fed.text, step.result, fed.stopped
                tokens = fed.tokens
                if request.prompt_only:
                    text, tokens, stopped = "", (), False
                elif result is not None and not stopped:
                    rest = text_stream.finish()
                    text, tokens, stopped = text + rest.text, tokens + rest.tokens, rest.stopped
                new = slice(num_known, num_known + num_new)
                yield Piece(
                    text=text,
                    token_ids=step.token_ids[new],
                    logprobs=step.logprobs[new],
                    tokens=tokens,
                    offset=offset + num_known,
                    digest=client.digest,
                    known_text=known.text if num_known else "",
                    prompt_logprobs=tuple(judged),
                )
                judged = []
                if stopped:
                    break
        client.end(num_generated)
        record = trail.speculation or (None if result is None else result.speculation)
        if record is not None or lossy or trail.mixed or trail.law_only:
            record = replace(record or SpeculationRecord(), lossy=lossy, mixed=trail.mixed, law_only=trail.law_only)
        ending = _ending(request, num_generated, result, record, stopped=stopped)
        ending = replace(ending, stop=text_stream.stop, num_reasoning_tokens=text_stream.num_reasoning_tokens)
        stopwatch.ended(ending)
        yield ending

    async def _committed(self, request: SessionRequest, trail: SessionTrail) -> AsyncGenerator[CommittedTokens, None]:
        """Yields what was committed before this gateway got the session, then what verifiers commit."""
        if request.committed_token_ids or request.finished is not None:
            lossy = request.speculation.acceptance not in ("", *LAWFUL_RULES)
            yield CommittedTokens(token_ids=request.committed_token_ids, result=_result_of(request), lossy=lossy)
        if request.finished is None:
            async with aclosing(self._placer.committed(request, trail)) as steps:
                async for step in steps:
                    yield step


def _result_of(request: SessionRequest) -> GenerateResult | None:
    """The result of a session that had ended before it was resumed; what speculation did for it is not recorded."""
    if request.finished is None:
        return None
    return GenerateResult(
        finish_reason=request.finished,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_generated_tokens=len(request.committed_token_ids),
    )


def _ending(
    request: SessionRequest,
    num_generated: int,
    result: GenerateResult | None,
    record: SpeculationRecord | None,
    *,
    stopped: bool,
) -> Ending:
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.prompt_only and result is not None:
        result = replace(result, finish_reason=FinishReason.LENGTH)
    if result is None:
        return Ending(
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=num_prompt_tokens,
            num_generated_tokens=num_generated,
            speculation=record,
        )
    return Ending(
        finish_reason=FinishReason.STOP if stopped else result.finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_generated_tokens=num_generated,
        speculation=record,
        timings=result.timings,
    )
