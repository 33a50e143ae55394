"""What goes over the wire comes back as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire
from paceline.core.acceptance import MAX_WEIGHT, SparseDraft
from paceline.core.errors import (
    EngineDiedError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    RemoteProtocolError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import (
    CloseSession,
    Commit,
    Commits,
    Drafts,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    PositionLogprobs,
    SpeculationRecord,
    Timings,
    ToDrafter,
    TokenOrigin,
    ToVerifier,
)
from paceline.core.params import ACCEPTANCE_RULES, MAX_PRIORITY, METHODS, SamplingParams, SpeculationParams
from paceline.rpc.v1 import common_pb2, drafter_pb2, verifier_pb2
from paceline.service.process import MAX_MESSAGE_BYTES
from tests.support.guesses import NodeGuess, SessionDrafts, by_session, to_commits, to_drafts
from tests.support.steps import Step, heard, said

VOCAB_SIZE = 300
uint32 = st.integers(0, 2**32 - 1)
column_number = st.integers(0, 2**31 - 1)
uint64 = st.integers(0, 2**64 - 1)
token_ids = st.lists(uint32, max_size=5).map(tuple)
TRACEPARENT = f"00-{7:032x}-{9:016x}-01"
session_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def decimals(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers as users write them: at most six digits."""
    return st.integers(math.ceil(low * 1000), math.floor(high * 1000)).map(lambda milli: milli / 1000)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(decimals(0, 100)),
        top_p=draw(decimals(0.001, 1)),
        top_k=draw(uint32),
        min_p=draw(decimals(0, 1)),
        repetition_penalty=draw(decimals(0.01, 100)),
        presence_penalty=draw(decimals(-2, 2)),
        frequency_penalty=draw(decimals(-2, 2)),
        logit_bias=draw(st.lists(st.tuples(uint32, decimals(-100, 100)), max_size=3).map(tuple)),
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(token_ids),
        allowed_token_ids=draw(token_ids),
        grammar=draw(st.text(max_size=9)),
        bad_words=tuple(draw(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1).map(tuple), max_size=3))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        seed=draw(uint64),
    )


speculation_params = st.builds(
    SpeculationParams,
    enabled=st.booleans(),
    max_draft_tokens=st.none() | st.integers(0, 64),
    acceptance=st.sampled_from(("", *ACCEPTANCE_RULES)),
    method=st.lists(st.sampled_from(METHODS), max_size=3).map("+".join),
)
identities = st.builds(
    ModelIdentity,
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    vocab_hash=session_ids,
    vocab_size=st.integers(1, 2**32 - 1),
    context_len=uint32,
    eos_token_ids=token_ids,
    arithmetic=st.sampled_from(("", "cpu")),
    methods=st.lists(st.sampled_from(METHODS), max_size=3).map(tuple),
    acceptance_rules=st.lists(st.sampled_from(ACCEPTANCE_RULES), max_size=3).map(tuple),
)
requests = st.builds(
    GenerateRequest,
    session_id=session_ids,
    epoch=uint64,
    prompt_token_ids=st.lists(uint32, min_size=1, max_size=5).map(tuple),
    committed_token_ids=token_ids,
    sampling=sampling_params(),
    speculation=speculation_params,
    cache_salt=session_ids,
)
records = st.builds(
    SpeculationRecord,
    num_steps=uint32,
    num_spec_steps=uint32,
    num_draft_tokens=uint32,
    num_accepted_draft_tokens=uint32,
    acceptance_histogram=token_ids,
    mean_batch_size=st.floats(0, width=32, allow_nan=False, allow_infinity=False),
    num_hits=uint32,
    num_misses=uint32,
    lossy=st.booleans(),
    mixed=st.booleans(),
)
timings = st.builds(Timings, queue_ns=uint64, prefill_ns=uint64, decode_ns=uint64)
results = st.builds(
    GenerateResult,
    finish_reason=st.sampled_from(FinishReason),
    num_prompt_tokens=uint32,
    num_cached_tokens=uint32,
    num_generated_tokens=uint32,
    speculation=records,
    timings=timings,
)
logprobs = st.builds(
    PositionLogprobs,
    token_id=st.integers(0, VOCAB_SIZE - 1),
    logprob=float32,
    top=st.lists(st.tuples(st.integers(0, VOCAB_SIZE - 1), float32), max_size=3).map(tuple),
    rank=uint32,
)


@st.composite
def committed_tokens(draw: st.DrawFn) -> Step:
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple))
    reported = draw(st.booleans())
    result = draw(st.none() | results)
    return Step(
        token_ids=tokens,
        logprobs=tuple(draw(logprobs) for _ in tokens) if reported else (),
        result=result,
        lossy=draw(st.booleans()),
        running=draw(st.booleans()),
        speculation=draw(st.none() | records) if result is None else result.speculation,
        origins=draw(st.just(b"") | st.tuples(*[st.sampled_from(TokenOrigin)] * len(tokens)).map(bytes)),
    )


ERRORS = (
    InvalidRequestError("top_p", "must be above 0, got 0.0"),
    OverloadedError("the queue is full", retry_after_s=2.5),
    StaleEpochError("the session goes on elsewhere"),
    EngineDiedError("the engine died"),
    UnavailableError("it shuts down"),
    PacelineError("internal error"),
)
outcomes = st.lists(committed_tokens() | st.sampled_from(ERRORS), max_size=4)


@st.composite
def opens(draw: st.DrawFn) -> OpenSession:
    tokens = draw(st.lists(uint32, min_size=1, max_size=5).map(tuple))
    return OpenSession(
        session_id=draw(session_ids),
        epoch=draw(uint64),
        number=draw(numbers),
        token_ids=tokens,
        prompt_len=draw(st.integers(1, len(tokens))),
        sampling=draw(sampling_params()),
        price=draw(decimals(0, 1)),
        room=draw(uint32),
        speculation=draw(speculation_params),
        cache_salt=draw(st.sampled_from(("", "a key's"))),
        priority=draw(st.integers(-MAX_PRIORITY, MAX_PRIORITY)),
        tenant=draw(st.sampled_from(("", "a digest"))),
        traceparent=draw(st.sampled_from(("", TRACEPARENT))),
    )


numbers = st.integers(1, 2**31 - 1)
some_commits = st.lists(
    st.builds(
        Commit,
        number=numbers,
        base_len=column_number,
        token_ids=st.lists(column_number, max_size=5),
        price=st.floats(0, 1, width=32),
        room=column_number,
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda commit: commit.number,
).map(lambda commits: to_commits(*commits))
closes = st.builds(CloseSession, number=numbers)
guesses = st.builds(
    NodeGuess,
    node_id=numbers,
    parent_id=column_number,
    token_id=column_number,
    confidence=st.integers(0, 255).map(lambda level: level / 255),
    distribution=st.none(),
)
sparse_drafts = st.dictionaries(column_number, st.integers(1, 65535), min_size=1, max_size=64).map(
    lambda weights: SparseDraft(token_ids=tuple(weights), weights=tuple(weights.values()))
)
drawn_guesses = st.builds(
    lambda guess, drawn: guess._replace(token_id=drawn.token_ids[-1], distribution=drawn), guesses, sparse_drafts
)
some_drafts = st.one_of(
    st.lists(
        st.builds(SessionDrafts, number=numbers, base_len=column_number, nodes=st.lists(each, min_size=1, max_size=4)),
        max_size=3,
        unique_by=lambda session: session.number,
    )
    for each in (guesses, drawn_guesses)
).map(lambda sessions: to_drafts(*sessions))
lagging = st.builds(LaggingSession, number=uint32, have_len=uint32)


TRIPS = {
    "sampling": (sampling_params(), wire.sampling_to_pb, common_pb2.SamplingParams, wire.sampling_from_pb),
    "speculation": (speculation_params, wire.speculation_to_pb, common_pb2.SpeculationParams, wire.speculation_from_pb),
    "identity": (identities, wire.identity_to_pb, common_pb2.ModelIdentity, wire.identity_from_pb),
    "request": (
        requests,
        partial(wire.start_session_to_pb, 1),
        verifier_pb2.StartSession,
        wire.generate_request_from_pb,
    ),
}


@pytest.mark.parametrize("what", TRIPS)
@given(data=st.data())
def test_what_is_sent_comes_back(what: str, data: st.DataObject) -> None:
    values, encode, kind, decode = TRIPS[what]
    value = data.draw(values)
    assert decode(kind.FromString(encode(value).SerializeToString())) == value


@given(st.floats(0.01, 100), st.floats(0, 1, exclude_min=True))
def test_any_valid_float_stays_valid_and_settles_after_one_trip(temperature: float, top_p: float) -> None:
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, repetition_penalty=max(0.01, top_p))
    once = wire.sampling_from_pb(wire.sampling_to_pb(params))
    assert wire.sampling_from_pb(wire.sampling_to_pb(once)) == once
    assert np.float32(once.temperature) == np.float32(temperature)


def test_origins_of_tokens_have_the_numbers_of_the_wire() -> None:
    known = {f"TOKEN_ORIGIN_{each.name}": each.value for each in TokenOrigin}
    assert dict(verifier_pb2.TokenOrigin.items()) == {"TOKEN_ORIGIN_UNSPECIFIED": 0, **known}


def test_a_tiny_top_p_does_not_turn_into_off() -> None:
    params = SamplingParams(max_tokens=1, top_p=1e-60)
    assert wire.sampling_from_pb(wire.sampling_to_pb(params)).top_p < 1e-30


@given(
    st.none() | identities,
    st.lists(opens(), max_size=2),
    st.lists(some_commits, max_size=2),
    st.lists(closes, max_size=2),
)
def test_a_verifiers_messages_come_back_as_opens_commits_closes(
    target: ModelIdentity | None,
    some_opens: list[OpenSession],
    told: list[Commits],
    some_closes: list[CloseSession],
) -> None:
    message = wire.draft_request_to_pb([*some_closes, *told, *some_opens], target)
    data = message.SerializeToString()
    identity, received = wire.draft_request_from_pb(drafter_pb2.DraftRequest.FromString(data))
    assert identity == target
    assert plain(received) == plain([*some_opens, *told, *some_closes])


@given(st.none() | identities, st.lists(some_drafts, max_size=2), st.lists(lagging, max_size=2))
def test_a_drafters_messages_come_back_as_nodes_then_lagging(
    draft: ModelIdentity | None, drafts: list[Drafts], some_lagging: list[LaggingSession]
) -> None:
    data = wire.draft_response_to_pb([*some_lagging, *drafts], draft).SerializeToString()
    identity, received = wire.draft_response_from_pb(drafter_pb2.DraftResponse.FromString(data))
    assert identity == draft
    assert plain(received) == plain([*drafts, *some_lagging])


def plain(messages: Sequence[ToDrafter | ToVerifier]) -> list[object]:
    """Messages that can be compared."""
    return [
        [*by_session(each)] if isinstance(each, Drafts) else [*each] if isinstance(each, Commits) else each
        for each in messages
    ]


def opened(session_id: str, num_tokens: int) -> OpenSession:
    return OpenSession(
        session_id=session_id,
        epoch=1,
        number=1,
        token_ids=(2**31,) * num_tokens,
        prompt_len=1,
        sampling=SamplingParams(max_tokens=1),
        price=0,
        room=1,
    )


def test_sessions_opened_at_once_are_split_into_messages_that_pass_in_order() -> None:
    many = [opened(f"s{index}", 100_000) for index in range(64)]
    parts = list(wire.in_parts(many))
    assert [message for part in parts for message in part] == many
    assert max(wire.draft_request_to_pb(part).ByteSize() for part in parts) <= 1024 * 1024
    assert wire.draft_request_to_pb(many).ByteSize() > MAX_MESSAGE_BYTES


def test_commits_that_are_too_many_for_a_message_go_in_several() -> None:
    told = to_commits(*(Commit(number, 1, [2**30 + number] * 100_000, 0.5, 8) for number in range(1, 21)))
    parts = list(wire.in_parts([told, CloseSession(number=1)]))
    sent = [commit for part in parts for message in part if isinstance(message, Commits) for commit in message]
    assert sent == [*told]
    assert parts[-1][-1] == CloseSession(number=1)
    assert max(wire.draft_request_to_pb(part).ByteSize() for part in parts) <= 1024 * 1024


def test_a_session_larger_than_a_part_has_a_part_of_its_own() -> None:
    long, close = opened("s", 1_000_000), CloseSession(number=2)
    assert list(wire.in_parts([close, long, close])) == [[close], [long], [close]]
    assert wire.draft_request_to_pb([long]).ByteSize() < MAX_MESSAGE_BYTES
    assert list(wire.in_parts([])) == []


def test_a_drafters_answers_are_split_too() -> None:
    draft = SparseDraft(token_ids=tuple(range(2**31 - 64, 2**31)), weights=(MAX_WEIGHT,) * 64)
    nodes = [NodeGuess(2**30 + index, 0, 2**31 - 1, 1.0, draft) for index in range(8)]
    said = [to_drafts(SessionDrafts(index, 1, nodes)) for index in range(1, 2_000)]
    parts = list(wire.in_parts(said))
    assert [message for part in parts for message in part] == said
    assert len(parts) > 1
    assert max(wire.draft_response_to_pb(part).ByteSize() for part in parts) <= 1024 * 1024


def test_nodes_of_too_many_sessions_for_a_message_go_in_several() -> None:
    nodes = [NodeGuess(1 + index, index, 5, 1.0) for index in range(256)]
    sessions = [SessionDrafts(number, 1, nodes) for number in range(1, 1001)]
    parts = list(wire.in_parts([to_drafts(*sessions)]))
    assert max(wire.draft_response_to_pb(part).ByteSize() for part in parts) <= 1024 * 1024
    received = [each for part in parts for each in wire.draft_response_from_pb(wire.draft_response_to_pb(part))[1]]
    assert [session.number for each in received if isinstance(each, Drafts) for session in by_session(each)] == [
        *range(1, 1001)
    ]


def test_a_part_has_at_most_as_many_messages_as_a_peer_reads() -> None:
    closes = [CloseSession(number=number) for number in range(1, 1001)]
    parts = list(wire.in_parts(closes))
    assert [len(part) for part in parts] == [256, 256, 256, 232]
    assert [wire.draft_request_from_pb(wire.draft_request_to_pb(part))[1] for part in parts] == parts
    lagging = [LaggingSession(number=number, have_len=0) for number in range(1, 258)]
    with pytest.raises(RemoteProtocolError, match="DraftResponse: has 257 entries, at most 256 are allowed"):
        wire.draft_response_from_pb(wire.draft_response_to_pb(lagging))


@given(st.floats(0, 1))
def test_a_confidence_loses_at_most_half_a_255th(confidence: float) -> None:
    guess = NodeGuess(node_id=1, parent_id=0, token_id=5, confidence=confidence)
    sent = to_drafts(SessionDrafts(1, 1, [guess]))
    _, (received,) = wire.draft_response_from_pb(wire.draft_response_to_pb([sent]))
    assert isinstance(received, Drafts)
    assert abs(received.confidences[0] - confidence) <= 0.5 / 255 + 1e-12


REQUEST = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1,),
    sampling=SamplingParams(max_tokens=100, logprobs=3),
    speculation=SpeculationParams(),
    traceparent=TRACEPARENT,
    whole=True,
)


@given(outcomes, st.booleans(), st.lists(numbers, max_size=3))
def test_a_log_comes_back_session_by_session(told: list[Any], alive: bool, taken: list[int]) -> None:
    part = said(enumerate(told, start=1), alive=alive, taken=taken)
    message = verifier_pb2.VerifyResponse.FromString(wire.log_to_pb(part).SerializeToString())
    # The second session has left meanwhile.
    sessions = {number: wire.AskedSession(request=REQUEST, vocab_size=VOCAB_SIZE) for number in (1, 3, 4)}
    read = wire.log_from_pb(message, sessions, last_number=4)
    received = [*heard(read)]
    wanted = [each for each in enumerate(told, start=1) if each[0] != 2]
    tokens = [each for each in wanted if isinstance(each[1], Step)]
    errors = [each for each in wanted if isinstance(each[1], PacelineError)]
    assert (message.alive, message.taken) == (alive, taken)
    assert received[: len(tokens)] == tokens
    known = [(number, type(each), vars(each), str(each)) for number, each in errors]
    assert [(number, type(each), vars(each), str(each)) for number, each in received[len(tokens) :]] == known
    assert all(sessions[number].num_generated == len(each.token_ids) for number, each in tokens)
