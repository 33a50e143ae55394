"""The drafter's gRPC service: decodes messages, hands them over, streams answers back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from paceline.core.errors import ConfigError, RemoteProtocolError
from paceline.core.messages import ModelIdentity, ToDrafter
from paceline.drafter.drafter_host import DraftHost
from paceline.rpc.v1 import drafter_pb2, drafter_pb2_grpc
from paceline.wire import draft_request_from_pb, draft_response_to_pb, verifier_from_pb

HELLO_TIMEOUT_S = 5.0


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    def __init__(self, host: DraftHost) -> None:
        self._host = host

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """A verifier's stream; if the verifier breaks the protocol, it ends with a status that names the problem."""
        del context
        requests = aiter(request_iterator)
        verifier = await self._receive_hello(requests)
        yield draft_response_to_pb((), draft=self._host.identity)
        async with aclosing(self._host.converse(self._decoded(requests), verifier)) as answers:
            async for part in answers:
                yield draft_response_to_pb(part)

    async def _receive_hello(self, requests: AsyncIterator[drafter_pb2.DraftRequest]) -> str:
        """Returns the verifier's address."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                request = await anext(requests)
                target, _ = draft_request_from_pb(request, context_len=self._host.identity.context_len)
        except (TimeoutError, StopAsyncIteration) as error:
            raise RemoteProtocolError(f"no first message within {HELLO_TIMEOUT_S:g} s") from error
        if target is None:
            raise RemoteProtocolError("the first message must name the target model")
        self._check_target(target)
        return verifier_from_pb(request)

    def _check_target(self, target: ModelIdentity) -> None:
        draft = self._host.identity
        if target.vocab_hash != draft.vocab_hash:
            raise ConfigError(
                f"draft model {draft.name!r} ({draft.vocab_size} tokens, vocabulary {draft.vocab_hash[:12]}) "
                f"cannot draft for target {target.name!r} ({target.vocab_size} tokens, vocabulary "
                f"{target.vocab_hash[:12]}): the vocabularies differ"
            )
        if not draft.drafts_for(target):
            raise ConfigError(
                f"draft model {draft.name!r} drafts from hidden states ({draft.states_hash[:12]}) that the verifier "
                f"of {target.name!r} does not hand out ({target.states_hash[:12] or 'none'}): give it the same head"
            )

    async def _decoded(self, requests: AsyncIterator[drafter_pb2.DraftRequest]) -> AsyncIterator[Sequence[ToDrafter]]:
        async for request in requests:
            _, messages = draft_request_from_pb(request, context_len=self._host.identity.context_len)
            yield messages
