"""The verifier's gRPC service: decodes, hands over to the host, streams back. It never runs the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from paceline.core.errors import RemoteProtocolError
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier.verifier_host import Asked, TargetHost
from paceline.wire import starts_from_pb
from paceline.wire.common import PROTOCOL, check_protocol

HELLO_TIMEOUT_S = 5.0


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    def __init__(self, host: TargetHost) -> None:
        self._host = host

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """A gateway's stream; if the gateway breaks the protocol, it ends with a status that names the problem."""
        del context
        requests = aiter(request_iterator)
        first = await self._hello(requests)
        yield verifier_pb2.VerifyResponse(protocol=PROTOCOL)
        async with aclosing(self._host.converse(self._asked(first, requests))) as parts:
            async for message in parts:
                yield message

    async def _hello(self, requests: AsyncIterator[verifier_pb2.VerifyRequest]) -> verifier_pb2.VerifyRequest:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration) as error:
            raise RemoteProtocolError(f"no first message within {HELLO_TIMEOUT_S:g} s") from error
        check_protocol("the gateway", first.protocol)
        return first

    async def _asked(
        self, first: verifier_pb2.VerifyRequest, requests: AsyncIterator[verifier_pb2.VerifyRequest]
    ) -> AsyncIterator[Asked]:
        context_len = self._host.identity.context_len
        yield starts_from_pb(first, context_len=context_len), first.leaves
        async for request in requests:
            yield starts_from_pb(request, context_len=context_len), request.leaves
