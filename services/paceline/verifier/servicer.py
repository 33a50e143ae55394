"""The verifier's gRPC service: decodes, hands over to the host, streams back. It never runs the model itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from paceline.obs.tracing import incoming
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.service.process import TAKEN
from paceline.verifier.verifier_host import TargetHost
from paceline.wire import committed_to_pb, generate_request_from_pb


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """Serves `paceline.rpc.v1.Verifier`."""

    def __init__(self, host: TargetHost) -> None:
        self._host = host

    async def Generate(
        self, request: verifier_pb2.VerifierGenerateRequest, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierGenerateResponse]:
        """Streams one session to its end."""
        await context.send_initial_metadata(((TAKEN, "1"),))
        context_len = self._host.identity.context_len
        generate = generate_request_from_pb(request, incoming(context), context_len=context_len)
        async with aclosing(self._host.generate(generate)) as stream:
            async for committed in stream:
                yield committed_to_pb(committed)
