"""A drafter that floods its verifiers with unwanted guesses, when it is ordered to."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from loadtest.faulty.orders import FLOOD, obey
from paceline.drafter import __main__ as service
from paceline.drafter.servicer import DrafterServicer
from paceline.rpc.v1 import drafter_pb2

MESSAGES = 100
NODES = 1000


def main() -> None:
    """Runs the drafter of the command line."""
    orders = obey(sys.argv)
    flooding = _flooding(DrafterServicer.Draft, lambda: orders.holds(FLOOD))
    DrafterServicer.Draft = flooding  # type: ignore[method-assign]  # that is the fault
    service.main()


def _flooding(draft: Callable[..., Any], floods: Callable[[], bool]) -> Callable[..., Any]:
    numbers = itertools.count(2**20)

    async def run(
        self: DrafterServicer, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        async with aclosing(draft(self, requests, context)) as messages:
            async for message in messages:
                yield message
                if message.nodes and floods():
                    for _ in range(MESSAGES):
                        yield _flood(message.nodes, numbers)

    return run


def _flood(answered: Any, numbers: itertools.count[int]) -> drafter_pb2.DraftResponse:
    """More nodes of the same sessions, children of the last committed token."""
    return drafter_pb2.DraftResponse(
        nodes=[
            drafter_pb2.DraftNodes(
                session_id=each.session_id,
                epoch=each.epoch,
                base_len=each.base_len,
                node_ids=list(itertools.islice(numbers, NODES)),
                parent_ids=[0] * NODES,
                token_ids=range(NODES),
                confidences=[255] * NODES,
            )
            for each in answered
        ]
    )


if __name__ == "__main__":
    main()
