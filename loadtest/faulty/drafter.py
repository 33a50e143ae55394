"""A drafter that floods its verifiers with unwanted guesses, when it is ordered to."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from loadtest.faulty.orders import FLOOD, obey
from paceline.core.messages import Drafts, NodeGuess
from paceline.drafter import __main__ as service
from paceline.drafter.servicer import DrafterServicer
from paceline.rpc.v1 import drafter_pb2
from paceline.wire import draft_response_from_pb, draft_response_to_pb

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
                if message.drafts and floods():
                    for _ in range(MESSAGES):
                        yield _flood(message.drafts, numbers)

    return run


def _flood(answered: Any, numbers: itertools.count[int]) -> drafter_pb2.DraftResponse:
    """More nodes of the same sessions, children of the last committed token."""
    guesses = [NodeGuess(number, 0, token_id, 1.0) for token_id, number in enumerate(itertools.islice(numbers, NODES))]
    _, messages = draft_response_from_pb(drafter_pb2.DraftResponse(drafts=answered))
    sessions = (each for drafts in messages if isinstance(drafts, Drafts) for each in drafts)
    flooded = {each.number: each._replace(nodes=guesses) for each in sessions}
    return draft_response_to_pb([Drafts.of(*flooded.values())])


if __name__ == "__main__":
    main()
