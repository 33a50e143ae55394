"""A drafter that floods its verifiers with unwanted guesses, when it is ordered to."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np

from loadtest.faulty.orders import FLOOD, obey
from paceline.core.messages import Drafts
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
    _, messages = draft_response_from_pb(drafter_pb2.DraftResponse(drafts=answered))
    base_lens: dict[int, int] = {}
    for drafts in messages:
        if isinstance(drafts, Drafts):
            base_lens.update(zip(drafts.numbers.tolist(), drafts.base_lens.tolist(), strict=True))
    num_sessions = len(base_lens)
    ids = np.array([*itertools.islice(numbers, NODES)], np.int64).astype(np.int32)
    flood = Drafts(
        numbers=np.array([*base_lens], np.int32),
        base_lens=np.array([*base_lens.values()], np.int32),
        ends=np.arange(1, num_sessions + 1, dtype=np.int32) * NODES,
        ids=np.tile(ids, num_sessions),
        parent_ids=np.zeros(num_sessions * NODES, np.int32),
        tokens=np.tile(np.arange(NODES, dtype=np.int32), num_sessions),
        confidences=np.ones(num_sessions * NODES),
    )
    return draft_response_to_pb([flood])


if __name__ == "__main__":
    main()
