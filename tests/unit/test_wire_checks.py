"""What a peer leaves out takes its default or is refused by name, and so is what it malforms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline import wire
from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import (
    GenerateRequest,
)
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.rpc.v1 import common_pb2, drafter_pb2, verifier_pb2

TRACEPARENT = f"00-{7:032x}-{9:016x}-01"
REQUEST = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=3),
    speculation=SpeculationParams(),
)


@pytest.mark.parametrize("field", ["session_id", "prompt_token_ids", "sampling"])
def test_a_generate_request_without_a_needed_field_is_refused_by_name(field: str) -> None:
    message = wire.generate_request_to_pb(REQUEST)
    message.ClearField(field)  # type: ignore[arg-type]  # the stub lists the names it takes
    with pytest.raises(InvalidRequestError) as caught:
        wire.generate_request_from_pb(message)
    assert caught.value.field == field


def test_a_session_id_beyond_256_characters_is_refused() -> None:
    message = wire.generate_request_to_pb(replace(REQUEST, session_id="x" * 257))
    with pytest.raises(InvalidRequestError, match="session_id: has 257 characters, at most 256 are allowed"):
        wire.generate_request_from_pb(message)


def test_a_generate_request_without_speculation_takes_the_defaults() -> None:
    message = wire.generate_request_to_pb(replace(REQUEST, speculation=SpeculationParams(enabled=False)))
    message.ClearField("speculation")
    assert wire.generate_request_from_pb(message).speculation == SpeculationParams()


def test_sampling_fields_left_at_zero_by_a_client_are_off() -> None:
    params = wire.sampling_from_pb(common_pb2.SamplingParams(max_tokens=4))
    assert params == SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", SamplingParams(max_tokens=2**32)),
        ("top_k", SamplingParams(max_tokens=1, top_k=2**32)),
        ("stop_token_ids", SamplingParams(max_tokens=1, stop_token_ids=(-1,))),
        ("allowed_token_ids", SamplingParams(max_tokens=1, allowed_token_ids=(-1,))),
        ("logit_bias", SamplingParams(max_tokens=1, logit_bias=((-1, 1.0),))),
    ],
)
def test_numbers_too_large_for_the_wire_are_refused_by_field(field: str, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wire.sampling_to_pb(params)
    assert caught.value.field == field


def draft_response(**lists: list[int]) -> drafter_pb2.DraftResponse:
    whole = {"node_ids": [1], "parent_ids": [0], "token_ids": [7], "confidences": [9]}
    entry = drafter_pb2.DraftNodes(session_id="s", epoch=1, base_len=1, **(whole | lists))
    return drafter_pb2.DraftResponse(nodes=[entry])


@pytest.mark.parametrize(
    "lists",
    [
        {"parent_ids": []},
        {"token_ids": [1, 2]},
        {"confidences": []},
        {"confidences": [256]},
        {"node_ids": [0]},
    ],
)
def test_a_malformed_tree_is_refused_by_field(lists: dict[str, list[int]]) -> None:
    (field,) = lists
    with pytest.raises(RemoteProtocolError, match=rf"DraftNodes\.{field}"):
        wire.draft_response_from_pb(draft_response(**lists))


def test_a_distribution_is_wanted_for_every_node_or_for_none() -> None:
    message = draft_response(node_ids=[1, 2], parent_ids=[0, 1], token_ids=[7, 7], confidences=[9, 9])
    message.nodes[0].drafts.add(token_ids=[7], weights=[1])
    with pytest.raises(RemoteProtocolError, match=r"DraftNodes\.drafts: has 1 entries, node_ids has 2"):
        wire.draft_response_from_pb(message)


@pytest.mark.parametrize(
    ("token_ids", "weights", "problem"),
    [
        ([], [], "token_ids: must have from 1 to 64 entries, got 0"),
        (list(range(65)), [1] * 65, "token_ids: must have from 1 to 64 entries, got 65"),
        ([7, 8], [1], "weights: has 1 entries, token_ids has 2"),
        ([7, 8, 7], [1, 1, 1], "token_ids: names a token twice"),
        ([8, 9], [1, 1], "token_ids: the guess 7 is not among them"),
        ([7, 8], [1, 0], "weights: must be from 1 to 65535, got 0 to 1"),
        ([7, 8], [1, 65536], "weights: must be from 1 to 65535, got 1 to 65536"),
    ],
)
def test_a_malformed_distribution_is_refused_by_field(token_ids: list[int], weights: list[int], problem: str) -> None:
    message = draft_response()
    message.nodes[0].drafts.add(token_ids=token_ids, weights=weights)
    with pytest.raises(RemoteProtocolError, match=f"SparseDraft.{problem}"):
        wire.draft_response_from_pb(message)


OPEN = drafter_pb2.OpenSession(
    session_id="s",
    epoch=1,
    token_ids=[1, 2],
    prompt_len=2,
    sampling=common_pb2.SamplingParams(max_tokens=1),
    price=0.5,
)


def changed(**fields: object) -> drafter_pb2.OpenSession:
    entry = drafter_pb2.OpenSession()
    entry.CopyFrom(OPEN)
    for name, value in fields.items():
        setattr(entry, name, value)
    return entry


def without_sampling() -> drafter_pb2.OpenSession:
    entry = changed()
    entry.ClearField("sampling")
    return entry


def with_bad_sampling() -> drafter_pb2.OpenSession:
    entry = changed()
    entry.sampling.temperature = -1.0
    return entry


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (without_sampling(), "OpenSession.sampling"),
        (with_bad_sampling(), "OpenSession.sampling.temperature"),
        (changed(prompt_len=3), "OpenSession.prompt_len"),
        (changed(prompt_len=0), "OpenSession.prompt_len"),
        (changed(price=float("nan")), "OpenSession.price"),
        (changed(price=1.5), "OpenSession.price"),
        (changed(acceptance="lucky"), "OpenSession.acceptance"),
        (changed(traceparent="01"), "OpenSession.traceparent"),
        (changed(traceparent=TRACEPARENT + "\n"), "OpenSession.traceparent"),
        (changed(session_id=""), "OpenSession.session_id"),
        (changed(session_id="x" * 257), "OpenSession.session_id"),
    ],
)
def test_a_malformed_open_is_refused_by_field(entry: drafter_pb2.OpenSession, field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=field.replace(".", r"\.")):
        wire.draft_request_from_pb(drafter_pb2.DraftRequest(opens=[entry]))


def test_an_identity_without_vocabulary_is_refused() -> None:
    request = drafter_pb2.DraftRequest(target=common_pb2.ModelIdentity(name="demo"))
    with pytest.raises(RemoteProtocolError, match=r"ModelIdentity\.vocab_hash"):
        wire.draft_request_from_pb(request)


def test_log_probabilities_must_be_one_a_token() -> None:
    message = verifier_pb2.VerifierGenerateResponse(token_ids=[1, 2], logprobs=[common_pb2.PositionLogprobs()])
    with pytest.raises(RemoteProtocolError, match="logprobs"):
        wire.committed_from_pb(message)


def test_a_result_without_finish_reason_is_refused() -> None:
    message = verifier_pb2.VerifierGenerateResponse(result=verifier_pb2.VerifierGenerateResult())
    with pytest.raises(RemoteProtocolError, match="finish_reason"):
        wire.committed_from_pb(message)


@pytest.mark.parametrize(
    ("fates", "problem"),
    [([verifier_pb2.TOKEN_FATE_PLAIN], "1 entries for 2 tokens"), ([verifier_pb2.TOKEN_FATE_PLAIN, 77], "got 77")],
)
def test_fates_must_be_known_and_as_many_as_tokens(fates: list[int], problem: str) -> None:
    message = verifier_pb2.VerifierGenerateResponse(token_ids=[4, 5], token_fates=fates)
    with pytest.raises(RemoteProtocolError, match=f"VerifierGenerateResponse.token_fates: .*{problem}"):
        wire.committed_from_pb(message)
