"""A drafter that says whatever it likes while a session runs: the session's tokens are the undisturbed ones."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from hypothesis import strategies as st
from loadtest.bad import columns
from loadtest.bad.columns import REFUSED, TAKEN

from paceline.core.acceptance import SparseDraft
from paceline.core.messages import (
    Commits,
    ModelIdentity,
    OpenSession,
)
from paceline.core.params import COUPLED, DRAFT_MODEL, REJECTION, SpeculationParams
from paceline.rpc.v1 import drafter_pb2
from paceline.wire import draft_request_from_pb, draft_response_to_pb
from tests.integration.conftest import know, running_verifier
from tests.integration.test_verifier_service import PROMPT, ask
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fuzzing import holds_for_all, mangled, messages, until
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts
from tests.support.steps import Step

Steps = list[Step]

NUM_TOKENS = 48
MOST_NODES = 12
# Close to what is true, so that guesses reach the tree: ids that are reused, parents that are not there, gaps.
WORDS = st.lists(st.integers(0, 3), max_size=4).map(lambda numbers: struct.pack(f"<{len(numbers)}I", *numbers))
NEARLY_RIGHT = {
    "have_len": st.one_of(st.integers(0, len(PROMPT) + NUM_TOKENS), st.just(2**32 - 1)),
    **dict.fromkeys(("sessions", "base_lens", "ends", "node_ids", "parent_ids"), WORDS),
}


class Line(Protocol):
    """What a drafter says of a session whose number and length are known when it is said."""

    def encoded(self, count: int, number: int, known_len: int, truth: Sequence[int]) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Nodes whose place is told when they are sent.

    Args:
        nodes: What is said.
        offset: `base_len` beyond the committed tokens that the drafter has heard of.
        right: Nodes that get the token that will be chosen, if they are a chain; others keep theirs.
        fresh: Node ids are new with every message, as they ought to be.
    """

    nodes: Sequence[NodeGuess]
    offset: int
    right: Sequence[bool]
    fresh: bool

    def encoded(self, count: int, number: int, known_len: int, truth: Sequence[int]) -> bytes:
        ahead = truth[known_len - len(PROMPT) :]
        tokens = [node.token_id for node in self.nodes]
        for index, (right, token_id) in enumerate(zip(self.right, ahead, strict=False)):
            if right:
                tokens[index] = token_id
        shift = MOST_NODES * count if self.fresh else 0
        nodes = [
            node._replace(
                node_id=(node.node_id + shift) % 2**31 or 1,
                parent_id=(node.parent_id + shift) % 2**31 if node.parent_id else 0,
                token_id=token_id,
            )
            for node, token_id in zip(self.nodes, tokens, strict=True)
        ]
        said = SessionDrafts(number, max(0, known_len + self.offset), nodes)
        return draft_response_to_pb([to_drafts(said)]).SerializeToString()


class HostileDrafter(grpc.GenericRpcHandler):
    """Greets as it should, then answers every message of a verifier with the next line of its script, in a circle."""

    def __init__(self, identity: ModelIdentity) -> None:
        self.script: Sequence[bytes | Line] = ()
        self.truth: Sequence[int] = ()
        self.num_said = 0
        self._hello = draft_response_to_pb((), draft=identity).SerializeToString()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            self._draft, request_deserializer=drafter_pb2.DraftRequest.FromString
        )

    async def _draft(self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any) -> AsyncIterator[bytes]:
        del context
        number, known_len = 0, len(PROMPT)
        async for request in requests:
            if request.HasField("target"):
                yield self._hello
                continue
            for message in draft_request_from_pb(request)[1]:
                match message:
                    case OpenSession():
                        number, known_len = message.number, len(message.token_ids)
                    case Commits():
                        *_, committed = message
                        known_len = committed.base_len + len(committed.token_ids)
            if self.script:
                line = self.script[self.num_said % len(self.script)]
                self.num_said += 1
                yield line if isinstance(line, bytes) else line.encoded(self.num_said, number, known_len, self.truth)


@asynccontextmanager
async def hostile_drafter(identity: ModelIdentity) -> AsyncIterator[tuple[str, HostileDrafter]]:
    drafter = HostileDrafter(identity)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((drafter,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", drafter
    finally:
        await server.stop(0)


async def steps_under(
    calls, drafter: HostileDrafter, script: Sequence[bytes | Line], acceptance: str = COUPLED
) -> list[Steps]:
    """Sessions until the drafter was heard in one of them; a stream that was lost takes time to come back."""
    drafter.script, drafter.num_said = script, 0
    sessions: list[Steps] = []
    while not drafter.num_said:
        asked = replace(ask(max_tokens=NUM_TOKENS), speculation=SpeculationParams(acceptance=acceptance))
        sessions.append(await calls.steps(asked))
        await asyncio.sleep(0.02)
    return sessions


def tokens_in(steps: Steps) -> list[int]:
    return [token_id for step in steps for token_id in step.token_ids]


def column(size: int, lowest: int, highest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(lowest, highest), min_size=size, max_size=size)


def trees(size: int) -> st.SearchStrategy[Guesses]:
    """Lists of equal length, which pass the decoder: chains, and nodes that contradict one another."""
    chain = st.integers(1, 2**31 - 1 - size).map(lambda first: list(range(first, first + size)))
    ids = st.one_of(
        chain.map(lambda nodes: (nodes, [0, *nodes[:-1]])), st.tuples(column(size, 1, 9), column(size, 0, 9))
    )
    return st.builds(
        lambda ids, token_ids, confidences, offset, right, fresh: Guesses(
            nodes=[*map(NodeGuess, *ids, token_ids, confidences)], offset=offset, right=right, fresh=fresh
        ),
        ids,
        st.one_of(column(size, 0, VOCAB_SIZE + 2), column(size, 0, 2**31 - 1)),
        st.one_of(st.just([1.0] * size), column(size, 0, 255).map(lambda levels: [level / 255 for level in levels])),
        st.sampled_from((0, 0, 0, 0, -1, 1, 500)),
        st.one_of(st.just([True] * (size // 2)), st.lists(st.booleans(), max_size=size)),
        st.booleans(),
    )


def drawn(guesses: Guesses, weights: list[list[int]]) -> Guesses:
    """Guesses with distributions that pass the decoder, however untrue: what was guessed and some of the next ids."""
    drawn_from = [
        SparseDraft(token_ids=tuple((node.token_id + rank) % 2**32 for rank in range(len(some))), weights=tuple(some))
        for node, some in zip(guesses.nodes, weights, strict=False)
    ]
    nodes = [node._replace(distribution=each) for node, each in zip(guesses.nodes, drawn_from, strict=True)]
    # A guess that becomes the true token would not be in its distribution any more.
    return replace(guesses, nodes=nodes, right=())


WEIGHTS = st.lists(st.lists(st.integers(1, 65535), min_size=1, max_size=5), min_size=MOST_NODES, max_size=MOST_NODES)
GUESSES = st.integers(1, MOST_NODES).flatmap(trees)
BYTES = st.one_of(
    messages(drafter_pb2.DraftResponse, NEARLY_RIGHT).map(lambda message: message.SerializeToString()),
    mangled(drafter_pb2.DraftResponse, NEARLY_RIGHT),
)


class Tally:
    """Checks the sessions under one script after another, and counts what was drafted for them."""

    def __init__(self) -> None:
        self.num_verified = 0
        self.num_accepted = 0

    def take(self, steps: Steps, plain: list[int]) -> None:
        assert tokens_in(steps) == plain
        assert steps[-1].result is not None
        self.num_verified += steps[-1].result.speculation.num_draft_tokens
        self.num_accepted += steps[-1].result.speculation.num_accepted_draft_tokens


async def tallied(folder: Path, lines: st.SearchStrategy[Any], acceptance: str = COUPLED) -> Tally:
    """Runs sessions under scripts of such lines; nobody else drafts, so that what is verified is the hostile one's."""
    tally = Tally()
    async with (
        running_verifier(folder, methods=(DRAFT_MODEL,)) as (calls, host),
        hostile_drafter(host.identity) as (address, drafter),
    ):
        drafter.truth = plain = await calls.tokens(ask(max_tokens=NUM_TOKENS))
        know(host, address)

        async def undisturbed(script: list[bytes | Line]) -> None:
            for steps in await steps_under(calls, drafter, script, acceptance):
                tally.take(steps, plain)

        await holds_for_all(st.lists(lines, min_size=1, max_size=6), undisturbed, 40)
        await until(lambda: host.num_sessions == 0)
    return tally


async def test_no_guess_of_a_drafter_changes_a_token(tiny_pair) -> None:
    tally = await tallied(tiny_pair[0], GUESSES)
    assert 0 < tally.num_accepted < tally.num_verified


@pytest.mark.full
async def test_at_temperature_0_no_distribution_of_a_drafter_changes_a_token(tiny_pair) -> None:
    """A token that the target does not choose has no probability, and no distribution makes up for that."""
    lines = st.builds(drawn, GUESSES, WEIGHTS)
    tally = await tallied(tiny_pair[0], lines, REJECTION)
    assert tally.num_verified


@pytest.mark.full
async def test_guesses_without_a_distribution_or_any_bytes_end_the_stream_and_not_the_session(
    tiny_pair,
) -> None:
    tally = await tallied(tiny_pair[0], st.one_of(GUESSES, BYTES), REJECTION)
    assert not tally.num_accepted


@pytest.mark.full
async def test_no_bytes_of_a_drafter_change_a_token_or_keep_a_session_waiting(tiny_pair) -> None:
    await tallied(tiny_pair[0], st.one_of(GUESSES, BYTES))


async def test_loops_as_they_serve_live_through_hostile_columns_of_all_peers() -> None:
    """Audit 3, a01: 100 bytes of a drafter ended a verifier's process, for compiled loops check no bounds."""
    compiled = await columns.outcomes(1, 300, checked=False)
    assert isinstance(compiled, dict), compiled
    assert min(compiled[f"{what} {end}"] for what in ("commits", "drafts") for end in (REFUSED, TAKEN)) > 5


@pytest.mark.full
async def test_loops_that_check_their_bounds_make_the_same_of_hostile_columns() -> None:
    checked, compiled = [await columns.outcomes(2, 300, checked=each) for each in (True, False)]
    assert checked == compiled
    assert isinstance(checked, dict), checked
