"""The one path of both front doors: admission, pairing, the verifier's stream, text, records, counts.

It knows neither HTTP nor the messages of the gateway's gRPC service.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from paceline.core.errors import OverloadedError, PacelineError, UnavailableError
from paceline.core.messages import CommittedTokens, FinishReason, GenerateRequest, GenerateResult
from paceline.gateway.callers import Caller
from paceline.gateway.fairness import fits
from paceline.gateway.fleet import Fleet, choose_drafter, choose_verifier
from paceline.gateway.pieces import Ending, Event, Piece
from paceline.gateway.records import RecordWriter, session_record
from paceline.gateway.requests import ServedModel, SessionRequest
from paceline.gateway.stopwatch import Stopwatch
from paceline.gateway.text_stream import TextStream
from paceline.gateway.verifier_client import VerifierClient
from paceline.obs.metrics import GatewayMetrics
from paceline.store.base import Replica

RETRY_AFTER_S = 1.0
MAX_PLACEMENTS = 3
SHUTTING_DOWN = "the gateway is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Who runs a session."""

    verifier: Replica
    drafter: Replica | None


class Sessions:
    """Runs sessions, a bounded number at a time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        client: VerifierClient,
        records: RecordWriter,
        metrics: GatewayMetrics,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._records = records
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._clock = clock
        self._num_running = 0
        self._held: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new sessions are refused for good."""
        return self._draining

    @property
    def num_running(self) -> int:
        """Sessions admitted and not yet ended."""
        return self._num_running

    def model(self, name: str) -> ServedModel:
        """Returns a model by name.

        Raises:
            ModelNotFoundError: It is not served here.
            UnavailableError: No verifier of it is there.
        """
        return self._fleet.model(name)

    @contextmanager
    def admitted(self, num_sessions: int, caller: Caller) -> Iterator[None]:
        """Holds places for all sessions of a request.

        Raises:
            OverloadedError: There are not that many places free, or they are for other callers.
            UnavailableError: The gateway is shutting down.
        """
        if self._draining:
            raise UnavailableError(SHUTTING_DOWN)
        if self._num_running + num_sessions > self._max_sessions:
            raise OverloadedError(
                f"{self._num_running} sessions are running and at most {self._max_sessions} are admitted, "
                f"{num_sessions} more were asked for",
                retry_after_s=RETRY_AFTER_S,
            )
        self._check_share(num_sessions, caller)
        self._held[caller.name] += num_sessions
        self._change_running(num_sessions)
        try:
            yield
        finally:
            self._change_running(-num_sessions)
            self._held[caller.name] -= num_sessions
            # Keys come and go; those that hold nothing are forgotten.
            self._held += Counter()

    def _check_share(self, num_sessions: int, caller: Caller) -> None:
        held = self._held[caller.name]
        own_limit = caller.max_sessions
        if own_limit is not None and held + num_sessions > own_limit:
            raise OverloadedError(
                f"API key {caller.name!r} may run {own_limit} sessions at once and runs {held}, "
                f"{num_sessions} more were asked for",
                retry_after_s=RETRY_AFTER_S,
            )
        if not fits(
            num_sessions, key=caller.name, held=self._held, num_keys=caller.num_keys, max_sessions=self._max_sessions
        ):
            raise OverloadedError(
                f"API key {caller.name!r} runs {held} sessions, {num_sessions} more would take places of other keys",
                retry_after_s=RETRY_AFTER_S,
            )

    async def run(self, request: SessionRequest) -> AsyncGenerator[Event, None]:
        """Yields pieces of the answer, then its ending; closing the generator frees the session everywhere.

        Raises:
            PacelineError: The session could not be run to its end.
        """
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    yield event
        except PacelineError as error:
            self._metrics.request_errors.labels(type(error).__name__).inc()
            raise

    def drain(self) -> None:
        """Refuses new sessions from now on."""
        self._draining = True

    async def finish(self, timeout_s: float, farewell_s: float) -> None:
        """Waits for running sessions, then ends the rest with an error that says so.

        Args:
            timeout_s: Time that sessions get to end by themselves, in seconds.
            farewell_s: Time to deliver that error, in seconds.
        """
        self.drain()
        if not await self._wait_idle(timeout_s):
            self._client.abort(SHUTTING_DOWN)
            await self._wait_idle(farewell_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _change_running(self, change: int) -> None:
        self._num_running += change
        self._metrics.num_requests_running.set(self._num_running)
        if self._num_running:
            self._idle.clear()
        else:
            self._idle.set()

    async def _events(self, request: SessionRequest) -> AsyncGenerator[Event, None]:
        text_stream = TextStream(request)
        stopwatch = Stopwatch(self._metrics, self._clock)
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        num_generated = 0
        result: GenerateResult | None = None
        stopped = False
        async with aclosing(self._committed(request)) as steps:
            async for step in steps:
                fed = text_stream.feed(step.token_ids)
                num_generated += fed.num_tokens
                stopwatch.tokens(fed.num_tokens)
                text, result, stopped = fed.text, step.result, fed.stopped
                if result is not None and not stopped:
                    rest = text_stream.finish()
                    text, stopped = text + rest.text, rest.stopped
                yield Piece(
                    text=text,
                    token_ids=step.token_ids[: fed.num_tokens],
                    logprobs=step.logprobs[: fed.num_tokens],
                )
                if stopped:
                    break
        ending = _ending(request, num_generated, result, stopped)
        stopwatch.ended(ending)
        yield ending

    async def _committed(self, request: SessionRequest) -> AsyncGenerator[CommittedTokens, None]:
        """Yields what verifiers commit; when one fails, another goes on where it stopped."""
        failed: set[str] = set()
        generate = GenerateRequest(
            session_id=request.session_id,
            epoch=1,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            speculation=request.speculation,
        )
        while True:
            placement = self._place(request.model, failed)
            committed: list[int] = []
            try:
                async with aclosing(self._on_verifier(placement, generate, request.stops)) as steps:
                    async for step in steps:
                        committed += step.token_ids
                        yield step
                return
            except (UnavailableError, OverloadedError):
                failed.add(placement.verifier.replica_id)
                if not self._may_move(request, failed):
                    raise
            generate = replace(
                generate,
                epoch=generate.epoch + 1,
                committed_token_ids=(*generate.committed_token_ids, *committed),
            )

    def _may_move(self, request: SessionRequest, failed: set[str]) -> bool:
        name = request.model.identity.name
        another = choose_verifier(self._fleet.replicas, name, self._in_flight, failed)
        return another is not None and len(failed) < MAX_PLACEMENTS and not self._client.aborted

    def _place(self, model: ServedModel, failed: set[str]) -> _Placement:
        verifier = choose_verifier(self._fleet.replicas, model.identity.name, self._in_flight, failed)
        if verifier is None:
            raise UnavailableError(f"no verifier of model {model.identity.name!r} is there at the moment")
        drafter = choose_drafter(self._fleet.replicas, model.identity, self._in_flight)
        return _Placement(verifier=verifier, drafter=drafter)

    async def _on_verifier(
        self, placement: _Placement, generate: GenerateRequest, stops: tuple[str, ...]
    ) -> AsyncGenerator[CommittedTokens, None]:
        """Runs a session on one verifier, counted and recorded."""
        verifier, drafter = placement.verifier, placement.drafter
        if drafter is not None:
            generate = replace(generate, drafter_address=drafter.address)
        model = verifier.identity.name if verifier.identity is not None else ""
        drafter_id = "" if drafter is None else drafter.replica_id
        record = session_record(
            generate, model=model, verifier_id=verifier.replica_id, drafter_id=drafter_id, stops=stops
        )
        self._records.open(record)
        held = [verifier.replica_id, drafter_id]
        self._in_flight.update(held)
        committed_len = record.committed_len
        # Closed by us before the verifier was done: a stop string ended the text, or the client left.
        state = "left"
        try:
            async with aclosing(self._client.generate(verifier.address, generate)) as steps:
                async for step in steps:
                    committed_len += len(step.token_ids)
                    self._records.advance(generate.session_id, generate.epoch, committed_len)
                    if step.result is not None:
                        state = "finished"
                    yield step
        except PacelineError:
            state = "failed"
            raise
        finally:
            self._in_flight.subtract(held)
            self._records.advance(generate.session_id, generate.epoch, committed_len, state)


def _ending(request: SessionRequest, num_generated: int, result: GenerateResult | None, stopped: bool) -> Ending:
    num_prompt_tokens = len(request.prompt_token_ids)
    if result is None:
        return Ending(
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=num_prompt_tokens,
            num_generated_tokens=num_generated,
        )
    return Ending(
        finish_reason=FinishReason.STOP if stopped else result.finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_generated_tokens=num_generated,
        speculation=result.speculation,
        timings=result.timings,
    )
