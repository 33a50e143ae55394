"""The gRPC face of the gateway: decodes, hands over to the sessions, encodes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.messages import SpeculationRecord
from paceline.core.params import SAMPLING, SESSION, SamplingParams
from paceline.gateway.api.endpoints.endpoint import MAX_INLINE_BYTES, Workers
from paceline.gateway.api.endpoints.request_trace import RequestTrace, traced_request
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.grammars.formats import grammar_of_lark
from paceline.gateway.http.errors import ClientStalledError
from paceline.gateway.http.response import CLIENT_BYTES, UNREAD
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.request import (
    DEFAULT_MAX_TOKENS,
    SessionRequest,
    check_logprobs,
    check_stops,
    new_seed,
)
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.obs.attributes import OFFSET, TEXT_COMPLETION
from paceline.obs.tracing import OFF, Tracer, incoming
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from paceline.service.fair_shares import current_caller
from paceline.service.outbox import Outbox
from paceline.wire import (
    identity_to_pb,
    position_logprobs_to_pb,
    sampling_from_pb,
    speculation_from_pb,
    speculation_record_to_pb,
    timings_to_pb,
)

# Messages that wait for a client: pieces, and the ending.
_Unsent = Outbox[Piece | Ending | Exception]

SERVICE_NAME = "paceline.rpc.v1.Gateway"
# Log probabilities per message; at 13 bytes each well below the 4 MiB that clients take, and made within 30 ms.
ENTRIES_PER_MESSAGE = 20_000


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Serves `paceline.rpc.v1.Gateway`."""

    def __init__(
        self,
        sessions: Sessions,
        fleet: Fleet,
        resumption: Resumption,
        workers: Workers,
        tracer: Tracer = OFF,
    ) -> None:
        self._sessions = sessions
        self._workers = workers
        self._tracer = tracer
        self._fleet = fleet
        self._resumption = resumption

    async def Generate(
        self, request: gateway_pb2.GatewayGenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GatewayGenerateResponse]:
        """Streams one completion; a client with a deadline does not wait beyond it for a place."""
        with traced_request(self._tracer, TEXT_COMPLETION, incoming(context)) as trace:
            with self._errors_counted():
                session = replace(await self._read(request), max_wait_s=context.time_remaining(), span=trace.span)
                # Otherwise the stream would hold a prompt of megabytes to its end.
                del request
            with self._errors_counted(), self._sessions.admitted(1, current_caller()):
                async with aclosing(self._stream(session, trace)) as responses:
                    async for response in responses:
                        yield response

    async def Resume(
        self, request: gateway_pb2.ResumeRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GatewayGenerateResponse]:
        """Streams the rest of a completion, in the trace that it began in unless the client names another."""
        # A gateway that has no place for the session must not take it from the gateway that runs it.
        caller = current_caller()
        with self._errors_counted(), self._sessions.admitted(1, caller, continued=True):
            session = await self._resumption.claim_for(caller, request.session_id, request.offset, request.digest)
            traceparent = incoming(context) or session.traceparent
            with traced_request(self._tracer, TEXT_COMPLETION, traceparent) as trace:
                trace.span.set_attribute(OFFSET, request.offset)
                async with aclosing(self._stream(replace(session, span=trace.span), trace)) as responses:
                    async for response in responses:
                        yield response

    async def _stream(
        self, session: SessionRequest, trace: RequestTrace
    ) -> AsyncGenerator[gateway_pb2.GatewayGenerateResponse, None]:
        trace.understood([session], session.session_id)
        # At once, so that a client knows what to resume even if it never gets a token from here.
        yield gateway_pb2.GatewayGenerateResponse(session_id=session.session_id)
        unsent: _Unsent = Outbox(CLIENT_BYTES)
        running = asyncio.create_task(self._run(session, trace, unsent))
        try:
            while True:
                event = await unsent.get()
                if isinstance(event, Exception):
                    raise event
                for response in _responses(session.session_id, event):
                    yield response
                if isinstance(event, Ending):
                    return
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self, session: SessionRequest, trace: RequestTrace, unsent: _Unsent) -> None:
        def take(piece: Piece) -> None:
            try:
                unsent.put([(piece, _num_bytes(piece))])
            except asyncio.QueueFull:
                raise ClientStalledError(UNREAD) from None

        try:
            ending = await self._sessions.run(session, trace.noting(take))
            trace.ended(ending)
            unsent.put([(ending, 0)])
        except PacelineError as error:
            if isinstance(error, ClientStalledError) or self._sessions.stopping:
                # Otherwise the client keeps its place until it has read what waits.
                unsent.fail(error)
            else:
                unsent.put([(error, 0)])
        except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
            unsent.put([(error, 0)])

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Any) -> gateway_pb2.ListModelsResponse:
        """Lists the models that a verifier serves at the moment."""
        del request, context
        identities = [self._fleet.identity(name) for name in self._fleet.own_names]
        return gateway_pb2.ListModelsResponse(
            models=[identity_to_pb(identity) for identity in identities if identity is not None]
        )

    @contextmanager
    def _errors_counted(self) -> Iterator[None]:
        """Counts by type the error that ends a call."""
        try:
            yield
        except Exception as error:
            self._sessions.count_error(error)
            raise

    async def _read(self, request: gateway_pb2.GatewayGenerateRequest) -> SessionRequest:
        # Before it waits: a list of empty entries takes twenty times its bytes.
        for name, row in SAMPLING.items():
            if row.most is not None:
                row.check(name, getattr(request.sampling, name))
        check_stops(request.stop)
        return await self._workers.run(
            partial(self._session, request),
            small=request.ByteSize() <= MAX_INLINE_BYTES,
        )

    def _session(self, request: gateway_pb2.GatewayGenerateRequest) -> SessionRequest:
        model = self._sessions.model(request.model)
        prompt_token_ids = _prompt(request, model)
        more: dict[str, Any] = {name: getattr(request, name) for name in SESSION if hasattr(request, name)}
        if request.HasField("speculation"):
            more["speculation"] = speculation_from_pb(request.speculation)
        return SessionRequest(
            model=model,
            session_id=f"grpc-{uuid.uuid4().hex}",
            prompt_token_ids=prompt_token_ids,
            sampling=_sampling(request, model, len(prompt_token_ids)),
            stops=check_stops(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
            api_key=current_caller().name,
            grammar_field="sampling.grammar",
            **more,
        )


def _prompt(request: gateway_pb2.GatewayGenerateRequest, model: ServedModel) -> tuple[int, ...]:
    field = request.WhichOneof("input")
    if field is None:
        raise InvalidRequestError("prompt", "is required")
    truncate_to = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    keep_last = model.prompt_limit(truncate_to, request.sampling.max_tokens or None)
    given = request.prompt if field == "prompt" else request.prompt_token_ids.ids
    return model.prompt_tokens(given, field=field, keep_last=keep_last)


def _sampling(request: gateway_pb2.GatewayGenerateRequest, model: ServedModel, prompt_len: int) -> SamplingParams:
    if not request.HasField("sampling"):
        room = model.output_limit(prompt_len, None, default=DEFAULT_MAX_TOKENS, field="max_tokens")
        return SamplingParams(max_tokens=room, seed=new_seed(), **model.defaults.sampling)
    given = request.sampling
    named = {field.name for field, _ in given.ListFields()}
    own = {name: value for name, value in model.defaults.sampling.items() if name not in named}
    sampling = replace(sampling_from_pb(given), **own)
    if sampling.grammar:
        grammar = grammar_of_lark(sampling.grammar, field="sampling.grammar")
        sampling = replace(sampling, grammar=grammar)
    if not given.HasField("seed"):
        sampling = replace(sampling, seed=new_seed())
    model.output_limit(prompt_len, sampling.max_tokens, default=0, field="sampling.max_tokens")
    if sampling.prompt_logprobs is not None:
        check_logprobs(prompt_len * (1 + sampling.prompt_logprobs), field="sampling.prompt_logprobs")
    sampling.check_vocabulary(model.identity.vocab_size, model.identity.eos_token_ids)
    return sampling


def _num_bytes(piece: Piece) -> int:
    """An upper bound of a piece's bytes on the wire."""
    num_judged = sum(1 + len(each.top) for each in (*piece.logprobs, *piece.prompt_logprobs))
    return 64 + 4 * len(piece.text) + 16 * (len(piece.token_ids) + num_judged)


def _responses(session_id: str, event: Piece | Ending) -> Iterator[gateway_pb2.GatewayGenerateResponse]:
    """Yields the messages of an event; log probabilities of the prompt before it, in messages of their own."""
    if isinstance(event, Ending):
        yield _last_response(session_id, event)
        return
    judged = event.prompt_logprobs
    step = max(1, ENTRIES_PER_MESSAGE // (1 + len(judged[0].top))) if judged else 1
    for begin in range(0, len(judged), step):
        yield gateway_pb2.GatewayGenerateResponse(
            session_id=session_id,
            prompt_logprobs=map(position_logprobs_to_pb, judged[begin : begin + step]),
            prompt_offset=begin + 1,
        )
    yield gateway_pb2.GatewayGenerateResponse(
        session_id=session_id,
        text=event.text,
        token_ids=event.token_ids,
        offset=event.offset,
        logprobs=map(position_logprobs_to_pb, event.logprobs),
    )


def _last_response(session_id: str, event: Ending) -> gateway_pb2.GatewayGenerateResponse:
    record = event.speculation or SpeculationRecord()
    return gateway_pb2.GatewayGenerateResponse(
        session_id=session_id,
        result=gateway_pb2.GatewayGenerateResult(
            finish_reason=event.finish_reason.value,
            num_prompt_tokens=event.num_prompt_tokens,
            num_generated_tokens=event.num_generated_tokens,
            speculation=speculation_record_to_pb(record),
            timings=timings_to_pb(event.timings),
        ),
    )
