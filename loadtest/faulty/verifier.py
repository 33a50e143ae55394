"""A verifier whose engine hangs, whose answers are wrong, or that a poisonous request kills, when it is ordered to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np

from loadtest.alternating import alternate
from loadtest.faulty.orders import GAP, GARBAGE, HALF, HANG, INTERNAL, NONSENSE, POISON, Orders, note_death, obey
from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.loading import load_decoder
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier import __main__ as service
from paceline.verifier import own_engine

Response = verifier_pb2.VerifyResponse
NOT_A_MESSAGE = b"\xff" * 64
NO_TOKEN = (2**31).to_bytes(4, "little")


class PoisonedError(Exception):
    """Ends an engine that computes a poisonous request."""


def main() -> None:
    """Runs the verifier of the command line."""
    orders = obey(sys.argv)
    alternate(sys.argv)

    def load_faulty(*args: Any, **kwargs: Any) -> Decoder:
        decoder = load_decoder(*args, **kwargs)
        decoder.launch = _faulty_launch(decoder.launch, orders)  # type: ignore[method-assign]  # that is the fault
        return decoder

    own_engine.load_decoder = load_faulty  # type: ignore[attr-defined]  # the name that it calls
    verifier_pb2_grpc.add_VerifierServicer_to_server = lambda servicer, server: _add(servicer, server, orders)
    service.main()


def _faulty_launch(launch: Callable[..., Any], orders: Orders) -> Callable[..., Any]:
    def run(batch: Batch, *args: Any, **kwargs: Any) -> Any:
        if orders.holds(HANG):
            # For good: only from outside can it be seen.
            threading.Event().wait()
        pending = launch(batch, *args, **kwargs)
        if _holds(batch, POISON["raise"]):
            note_death("raise")
            raise PoisonedError("the kernel has met a poisonous request")
        if _holds(batch, POISON["abort"]):
            note_death("abort")
            os.abort()
        return pending

    return run


def _holds(batch: Batch, tokens: tuple[int, ...]) -> bool:
    """Whether these tokens stand in a row; half of them do as well, for prompts are computed in parts."""
    row = np.asarray(tokens[: len(tokens) // 2])
    ids = batch.token_ids
    return len(ids) >= len(row) and bool(
        (np.lib.stride_tricks.sliding_window_view(ids, len(row)) == row).all(axis=1).any()
    )


def _add(servicer: verifier_pb2_grpc.VerifierServicer, server: grpc.Server | grpc.aio.Server, orders: Orders) -> None:
    """Adds the service with a serializer that lets bytes through which are no message."""
    handler = grpc.stream_stream_rpc_method_handler(
        _faulty_verify(servicer.Verify, orders),
        request_deserializer=verifier_pb2.VerifyRequest.FromString,
        response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
    )
    handlers = grpc.method_handlers_generic_handler("paceline.rpc.v1.Verifier", {"Verify": handler})
    server.add_generic_rpc_handlers((handlers,))


def _faulty_verify(right: Callable[..., Any], orders: Orders) -> Callable[..., AsyncIterator[Response | bytes]]:
    async def verify(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Response | bytes]:
        async with aclosing(right(requests, context)) as messages:
            async for message in messages:
                if orders.holds(INTERNAL):
                    raise RuntimeError("ordered to fail at once")
                if orders.holds(HALF) and message.token_ids:
                    return
                if orders.holds(GAP) and message.token_ids and not message.results:
                    continue
                yield _spoilt(message, orders)

    return verify


def _spoilt(message: Response, orders: Orders) -> Response | bytes:
    if orders.holds(GARBAGE):
        return NOT_A_MESSAGE
    if orders.holds(NONSENSE) and message.token_ids:
        message.token_ids = NO_TOKEN + message.token_ids[len(NO_TOKEN) :]
    return message


if __name__ == "__main__":
    main()
